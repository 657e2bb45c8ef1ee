"""Saves and restores the position of a prepared loader within an epoch.

Checkpoints call `capture`, `capture_stream` and `restore`. The order of an epoch is not stored, but the
states of the random generators at its start. The next pass sets them, draws the order again, and sets the
generators back. A loader with `use_stateful_dataloader`, or one that `skip_first_batches` returns, skips the
indices that were used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate import rng, torch_private
from accelerate.base import CheckpointError
from accelerate.data_loader import own_states
from accelerate.data_loader.iterable_shard import ReadSegment, state_of_dataset, stream_with_state
from accelerate.data_loader.permutation import ConstantMemorySampler, SeedableRandomSampler
from accelerate.data_loader.plan import ShardPlan
from accelerate.data_loader.position import (
    Position,
    Restored,
    Tracker,
    capture_generators,
    generators_of as generators_of,
    is_tracked as is_tracked,
)
from accelerate.data_loader.rank_aware import plain_index
from accelerate.data_loader.samplers import batch_samplers_of
from accelerate.ops import current_transport

VERSION = 1
_COMPARED = 1000  # indices of an unknown sampler
_DRAWS_AT_ONCE = frozenset(
    {
        SequentialSampler,
        RandomSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
        SeedableRandomSampler,
        ConstantMemorySampler,
    }
)
"""Samplers that draw from the generators of the process before their first index only."""


def capture(loader: Any) -> dict[str, Any] | None:
    """Returns the order and position of a loader, or None if it is not prepared."""
    if not is_tracked(loader):
        return None
    tracker: Tracker = loader.tracker
    position = tracker.position
    if tracker.restored is not None:  # nothing was read since it was loaded
        return {**tracker.restored.state, "epoch": loader.iteration}
    is_between = position.start_states is None
    return {
        "version": VERSION,
        "epoch": loader.iteration,
        "seen": position.seen,
        "consumed": position.consumed,
        "groups": loader.plan.groups,
        "is_over": bool(position.seen and position.is_over),
        "ends_step": position.ends_step or not position.seen,
        "global_batch_size": loader.plan.global_batch_size,
        "own_shares": loader.plan.has_own_shards,
        "is_dispatched": loader.plan.mode == "dispatch",
        "rows_in_batch": loader.plan.rows_in_batch,
        "used": [list(segment) for segment in position.used],
        "num_workers": loader.num_workers,
        "start": position.start_states,
        **capture_generators(loader),
        "seed": getattr(loader.get_sampler(), "initial_seed", None),
        "computes_order": _computes_order(loader),
        "workers_epoch": tracker.workers_epoch if is_between else position.workers_epoch,
    }


def is_state(state: object) -> bool:
    """Returns whether an object is a state that `capture` returned, in any version."""
    return isinstance(state, Mapping) and {"version", "seen", "consumed", "generators"} <= state.keys()


def continues(state: Mapping[str, Any]) -> bool:
    """Returns whether the next pass of a loader with a state differs from the first one of a new loader."""
    is_within = state["seen"] and not state["is_over"]
    return bool(is_within or state["generators"] or state.get("samplers"))


def restore(loader: Any, state: Mapping[str, Any], streams: Mapping[str, Any] | None = None) -> None:
    """Restores the order and position of a loader, also from a run with another number of processes.

    Raises:
        CheckpointError: If the state is not that of a loader, or of one with another order.
    """
    streams = streams or {}
    restored = _decode(loader, state, streams)
    position = restored.position
    _refuse_other_sampler(loader, state)
    _refuse_order_drawn_while_read(loader, restored)
    start = _match_generators(loader, state["generators"], position.start_states)
    own_states.restore_order(loader, generators_of(loader), state.get("samplers", ()))
    own_states.restore_samples(loader, restored.streams.get("samples", ()))
    if state.get("seed") is not None and hasattr(sampler := loader.get_sampler(), "initial_seed"):
        sampler.initial_seed = state["seed"]
    loader.set_epoch(position.epoch)
    tracker: Tracker = loader.tracker
    tracker.end()
    tracker.restored = replace(restored, position=position._replace(start_states=start))
    tracker.num_restored += 1
    tracker.workers_epoch = position.workers_epoch
    tracker.was_left_early = tracker.stream_may_be_over = False
    loader.base_dataloader._iterator = None  # its workers are ahead of the checkpoint
    loader.dl_state_dict = None
    if loader.torchdata_resumes:
        loader.base_dataloader.load_state_dict({})  # drops an iterator that was made for its state, too
        loader.base_dataloader.next_iter_state = None
    if restored.by_torchdata:
        loader.padding_source.restored = streams.get("first", [])
        loader.load_state_dict(streams["torchdata"])


def _decode(loader: Any, state: Mapping[str, Any], streams: Mapping[str, Any]) -> Restored:
    """Returns the position of a state, with the plan of the run that saved it."""
    try:
        version, rows = state["version"], state.get("rows_in_batch")
        position = Position(
            int(state["epoch"]),
            int(state["seen"]),
            int(state["consumed"]),
            bool(state["is_over"]),
            bool(state.get("ends_step", True)),
            used=tuple(ReadSegment(*segment) for segment in state.get("used", ())),
            start_states=state["start"],
            workers_epoch=state.get("workers_epoch"),
        )
        groups, _ = int(state["groups"]), state["generators"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"this is not the position of a loader: {error!r}") from error
    if version != VERSION:
        raise CheckpointError(f"the position of a loader has version {version}, and this one reads {VERSION}")
    is_same = (groups, rows) == (loader.plan.groups, loader.plan.rows_in_batch)
    is_same = is_same and position.seen > 0 and not position.is_over
    by_torchdata = is_same and "torchdata" in streams and loader.torchdata_resumes and not position.used
    if by_torchdata and isinstance(loader.dataset, IterableDataset):
        by_torchdata = torch_private.has_dataset_state(streams["torchdata"])
    stream = streams.get("dataset") if by_torchdata else _saved_stream(loader, streams)
    position = position._replace(stream=stream, read_states=streams.get("read") if is_same else None)
    mode: Any = "dispatch" if state.get("is_dispatched") else "shard"
    mode = "already_sharded" if state.get("own_shares") else mode
    if groups != loader.plan.groups:  # the samples of a rank are others
        streams = {name: value for name, value in streams.items() if name != "samples"}
    plan = ShardPlan(mode, groups, batch_size=rows, global_batch_size=state.get("global_batch_size"))
    return Restored(position, plan, dict(state), dict(streams), by_torchdata)


def _computes_order(loader: Any) -> bool:
    return isinstance(loader.get_sampler(), ConstantMemorySampler)


def _refuse_other_sampler(loader: Any, state: Mapping[str, Any]) -> None:
    """Raises an error within an epoch if the sampler is of another kind, and would yield another order."""
    before, now = bool(state.get("computes_order")), _computes_order(loader)
    if before == now or not state["seen"] or state["is_over"]:
        return
    raise CheckpointError(
        f"{loader!r} cannot continue in the middle of this epoch: use_constant_memory_sampler was {before} "
        f"and is {now} now, which changes the order. Set it to {before} until the end of the epoch, or "
        "continue from a checkpoint between two epochs."
    )


def _refuse_order_drawn_while_read(loader: Any, restored: Restored) -> None:
    """Raises an error within an epoch if its order is lost with another number of processes.

    A sampler may draw each index from the generators of the process when it is read. Its order depends on
    what the training has drawn meanwhile.
    """
    sampler = list(batch_samplers_of(loader._index_sampler))[-1]
    sampler = getattr(sampler, "sampler", sampler) if type(sampler) is BatchSampler else sampler
    position, groups = restored.position, restored.plan.groups
    is_same = groups == loader.plan.groups or not position.seen or position.is_over
    if is_same or position.start_states is None or type(sampler) in _DRAWS_AT_ONCE:
        return
    if isinstance(loader.dataset, IterableDataset) or not _draws_while_read(
        sampler, loader.dataset, position.start_states["global"]
    ):
        return
    raise CheckpointError(
        f"{loader!r} cannot continue in the middle of this epoch with another number of processes: "
        f"{type(sampler).__name__} draws its indices one after another from the generator of the process, "
        "which the training uses too. Draw the order when an epoch begins, draw it from a separate "
        f"torch.Generator, or continue with {groups} data-parallel groups until the end of the epoch."
    )


def _draws_while_read(sampler: Any, dataset: Any, states: dict[str, Any]) -> bool:
    """Returns whether the order of a sampler changes if others draw random numbers while it is read."""
    now, orders = rng.capture(), list[list[Any]]()
    try:
        for is_disturbed in (False, True):
            rng.restore(states)
            own = iter(deepcopy(sampler, {id(dataset): dataset}))
            orders.append([])
            for index in islice(own, _COMPARED):
                orders[-1].append(plain_index(index))
                if is_disturbed:
                    rng.advance()
    except Exception:  # one that cannot be copied, or iterated here
        return False
    finally:
        rng.restore(now)
    return orders[0] != orders[1]


def _match_generators(
    loader: Any, own_states: list[torch.Tensor], start: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Sets the generators of a loader, and returns their states at the start of its epoch.

    A sampler without its own generator gets one when several processes shard its order. The state of that
    generator is None at the start of an epoch that a run of one process has begun without it.
    """
    generators, sampler = generators_of(loader), loader.get_sampler()
    own = getattr(sampler, "generator", None)
    if len(generators) == len(own_states) - 1 and own is None and hasattr(sampler, "generator"):
        sampler.generator = torch.Generator()
        generators = generators_of(loader)
    elif len(generators) == len(own_states) + 1 and any(own is generator for generator in generators):
        index = next(index for index, generator in enumerate(generators) if generator is own)
        del generators[index]
        if start is not None:
            states = list(start["generators"])
            states.insert(index, None)
            start = {**start, "generators": states}
    if len(generators) != len(own_states):
        raise CheckpointError(
            f"the loader had {len(own_states)} random generators, and {loader!r} has {len(generators)}: "
            "prepare a loader that shuffles in the same way"
        )
    for generator, state in zip(generators, own_states, strict=True):
        generator.set_state(state)
    return start


# Datasets that are read in order


def stream_of(loader: Any) -> Any:
    """Returns the iterable dataset whose state can be captured while it is read, or None."""
    return None if loader.num_workers else stream_with_state(loader.dataset)


def source_state(loader: Any) -> Callable[[], Any] | None:
    """Returns a function that captures the state after the batch just read, or None if there is no state."""
    if loader.torchdata_resumes:
        return lambda: loader.iterator.state_dict()
    stream = stream_of(loader)
    if stream is None:
        return None
    return lambda: {"state": stream.state_dict(), "first": loader.padding_source.items}


def keep_source_state(loader: Any, state: Any) -> None:
    """Keeps the state after the batch that is yielded next."""
    if loader.torchdata_resumes:
        loader.dl_state_dict = state
        loader.adjust_state_dict_for_prefetch()
    else:
        loader.tracker.stream = state


def restore_stream(loader: Any) -> None:
    """Restores the state of the dataset from the checkpoint from which the next pass resumes."""
    restored: Restored | None = loader.tracker.restored
    if restored is None:
        return
    position, start = restored.position, loader.start.position
    is_between = position.is_over if start.is_over else not position.seen
    if is_between:
        _restore_between_epochs(loader, restored)
    elif (stream := start.stream) is not None:
        stream_of(loader).load_state_dict(stream["state"])
        loader.padding_source.restored = stream["first"]


def _restore_between_epochs(loader: Any, restored: Restored) -> None:
    stream, saved = stream_of(loader), restored.position.stream
    has_own_shards = restored.plan.has_own_shards or loader.plan.has_own_shards
    is_of_other_shard = has_own_shards and restored.plan.groups != loader.plan.groups
    if stream is not None and saved is not None and not is_of_other_shard:
        stream.load_state_dict(saved["state"])
        loader.tracker.stream_may_be_over = True


def _saved_stream(loader: Any, streams: Mapping[str, Any]) -> Any:
    """Returns the saved state of the dataset, also from that of torchdata's iterator, or None."""
    if "dataset" in streams or "torchdata" not in streams or stream_of(loader) is None:
        return streams.get("dataset")
    state = torch_private.dataset_state(streams["torchdata"])
    return None if state is None else {"state": state_of_dataset(state), "first": streams.get("first", [])}


def capture_stream(loader: Any) -> dict[str, Any]:
    """Returns what only this process has of the position, such as that in a dataset that is read in order.

    It contains the state of the dataset, the random states before the next batch was read, and those of the
    generators of a map-style dataset and of the collate function.
    """
    if not is_tracked(loader):
        return {}
    position: Position = loader.position
    if loader.tracker.restored is not None:  # nothing was read since it was loaded
        return dict(loader.tracker.restored.streams)
    samples = own_states.capture_samples(loader)
    drawn: dict[str, Any] = {"samples": samples} if samples else {}
    if position.read_states is None:
        return {**drawn, **_capture_state(loader)}
    # Generators differ between ranks, and the first samples of the epoch are read again to pad its end.
    drawn |= {"read": position.read_states, "order": {"start": position.start_states}}
    return {**drawn, **_capture_state(loader)}


def _capture_state(loader: Any) -> dict[str, Any]:
    position: Position = loader.position
    if loader.plan.mode == "already_sharded":  # ranks shuffle by random states of their own
        return {"order": {"start": position.start_states, **capture_generators(loader)}}
    if not position.seen or (position.is_over and loader.torchdata_resumes):
        return _state_between_epochs(loader)
    if not loader.torchdata_resumes:
        return {} if position.stream is None else {"dataset": position.stream}
    if loader.dl_state_dict is None:  # asking torchdata would start a pass
        return {}
    return {"torchdata": loader.dl_state_dict, "first": loader.padding_source.items}


def _state_between_epochs(loader: Any) -> dict[str, Any]:
    """Returns the state of the dataset between two epochs, on the processes that read it."""
    stream = stream_of(loader)
    position: Position = loader.position
    # Most datasets begin again after a pass that was left early, and do not continue at their state.
    if loader.tracker.was_left_early and not position.seen:
        return {}
    if stream is None or (loader.plan.mode == "dispatch" and current_transport().rank):
        return {}
    return {"dataset": {"state": stream.state_dict(), "first": []}}
