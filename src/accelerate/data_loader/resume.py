"""Resume in the middle of an epoch: save where a loader is, restore it, and skip what was used.

The order of an epoch is not stored. What is stored are the states of the random generators when the epoch
began: a loader that resumes sets them, draws the order again, skips the indices it has used before, and then
sets the generators to the states that they had when the checkpoint was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import rng, torch_private
from accelerate.base import CheckpointError, wrong_value
from accelerate.data_loader.permutation import ConstantMemorySampler
from accelerate.data_loader.plan import BY_HAND
from accelerate.data_loader.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SamplerShard,
    Segment,
    SkipBatchSampler,
    chain_of,
)
from accelerate.data_loader.stateful_shard import state_of_whole, stream_with_state
from accelerate.ops import current_transport

VERSION = 1

Loader = TypeVar("Loader", bound=DataLoader[Any])


class Offset(NamedTuple):
    """A point in an epoch, between two batches."""

    seen: int = 0  # batches that the loop has taken in this epoch, over all its interruptions
    consumed: int = 0  # batches of the dataset that this took, for all groups together
    stream: Any = None  # state of an iterable dataset, with the samples that fill the end of the epoch


BEGINNING = Offset()


@dataclass(frozen=True)
class ResumePoint:
    offset: Offset
    start_states: Mapping[str, Any] | None  # of the random generators; None between two epochs
    groups: int
    is_over: bool = False  # it was behind the last batch of the epoch
    own_shares: bool = False  # the groups read shards that the dataset made
    rows_in_batch: int | None = None  # samples in a batch of the dataset; None where that was not known
    state: Mapping[str, Any] = field(default_factory=dict)  # as `capture` returned it
    streams: Mapping[str, Any] = field(default_factory=dict)  # as `capture_stream` returned it
    by_torchdata: bool = False  # its iterator resumes by itself
    used: tuple[Segment, ...] = ()  # before the number of groups or the batch size last changed
    num_workers: int | None = None  # None where that was not saved
    read_states: Mapping[str, Any] | None = None  # as in `Position`


@dataclass(frozen=True)
class LateStart:
    """Where each pass of a loader begins."""

    offset: Offset = BEGINNING
    origin: Any = None  # the loader of which this one is a late start; both count epochs together
    skip_source: int = 0  # batches of the dataset that are read and dropped, besides `skip_batches`
    keeps_first_round: bool = False  # the first round of the epoch is read nevertheless, to fill its end
    is_over: bool = False  # nothing is left of the epoch
    used: tuple[Segment, ...] = ()  # as in `ResumePoint`


@dataclass(eq=False)
class Position:
    """The position within the epoch of a loader and all late starts of it."""

    offset: Offset = BEGINNING  # behind the batch just yielded; the beginning between two passes
    is_over: bool = False  # the batch just yielded is the last one
    start_states: Mapping[str, Any] | None = None  # of the random generators when the pass began
    read_states: Mapping[str, Any] | None = None
    """Of the random generators before the batch after this one was read; None where reading draws nothing."""
    resume_point: ResumePoint | None = None  # None once the next pass has begun
    num_restored: int = 0  # how often a checkpoint was loaded
    workers_epoch: int | None = None  # in which persistent workers started first; None before
    workers_epoch_at_start: int | None = None  # of the pass
    was_left_early: bool = False  # the latest pass, before its last batch
    stream_may_be_over: bool = False  # the dataset has its state from the end of an epoch
    used: tuple[Segment, ...] = ()  # of this epoch, as in `ResumePoint`

    def begin(self, loader: Any, offset: Offset) -> Callable[[], None]:
        """Begin a pass, before anything is drawn for it; call what is returned when the order is drawn: it
        restores the random states of the checkpoint."""
        point, self.resume_point = self.resume_point, None
        self.offset, self.used, self.read_states = offset, loader.start.used, None
        self.workers_epoch_at_start = self.workers_epoch
        if point is None or point.start_states is None:
            own = [generator.get_state() for generator in generators_of(loader)]
            self.start_states = {"global": rng.capture_on_cpu(), "generators": own}
            return lambda: None
        now = rng.capture()
        self.start_states = point.start_states
        restore_start(loader)
        return lambda: rng.restore(now)

    def end_resumed(self, offset: Offset, loader: Any) -> None:
        """Begin a pass behind the last batch of an epoch."""
        self.resume_point, self.offset, self.is_over = None, offset, True
        if loader.persistent_workers and self.workers_epoch is None:
            self.workers_epoch = loader.iteration

    def advance(self, batches: int) -> None:
        """Count a batch of the loop, which took some batches of the dataset."""
        seen, consumed, stream = self.offset
        self.offset = Offset(seen + 1, consumed + batches, stream)

    def end(self) -> None:
        self.offset, self.used = BEGINNING, ()
        self.is_over = False
        self.start_states = self.read_states = None


# Save and restore


def is_tracked(loader: Any) -> bool:
    """Whether a loader knows its order and position: prepared ones do."""
    return isinstance(getattr(loader, "position", None), Position)


def capture(loader: Any) -> dict[str, Any] | None:
    """Return the order and position of a loader; None for one that is not prepared."""
    if not is_tracked(loader):
        return None
    position: Position = loader.position
    if position.resume_point is not None:  # nothing was read since it was loaded
        return {**position.resume_point.state, "epoch": loader.iteration}
    is_between = position.start_states is None
    return {
        "version": VERSION,
        "epoch": loader.iteration,
        "seen": position.offset.seen,
        "consumed": position.offset.consumed,
        "groups": loader.plan.groups,
        "is_over": bool(position.offset.seen and position.is_over),
        "own_shares": loader.plan.own_shares,
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
    """Whether an object is what `capture` returns, of any version."""
    return isinstance(state, Mapping) and {"version", "seen", "consumed", "generators"} <= state.keys()


def restore(loader: Any, state: Mapping[str, Any], streams: Mapping[str, Any] | None = None) -> None:
    """Restore the order and position of a loader, also from a run with another number of processes.

    `streams` is what `capture_stream` returned.
    """
    streams = streams or {}
    try:
        version = state["version"]
        offset = Offset(int(state["seen"]), int(state["consumed"]))
        epoch, groups, own_states = int(state["epoch"]), int(state["groups"]), state["generators"]
        used = tuple(Segment(*segment) for segment in state.get("used", ()))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"this is no position of a loader: {error!r}") from error
    if version != VERSION:
        raise CheckpointError(f"the position of a loader has version {version}, and this one reads {VERSION}")
    _refuse_other_sampler(loader, state)
    start = _match_generators(loader, own_states, state["start"], state.get("workers_epoch") is not None)
    if state.get("seed") is not None and hasattr(sampler := loader.get_sampler(), "initial_seed"):
        sampler.initial_seed = state["seed"]
    loader.set_epoch(epoch)
    loader.position.end()
    own_shares, is_over = bool(state.get("own_shares")), bool(state["is_over"])
    rows = state.get("rows_in_batch")
    is_same = (groups, rows) == (loader.plan.groups, loader.plan.rows_in_batch)
    by_torchdata = is_same and "torchdata" in streams and loader.torchdata_resumes
    by_torchdata = by_torchdata and offset.seen > 0 and not is_over and not used
    if by_torchdata and isinstance(loader.dataset, IterableDataset):
        by_torchdata = torch_private.has_dataset_state(streams["torchdata"])
    offset = offset._replace(
        stream=streams.get("dataset") if by_torchdata else _saved_stream(loader, streams)
    )
    position: Position = loader.position
    position.resume_point = ResumePoint(
        offset,
        start,
        groups,
        is_over,
        own_shares,
        rows,
        dict(state),
        dict(streams),
        by_torchdata,
        used,
        state.get("num_workers"),
        streams.get("read") if is_same and offset.seen and not is_over else None,
    )
    position.num_restored += 1
    position.workers_epoch = state.get("workers_epoch")
    position.was_left_early = position.stream_may_be_over = False
    loader.base_dataloader._iterator = None  # its workers are ahead of the checkpoint
    loader.dl_state_dict = None
    if loader.torchdata_resumes:
        loader.base_dataloader.load_state_dict({})  # an iterator that was made for its state is dropped, too
        loader.base_dataloader.next_iter_state = None
    if by_torchdata:
        loader.first_round.restored = streams.get("first", [])
        loader.load_state_dict(streams["torchdata"])


def _computes_order(loader: Any) -> bool:
    return isinstance(loader.get_sampler(), ConstantMemorySampler)


def _refuse_other_sampler(loader: Any, state: Mapping[str, Any]) -> None:
    """A random order by another sampler has other samples behind a position within the epoch."""
    before, now = bool(state.get("computes_order")), _computes_order(loader)
    if before == now or not state["seen"] or state["is_over"]:
        return
    raise CheckpointError(
        f"{loader!r} cannot go on in the middle of this epoch: use_constant_memory_sampler was {before}, is "
        f"{now} now, and gives another order. Set it to {before} until the end of the epoch, or go on from a "
        "checkpoint between two epochs."
    )


def _match_generators(
    loader: Any, own_states: list[torch.Tensor], start: Mapping[str, Any] | None, has_workers: bool
) -> Mapping[str, Any] | None:
    """Set the generators of a loader, and return the states that they have at the start of its epoch.

    A shuffle without its own generator gets one when several processes share it. Between a run of one process
    and one of several, the states are converted between their ways of shuffling.
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
            states.insert(index, _state_of_plain_shuffle(start["global"]["torch"], has_workers))
            start = {**start, "generators": states}
    if len(generators) != len(own_states):
        raise CheckpointError(
            f"the loader had {len(own_states)} random generators, and {loader!r} has {len(generators)}: "
            "prepare a loader that shuffles in the same way"
        )
    for generator, state in zip(generators, own_states, strict=True):
        generator.set_state(state)
    return start


def _state_of_plain_shuffle(torch_state: torch.Tensor, has_workers: bool = False) -> torch.Tensor:
    """The generator of torch's shuffle, which is seeded from the global one, after the seed of the workers
    unless the pass began with the persistent ones of an earlier pass."""
    source = torch.Generator()
    source.set_state(torch_state)
    num_draws = 1 if has_workers else 2
    draws = [int(torch.empty((), dtype=torch.int64).random_(generator=source)) for _ in range(num_draws)]
    return torch.Generator().manual_seed(draws[-1]).get_state()


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that belong to a loader, its samplers and its dataset, each once."""
    dataset = loader.dataset
    owners: list[Any] = [loader, loader.get_sampler(), dataset, getattr(dataset, "dataset", None)]
    owners += chain_of(loader._index_sampler)
    generators = [
        generator
        for name in ("generator", "synchronized_generator")
        for owner in owners
        if not hasattr(owner, "initial_seed")  # its order depends on its seed and the epoch only
        if isinstance(generator := getattr(owner, name, None), torch.Generator)
    ]
    return list({id(generator): generator for generator in generators}.values())


# Datasets that are read in order


def stream_of(loader: Any) -> Any:
    """Return the iterable dataset whose state can be captured as it is read; None without one."""
    return None if loader.num_workers else stream_with_state(loader.dataset)


def source_state(loader: Any) -> Callable[[], Any] | None:
    """Return what captures the state behind the batch just read, before the next one is; None without one."""
    if loader.torchdata_resumes:
        return lambda: loader.iterator.state_dict()
    stream = stream_of(loader)
    if stream is None:
        return None
    return lambda: {"state": stream.state_dict(), "first": loader.first_round.items}


def keep_source_state(loader: Any, state: Any) -> None:
    if loader.torchdata_resumes:
        loader.dl_state_dict = state
        loader.adjust_state_dict_for_prefetch()
    else:
        loader.position.offset = loader.position.offset._replace(stream=state)


def restore_stream(loader: Any) -> None:
    """Restore the state of the dataset from the checkpoint from which the next pass resumes."""
    point: ResumePoint | None = loader.position.resume_point
    if point is None:
        return
    is_between = point.is_over if loader.start.is_over else not point.offset.seen
    if is_between:
        _restore_between_epochs(loader, point)
    elif (stream := loader.start.offset.stream) is not None:
        stream_of(loader).load_state_dict(stream["state"])
        loader.first_round.restored = stream["first"]


def _restore_between_epochs(loader: Any, point: ResumePoint) -> None:
    stream = stream_of(loader)
    is_of_other_share = point.groups != loader.plan.groups and (point.own_shares or loader.plan.own_shares)
    if stream is not None and point.offset.stream is not None and not is_of_other_share:
        stream.load_state_dict(point.offset.stream["state"])
        loader.position.stream_may_be_over = True


def _saved_stream(loader: Any, streams: Mapping[str, Any]) -> Any:
    """The saved state of the dataset, also from the state of torchdata's iterator; None without one."""
    if "dataset" in streams or "torchdata" not in streams or stream_of(loader) is None:
        return streams.get("dataset")
    state = torch_private.dataset_state(streams["torchdata"])
    return None if state is None else {"state": state_of_whole(state), "first": streams.get("first", [])}


def capture_stream(loader: Any) -> dict[str, Any]:
    """Return what this process reads of a dataset that is read in order: the state of the dataset, and the
    random states before the next batch was read; empty without any."""
    if not is_tracked(loader):
        return {}
    position: Position = loader.position
    if position.resume_point is not None:  # nothing was read since it was loaded
        return dict(position.resume_point.streams)
    if position.read_states is None:
        return _capture_state(loader)
    # Generators differ between ranks, and the first samples of the epoch are read again to fill its end.
    drawn = {"read": position.read_states, "order": {"start": position.start_states}}
    return {**drawn, **_capture_state(loader)}


def _capture_state(loader: Any) -> dict[str, Any]:
    position: Position = loader.position
    if loader.plan.how == "already_sharded":  # ranks shuffle by random states of their own
        generators = [generator.get_state() for generator in generators_of(loader)]
        return {"order": {"start": position.start_states, "generators": generators}}
    if not position.offset.seen or (position.is_over and loader.torchdata_resumes):
        return _live_stream(loader)
    if not loader.torchdata_resumes:
        return {} if position.offset.stream is None else {"dataset": position.offset.stream}
    if loader.dl_state_dict is None:  # to ask torchdata would start a pass
        return {}
    return {"torchdata": loader.dl_state_dict, "first": loader.first_round.items}


def restore_start(loader: Any) -> None:
    """Set the random generators to the states in which the pass began."""
    states = loader.position.start_states
    rng.restore(states["global"])
    for generator, state in zip(generators_of(loader), states["generators"], strict=True):
        generator.set_state(state)


def _live_stream(loader: Any) -> dict[str, Any]:
    """The state of the dataset between two epochs, on the processes that read it."""
    stream = stream_of(loader)
    position: Position = loader.position
    # Most datasets begin again after a pass that was left early, and do not continue at their state.
    if position.was_left_early and not position.offset.seen:
        return {}
    if stream is None or (loader.plan.how == "dispatch" and current_transport().rank):
        return {}
    return {"dataset": {"state": stream.state_dict(), "first": []}}


# Late starts


def skip_first_batches(dataloader: Loader, num_batches: int = 0) -> Loader:
    """A loader like this one that starts `num_batches` batches late, at each of its passes.

    Map-style data is skipped by its indices, without reading a sample; iterable data has to be read. The
    loader that was given does not change; both count epochs together, so that it continues with the next
    epoch.

    Args:
        dataloader: A prepared loader, or a plain one.
        num_batches: How many batches of this process to skip.

    Returns:
        A loader of the same kind; a plain one over iterable data becomes a `SkipDataLoader`.

    Raises:
        ConfigurationError: A negative number of batches.
    """
    if num_batches < 0:
        raise wrong_value(
            "num_batches", num_batches, "batches that were never read cannot be put back", "use 0 or more"
        )
    loader: Any = dataloader
    inner = getattr(loader, "dataloader", None)
    if is_tracked(inner):  # a loader around a prepared one, as on XLA devices
        late: Any = type(loader)(start_late(inner, num_batches), loader.target)
    elif is_tracked(loader):
        late = start_late(loader, num_batches)
    elif isinstance(loader.dataset, IterableDataset):
        from accelerate.data_loader.loaders import SkipDataLoader  # builds on this file

        late = SkipDataLoader.from_plain(loader, num_batches)
    else:
        late = _reordered(loader, partial(SkipBatchSampler, skip_batches=num_batches))
    return late  # type: ignore[no-any-return]


def start_late(loader: Any, skipped: int) -> Any:
    """Return a prepared loader like this one that starts late, at each of its passes.

    After a checkpoint of a run with another number of processes or another batch size was loaded, and where
    as many batches are skipped as the loop had taken then, it starts behind the samples that all processes of
    that run had taken.
    """
    point: ResumePoint | None = loader.position.resume_point
    if point is None or skipped != point.offset.seen:
        return _skip_rounds(loader, skipped)
    if point.is_over and isinstance(loader.dataset, IterableDataset):
        return _late(loader, offset=point.offset, is_over=True)
    _refuse_other_shares(loader, point)
    if point.offset.stream is not None:  # the dataset itself starts there
        return _late(loader, offset=point.offset, used=point.used)
    _refuse_other_workers(loader, point)
    used, rows = _used_segments(loader, point), loader.plan.rows_in_batch or point.rows_in_batch or 1
    if not used:
        return _skip_rounds(loader, skipped)
    rounds, samples = map(sum, zip(*used, strict=True))
    late = _share_rest(loader, Offset(rounds, samples // rows), used)
    if rounds < skipped:
        late = _skip_rounds(late, skipped - rounds)
        late.start = replace(late.start, origin=loader)
    return late


def _used_segments(loader: Any, point: ResumePoint) -> tuple[Segment, ...]:
    """The segments behind which the rounds of this loader begin."""
    offset = _offset_in_batches_of(loader, point)
    if point.groups == loader.plan.groups and offset == point.offset:
        return point.used
    rows = point.rows_in_batch or loader.plan.rows_in_batch or 1
    rounds = point.offset.seen - sum(segment.rounds for segment in point.used)
    samples = point.offset.consumed * rows - sum(segment.samples for segment in point.used)
    return (*point.used, Segment(rounds, samples)) if rounds else point.used


def _refuse_other_workers(loader: Any, point: ResumePoint) -> None:
    """Batches of an iterable dataset come from its workers in turn."""
    before, now = point.num_workers, loader.num_workers
    if before is None or max(before, 1) == max(now, 1) or not isinstance(loader.dataset, IterableDataset):
        return
    raise CheckpointError(
        f"{loader!r} cannot go on in the middle of this epoch: num_workers was {before}, is {now} now, and "
        f"gives the samples of an iterable dataset in another order. Set it to {before} until the end of the "
        "epoch, or go on from a checkpoint between two epochs."
    )


def start_where_saved(loader: Any) -> Any:
    """Return the late start with which a loader resumes by itself; None where it begins an epoch."""
    point: ResumePoint | None = loader.position.resume_point
    if point is None or not point.offset.seen or loader.start.origin is not None:
        return None
    if not loader.use_stateful_dataloader or point.by_torchdata:
        return None
    return start_late(loader, point.offset.seen)


def _refuse_other_shares(loader: Any, point: ResumePoint) -> None:
    own_shares, groups = loader.plan.own_shares, loader.plan.groups
    if (point.own_shares, point.groups) == (own_shares, groups) or not (own_shares or point.own_shares):
        return
    before = "its own shards" if point.own_shares else "batches of the whole"
    raise CheckpointError(
        f"{loader!r} cannot go on in the middle of this epoch: {point.groups} data-parallel groups read "
        f"{before} then, and what they have left of the dataset cannot be sharded over {groups} groups. "
        f"Go on with {point.groups} until the end of the epoch, or from a checkpoint between two epochs; "
        "loaders with dispatch_batches=True can go on with any number."
    )


def _offset_in_batches_of(loader: Any, point: ResumePoint) -> Offset:
    """The offset of a checkpoint, counted in the batches of this loader."""
    before, now = point.rows_in_batch, loader.plan.rows_in_batch
    if before is None or now is None or before == now or point.is_over:
        return point.offset
    samples = point.offset.consumed * before
    if samples % now or loader.plan.own_shares:
        shares = "the batches of shards that the dataset makes are counted, not its samples"
        why = shares if loader.plan.own_shares else f"behind them no batch of {now} begins"
        raise CheckpointError(
            f"{loader!r} cannot go on in the middle of this epoch: {samples} of its samples were given in "
            f"batches of {before} and not of {now}, and {why}. Go on with batches of {before} until the end "
            "of the epoch, or from a checkpoint between two epochs."
        )
    return point.offset._replace(consumed=samples // now)


def _skip_rounds(loader: Any, skipped: int) -> Any:
    """The same loader from a later round on; rounds keep their numbers and their filler."""
    before = loader.start.offset
    offset = Offset(before.seen + skipped, before.consumed + skipped * loader.plan.batches_in_round)
    late = _late(loader, offset=offset, keeps_first_round=offset.seen > 0)
    if isinstance(loader.dataset, IterableDataset):
        late.skip_batches += skipped
    else:
        is_dispatched = loader.plan.how == "dispatch"  # then torch's loader reads all batches of a round
        skipped_by_index = skipped * (loader.plan.batches_in_round if is_dispatched else 1)
        late.base_dataloader = _reordered(
            loader.base_dataloader,
            partial(SkipBatchSampler, skip_batches=skipped_by_index, kept=loader.batches_kept),
        )
    epoch = getattr(loader.get_sampler(), "epoch", None)
    is_dispatched_by_hand = loader.plan.how == "dispatch" and loader.plan.why == BY_HAND.why
    if is_dispatched_by_hand or (
        loader.plan == BY_HAND and isinstance(loader.batch_sampler, BatchSamplerShard)
    ):
        late.iteration = epoch if isinstance(epoch, int) else late.iteration
    return late


def _share_rest(loader: Any, offset: Offset, used: tuple[Segment, ...]) -> Any:
    """The rest of an epoch of another number of groups, or of other batches, for the groups of now."""
    dataset, base = loader.dataset, loader.base_dataloader
    late = _late(loader, offset=offset, used=used)
    if isinstance(dataset, IterableDatasetShard):
        rest = copy(dataset)
        rest.used = used
        late.base_dataloader = copy_with(base, dataset=rest)
    elif isinstance(dataset, IterableDataset):
        late.start = replace(late.start, skip_source=offset.consumed)
    else:
        late.base_dataloader = _reordered(base, partial(_rest_of, consumed=offset.consumed))
    return late


def _rest_of(index_sampler: Any, consumed: int) -> Any:
    """The sampler of a prepared loader without the batches that were taken from under its shard."""
    if isinstance(index_sampler, SamplerShard):
        items = copy(index_sampler)
        items.shard = _rest_of(index_sampler.shard, consumed)
        return items
    if isinstance(index_sampler, BatchSamplerShard):
        shard = copy(index_sampler)
        shard.batch_sampler = SkipBatchSampler(index_sampler.batch_sampler, consumed)
        return shard
    return SkipBatchSampler(index_sampler, consumed)


def _reordered(loader: DataLoader[Any], change: Callable[[Any], Any]) -> DataLoader[Any]:
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return copy_with(loader, **{name: change(getattr(loader, name))})


def _late(loader: Any, **start: Any) -> Any:
    """A late start of a loader, which shares its position."""
    late = copy(loader)
    late.start = replace(loader.start, origin=loader, **start)
    return late


def copy_with(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """A copy of a torch loader without its iterator, with other attributes, also read-only ones."""
    changed = copy(loader)
    for name, value in {"_iterator": None, **attributes}.items():
        object.__setattr__(changed, name, value)
    return changed
