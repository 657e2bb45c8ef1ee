"""Position of a prepared loader within its epoch, and the random states that its order depends on.

Loaders count their batches here. `resume.py` saves and restores these values, and `late_start.py` makes
loaders that start in the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from accelerate import rng
from accelerate.data_loader.iterable_shard import ReadSegment
from accelerate.data_loader.samplers import batch_samplers_of


class Offset(NamedTuple):
    """Point in an epoch between two batches."""

    seen: int = 0  # batches that the loop has taken in this epoch, over all its interruptions
    consumed: int = 0  # batches of the dataset that this took, for all data-parallel groups together
    stream: Any = None  # state of an iterable dataset, with the samples that pad the end of the epoch


BEGINNING = Offset()


@dataclass(frozen=True)
class ResumePoint:
    """Position that a checkpoint has restored, from which the next pass resumes."""

    offset: Offset
    start_states: Mapping[str, Any] | None  # of the random generators; None between two epochs
    groups: int  # data-parallel groups of the run that saved the checkpoint
    is_over: bool = False  # the point is after the last batch of the epoch
    ends_step: bool = True  # as in `Position`
    global_batch_size: int | None = None  # as in `ShardPlan`
    is_dispatched: bool = False  # one process read for all
    has_own_shards: bool = False  # each group read a shard that the dataset or the user made
    rows_in_batch: int | None = None  # samples in a batch of the dataset; None if it was not known
    state: Mapping[str, Any] = field(default_factory=dict)  # as `resume.capture` returned it
    streams: Mapping[str, Any] = field(default_factory=dict)  # as `resume.capture_stream` returned it
    by_torchdata: bool = False  # the iterator of torchdata resumes by itself
    used: tuple[ReadSegment, ...] = ()  # read before the number of groups or the batch size last changed
    num_workers: int | None = None  # None if it was not saved
    read_states: Mapping[str, Any] | None = None  # as in `Position`


@dataclass(frozen=True)
class PassStart:
    """Point at which each pass over a loader starts."""

    offset: Offset = BEGINNING
    origin: Any = None  # the loader of which this one is a late start; both count epochs together
    skip_source: int = 0  # batches of the dataset that are read and dropped, besides `skip_batches`
    keeps_padding_source: bool = False  # the first batches of the epoch are read as well, to pad its end
    is_over: bool = False  # nothing is left of the epoch
    used: tuple[ReadSegment, ...] = ()  # as in `ResumePoint`


@dataclass(eq=False)
class Position:
    """Position within the epoch of a loader and of all its late starts."""

    seen: int = 0  # batches that the loop has taken; 0 between two passes
    consumed: int = 0  # batches of the dataset that this took
    stream: Any = None  # state of the iterable dataset after the batch just yielded
    is_over: bool = False  # the batch just yielded is the last one
    ends_step: bool = True  # the batch just yielded is the last one of a global batch of a constant size
    start_states: Mapping[str, Any] | None = None  # of the random generators at the start of the pass
    read_states: Mapping[str, Any] | None = None
    """Of the random generators before the batch after this one was read; None if reading draws nothing."""
    resume_point: ResumePoint | None = None  # None after the next pass has started
    num_restored: int = 0  # how often a checkpoint was loaded
    workers_epoch: int | None = None  # in which persistent workers started first; None before
    workers_epoch_at_start: int | None = None  # of the pass
    was_left_early: bool = False  # the latest pass ended before its last batch
    stream_may_be_over: bool = False  # the dataset has its state from the end of an epoch
    used: tuple[ReadSegment, ...] = ()  # of this epoch, as in `ResumePoint`

    @property
    def offset(self) -> Offset:
        """The point in the epoch after the batch just yielded."""
        return Offset(self.seen, self.consumed, self.stream)

    @offset.setter
    def offset(self, offset: Offset) -> None:
        self.seen, self.consumed, self.stream = offset

    def begin(self, loader: Any, offset: Offset) -> Callable[[], None]:
        """Begins a pass before anything is drawn for it.

        Returns:
            A function to call when the order of the pass is drawn. It restores the random states of the
            checkpoint from which the pass resumes, if there is one.
        """
        point, self.resume_point = self.resume_point, None
        self.offset, self.used, self.read_states = offset, loader.start.used, None
        self.workers_epoch_at_start = self.workers_epoch
        if point is None or point.start_states is None:
            own_states = [generator.get_state() for generator in generators_of(loader)]
            self.start_states = {"global": rng.capture_on_cpu(), "generators": own_states}
            return lambda: None
        now, sampler = rng.capture(), loader.get_sampler()
        self.start_states = point.start_states
        restore_start(loader)
        if all(state is not None for state in self.start_states["generators"]):
            return lambda: rng.restore(now)
        # A run of one process has begun the pass, and the sampler drew in its own way from torch's generator.
        own, sampler.generator = sampler.generator, None

        def order_is_drawn() -> None:
            sampler.generator = own
            rng.restore(now)

        return order_is_drawn

    def end_resumed(self, offset: Offset, loader: Any) -> None:
        """Ends a pass that resumes after the last batch of an epoch."""
        self.resume_point, self.offset, self.is_over = None, offset, True
        if loader.persistent_workers and self.workers_epoch is None:
            self.workers_epoch = loader.iteration

    def end(self) -> None:
        """Ends a pass, after which the position is between two epochs."""
        self.offset, self.used = BEGINNING, ()
        self.is_over = False
        self.start_states = self.read_states = None


def is_tracked(loader: Any) -> bool:
    """Returns whether a loader has a position, as prepared loaders do."""
    return isinstance(getattr(loader, "position", None), Position)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Returns the random generators of a loader, its samplers and its dataset, each once."""
    dataset = loader.dataset
    owners: list[Any] = [loader, loader.get_sampler(), dataset, getattr(dataset, "dataset", None)]
    owners += batch_samplers_of(loader._index_sampler)
    generators = [
        generator
        for name in ("generator", "synchronized_generator")
        for owner in owners
        if not hasattr(owner, "initial_seed")  # its order depends on its seed and the epoch only
        if isinstance(generator := getattr(owner, name, None), torch.Generator)
    ]
    return list({id(generator): generator for generator in generators}.values())


def restore_start(loader: Any) -> None:
    """Sets the random generators to their states at the start of the pass, except one that was not there."""
    states = loader.position.start_states
    rng.restore(states["global"])
    for generator, state in zip(generators_of(loader), states["generators"], strict=True):
        if state is not None:
            generator.set_state(state)
