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
from accelerate.data_loader.iterable_shard import ReadSegment, state_of_dataset, stream_with_state
from accelerate.data_loader.permutation import ConstantMemorySampler, SeedableRandomSampler
from accelerate.data_loader.position import (
    Offset,
    Position,
    ResumePoint,
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
    position: Position = loader.position
    if position.resume_point is not None:  # nothing was read since it was loaded
        return {**position.resume_point.state, "epoch": loader.iteration}
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
        "generators": [generator.get_state() for generator in generators_of(loader)],
        "seed": getattr(loader.get_sampler(), "initial_seed", None),
        "computes_order": _computes_order(loader),
        "workers_epoch": position.workers_epoch if is_between else position.workers_epoch_at_start,
    }


def is_state(state: Any) -> bool:
    """Returns whether an object is a state that `capture` returned, in any version."""
    return isinstance(state, Mapping) and {"version", "seen", "consumed", "generators"} <= state.keys()


def restore(loader: Any, state: Mapping[str, Any], streams: Mapping[str, Any] | None = None) -> None:
    """Restores the order and position of a loader, also from a run with another number of processes.

    Args:
        loader: The prepared loader.
        state: The state that `capture` returned.
        streams: The states that `capture_stream` returned.

    Raises:
        CheckpointError: If the state is not that of a loader, or of one with another order.
    """
    streams = streams or {}
    epoch, point = _decode(loader, state, streams)
    _refuse_other_sampler(loader, state)
    _refuse_order_drawn_while_read(loader, point)
    start = _match_generators(loader, state["generators"], point.start_states)
    if state.get("seed") is not None and hasattr(sampler := loader.get_sampler(), "initial_seed"):
        sampler.initial_seed = state["seed"]
    loader.set_epoch(epoch)
    position: Position = loader.position
    position.end()
    position.resume_point = replace(point, start_states=start)
    position.num_restored += 1
    position.workers_epoch = state.get("workers_epoch")
    position.was_left_early = position.stream_may_be_over = False
    loader.base_dataloader._iterator = None  # its workers are ahead of the checkpoint
    loader.dl_state_dict = None
    if loader.torchdata_resumes:
        loader.base_dataloader.load_state_dict({})  # drops an iterator that was made for its state, too
        loader.base_dataloader.next_iter_state = None
    if point.by_torchdata:
        loader.padding_source.restored = streams.get("first", [])
        loader.load_state_dict(streams["torchdata"])


def _decode(loader: Any, state: Mapping[str, Any], streams: Mapping[str, Any]) -> tuple[int, ResumePoint]:
    """Returns the epoch and the position of a state."""
    try:
        version = state["version"]
        offset = Offset(int(state["seen"]), int(state["consumed"]))
        groups, is_over = int(state["groups"]), bool(state["is_over"])
        used = tuple(ReadSegment(*segment) for segment in state.get("used", ()))
        epoch, start, _ = int(state["epoch"]), state["start"], state["generators"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"this is no position of a loader: {error!r}") from error
    if version != VERSION:
        raise CheckpointError(f"the position of a loader has version {version}, and this one reads {VERSION}")
    rows = state.get("rows_in_batch")
    is_same = (groups, rows) == (loader.plan.groups, loader.plan.rows_in_batch)
    is_within_epoch = offset.seen > 0 and not is_over
    by_torchdata = is_same and "torchdata" in streams and loader.torchdata_resumes
    by_torchdata = by_torchdata and is_within_epoch and not used
    if by_torchdata and isinstance(loader.dataset, IterableDataset):
        by_torchdata = torch_private.has_dataset_state(streams["torchdata"])
    stream = streams.get("dataset") if by_torchdata else _saved_stream(loader, streams)
    return epoch, ResumePoint(
        offset._replace(stream=stream),
        start,
        groups,
        is_over=is_over,
        ends_step=bool(state.get("ends_step", True)),
        global_batch_size=state.get("global_batch_size"),
        is_dispatched=bool(state.get("is_dispatched")),
        has_own_shards=bool(state.get("own_shares")),
        rows_in_batch=rows,
        state=dict(state),
        streams=dict(streams),
        by_torchdata=by_torchdata,
        used=used,
        num_workers=state.get("num_workers"),
        read_states=streams.get("read") if is_same and is_within_epoch else None,
    )


def _computes_order(loader: Any) -> bool:
    return isinstance(loader.get_sampler(), ConstantMemorySampler)


def _refuse_other_sampler(loader: Any, state: Mapping[str, Any]) -> None:
    """Raises an error within an epoch if the sampler is of another kind, and would yield another order."""
    before, now = bool(state.get("computes_order")), _computes_order(loader)
    if before == now or not state["seen"] or state["is_over"]:
        return
    raise CheckpointError(
        f"{loader!r} cannot go on in the middle of this epoch: use_constant_memory_sampler was {before}, is "
        f"{now} now, and gives another order. Set it to {before} until the end of the epoch, or go on from a "
        "checkpoint between two epochs."
    )


def _refuse_order_drawn_while_read(loader: Any, point: ResumePoint) -> None:
    """Raises an error within an epoch that another number of processes goes on with, if its order is lost.

    A sampler may draw each index from the generators of the process when it is read. Its order depends on
    what the training has drawn meanwhile.
    """
    sampler = list(batch_samplers_of(loader._index_sampler))[-1]
    sampler = getattr(sampler, "sampler", sampler) if type(sampler) is BatchSampler else sampler
    is_same = point.groups == loader.plan.groups or not point.offset.seen or point.is_over
    if is_same or point.start_states is None or type(sampler) in _DRAWS_AT_ONCE:
        return
    if isinstance(loader.dataset, IterableDataset) or not _draws_while_read(
        sampler, loader.dataset, point.start_states["global"]
    ):
        return
    raise CheckpointError(
        f"{loader!r} cannot go on in the middle of this epoch with another number of processes: "
        f"{type(sampler).__name__} draws its indices one after another from the generator of the process, "
        "which the training uses too. Let it draw the order when an epoch begins, or from a torch.Generator "
        f"of its own; or go on with {point.groups} data-parallel groups until the end of the epoch."
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
        loader.position.stream = state


def restore_stream(loader: Any) -> None:
    """Restores the state of the dataset from the checkpoint from which the next pass resumes."""
    point: ResumePoint | None = loader.position.resume_point
    if point is None:
        return
    is_between = point.is_over if loader.start.is_over else not point.offset.seen
    if is_between:
        _restore_between_epochs(loader, point)
    elif (stream := loader.start.offset.stream) is not None:
        stream_of(loader).load_state_dict(stream["state"])
        loader.padding_source.restored = stream["first"]


def _restore_between_epochs(loader: Any, point: ResumePoint) -> None:
    stream = stream_of(loader)
    has_own_shards = point.has_own_shards or loader.plan.has_own_shards
    is_of_other_shard = has_own_shards and point.groups != loader.plan.groups
    if stream is not None and point.offset.stream is not None and not is_of_other_shard:
        stream.load_state_dict(point.offset.stream["state"])
        loader.position.stream_may_be_over = True


def _saved_stream(loader: Any, streams: Mapping[str, Any]) -> Any:
    """Returns the saved state of the dataset, also from that of torchdata's iterator, or None."""
    if "dataset" in streams or "torchdata" not in streams or stream_of(loader) is None:
        return streams.get("dataset")
    state = torch_private.dataset_state(streams["torchdata"])
    return None if state is None else {"state": state_of_dataset(state), "first": streams.get("first", [])}


def capture_stream(loader: Any) -> dict[str, Any]:
    """Returns the position of this process in a dataset that is read in order, if it has one.

    It contains the state of the dataset, and the random states before the next batch was read.
    """
    if not is_tracked(loader):
        return {}
    position: Position = loader.position
    if position.resume_point is not None:  # nothing was read since it was loaded
        return dict(position.resume_point.streams)
    if position.read_states is None:
        return _capture_state(loader)
    # Generators differ between ranks, and the first samples of the epoch are read again to pad its end.
    drawn = {"read": position.read_states, "order": {"start": position.start_states}}
    return {**drawn, **_capture_state(loader)}


def _capture_state(loader: Any) -> dict[str, Any]:
    position: Position = loader.position
    if loader.plan.mode == "already_sharded":  # ranks shuffle by random states of their own
        generators = [generator.get_state() for generator in generators_of(loader)]
        return {"order": {"start": position.start_states, "generators": generators}}
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
    if position.was_left_early and not position.seen:
        return {}
    if stream is None or (loader.plan.mode == "dispatch" and current_transport().rank):
        return {}
    return {"dataset": {"state": stream.state_dict(), "first": []}}
