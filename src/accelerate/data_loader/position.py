"""Position within an epoch, and the tracker that a loader shares with its late starts.

Loaders count their batches here. `resume.py` saves and restores positions, and `late_start.py` makes loaders
that start in the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from accelerate import rng
from accelerate.data_loader import own_states
from accelerate.data_loader.iterable_shard import ReadSegment
from accelerate.data_loader.plan import ShardPlan
from accelerate.data_loader.samplers import batch_samplers_of


class Position(NamedTuple):
    """Point in an epoch between two batches."""

    epoch: int = 0
    seen: int = 0  # batches that the loop has taken in this epoch, over all its interruptions
    consumed: int = 0  # batches of the dataset that this took, for all data-parallel groups together
    is_over: bool = False  # the batch before is the last one of the epoch
    ends_step: bool = True  # the batch before is the last one of a global batch of a constant size
    stream: Any = None  # state of an iterable dataset, with the samples that pad the end of the epoch
    used: tuple[ReadSegment, ...] = ()  # read before the number of groups or the batch size last changed
    start_states: Mapping[str, Any] | None = None  # of the generators at the start; None between two epochs
    read_states: Mapping[str, Any] | None = None  # before the next batch was read; None if that draws nothing
    workers_epoch: int | None = None  # in which persistent workers had started before the pass


@dataclass(frozen=True)
class Restored:
    """Position of a checkpoint, from which the next pass resumes."""

    position: Position
    plan: ShardPlan  # of the run that saved the checkpoint, as far as the checkpoint has it
    state: Mapping[str, Any]  # as `resume.capture` returned it
    streams: Mapping[str, Any]  # as `resume.capture_stream` returned it
    by_torchdata: bool = False  # the iterator of torchdata resumes by itself


@dataclass(frozen=True)
class PassStart:
    """Point at which each pass over a loader starts."""

    position: Position = Position()  # nothing is left of the epoch if it is over
    origin: Any = None  # the loader of which this one is a late start; both count epochs together
    skip_source: int = 0  # batches of the dataset that are read and dropped, besides `skip_batches`
    keeps_padding_source: bool = False  # the first batches of the epoch are read as well, to pad its end


@dataclass(eq=False)
class Tracker:
    """Current position of a loader and of all its late starts.

    A pass counts its batches here, and changes what else differs between two of them.
    """

    seen: int = 0  # as in `Position`
    batches_per_step: int = 0  # how many batches of the dataset each batch takes, if all take equally many
    consumed: int = 0  # as in `Position`, without these batches
    is_over: bool = False  # as in `Position`
    ends_step: bool = True  # as in `Position`
    stream: Any = None  # as in `Position`
    read_states: Mapping[str, Any] | None = None  # as in `Position`, set by a thread that may read ahead
    begun: Position = Position()  # with the values that are equal in the whole pass
    restored: Restored | None = None  # None after the next pass has started
    num_restored: int = 0  # how often a checkpoint was loaded
    workers_epoch: int | None = None  # in which persistent workers started first; None before
    was_left_early: bool = False  # the latest pass ended before its last batch
    stream_may_be_over: bool = False  # the dataset has its state from the end of an epoch
    initial_values: dict[int, tuple[Any, dict[str, Any]]] = field(default_factory=dict)  # of samplers by `id`

    @property
    def position(self) -> Position:
        """The position after the batch just yielded."""
        return self.begun._replace(
            seen=self.seen,
            consumed=self.consumed + (self.seen - self.begun.seen) * self.batches_per_step,
            is_over=self.is_over,
            ends_step=self.ends_step,
            stream=self.stream,
            read_states=self.read_states,
        )

    @position.setter
    def position(self, position: Position) -> None:
        self.begun = position
        self.seen, self.consumed = position.seen, position.consumed
        self.is_over, self.ends_step = position.is_over, position.ends_step
        self.stream, self.read_states = position.stream, position.read_states

    def begin(self, loader: Any, start: Position) -> Callable[[], None]:
        """Begins a pass before anything is drawn for it.

        Returns:
            A function to call when the order of the pass is drawn. It restores the random states of the
            checkpoint from which the pass resumes, if there is one.
        """
        restored, self.restored = self.restored, None
        states = None if restored is None else restored.position.start_states
        samples = () if restored is None else restored.streams.get("samples", ())
        begun = start._replace(
            epoch=loader.iteration, is_over=False, ends_step=True, workers_epoch=self.workers_epoch
        )
        if states is None:
            states = {"global": rng.capture_on_cpu(), **capture_generators(loader)}
            self.position = begun._replace(start_states=states, read_states=None)
            return lambda: None
        now, sampler = rng.capture(), loader.get_sampler()
        self.position = begun._replace(start_states=states, read_states=None)
        restore_start(loader)

        def continue_reading() -> None:
            rng.restore(now)
            own_states.restore_samples(loader, samples)

        if all(state is not None for state in states["generators"]):
            return continue_reading
        # A run of one process has begun the pass, and the sampler drew in its own way from torch's generator.
        own, sampler.generator = sampler.generator, None

        def order_is_drawn() -> None:
            sampler.generator = own
            continue_reading()

        return order_is_drawn

    def end_resumed(self, position: Position, loader: Any) -> None:
        """Ends a pass that resumes after the last batch of an epoch."""
        self.restored, self.position = None, position
        if loader.persistent_workers and self.workers_epoch is None:
            self.workers_epoch = loader.iteration

    def end(self) -> None:
        """Ends a pass, after which the position is between two epochs."""
        self.position = Position()


def is_tracked(loader: object) -> bool:
    """Returns whether a loader has a tracker, as prepared loaders do."""
    return isinstance(getattr(loader, "tracker", None), Tracker)


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


def capture_generators(loader: Any) -> dict[str, Any]:
    """Returns the states of the generators of a loader, and those of its samplers."""
    generators = generators_of(loader)
    return {
        "generators": [generator.get_state() for generator in generators],
        "samplers": own_states.capture_order(loader, generators),
    }


def restore_start(loader: Any) -> None:
    """Sets the random generators to their states at the start of the pass, except one that was not there."""
    states = loader.tracker.position.start_states
    rng.restore(states["global"])
    generators = generators_of(loader)
    for generator, state in zip(generators, states["generators"], strict=True):
        if state is not None:
            generator.set_state(state)
    own_states.restore_order(loader, generators, states.get("samplers", ()))
