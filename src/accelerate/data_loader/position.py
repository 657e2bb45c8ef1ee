"""Where a loader is: which epoch, how far in it, and by which random numbers its order came about.

The order of an epoch is not stored. What is stored are the states of the random generators when the epoch
began: a loader that goes on sets them, draws the order again, passes over the indices it has given before,
and then gives the generators back the states that they had when the checkpoint was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from accelerate import rng
from accelerate.base import CheckpointError

VERSION = 1


class Place(NamedTuple):
    """A point in an epoch, between two batches.

    Attributes:
        seen: batches that the loop was given in this epoch, over all its interruptions.
        consumed: batches of the dataset that this took, for all groups together.
        stream: the state of an iterable dataset that has one, with the samples that fill the end of the
            epoch.
    """

    seen: int = 0
    consumed: int = 0
    stream: Any = None


BEGINNING = Place()


@dataclass(frozen=True)
class Resume:
    """Where a loaded checkpoint says that a loader was.

    Attributes:
        place: the point in the epoch.
        start: states of the random generators when the epoch began; None between two epochs.
        groups: number of data-parallel groups at that time.
        is_over: whether that was behind the last batch of the epoch.
        own_shares: whether the groups read shares that the dataset gave them.
        rows_in_batch: samples in a batch of the dataset at that time; None where that was not known.
    """

    place: Place
    start: Mapping[str, Any] | None
    groups: int
    is_over: bool = False
    own_shares: bool = False
    rows_in_batch: int | None = None


class Position:
    """Where a loader, with all late starts of it, is.

    Attributes:
        seen: batches that the loop was given in this epoch; 0 between two passes.
        consumed: batches of the dataset that this took, for all groups together.
        stream: the state of the dataset behind the batch just given, where it has one.
        is_over: whether the batch just given is the last one.
        start: states of the random generators when the pass began.
        resume: where to go on, until the next pass has begun.
    """

    def __init__(self) -> None:
        self.seen, self.consumed, self.stream = BEGINNING
        self.is_over = False
        self.start: Mapping[str, Any] | None = None
        self.resume: Resume | None = None

    def begin(self, loader: Any, place: Place) -> Callable[[], None]:
        """A pass begins; called before anything is drawn for it.

        Args:
            loader: that is read.
            place: where in the epoch it begins.

        Returns:
            To be called when the order is drawn: brings back the random states of the checkpoint that the
            pass goes on from.
        """
        resume, self.resume = self.resume, None
        self.place = place
        if resume is None or resume.start is None:
            self.start = _draw_states(loader)
            return _nothing
        now = rng.capture()
        self.start = resume.start
        _set_states(loader, resume.start)
        return lambda: rng.restore(now)

    @property
    def place(self) -> Place:
        """The point behind the batch just given; the beginning between two passes."""
        return Place(self.seen, self.consumed, self.stream)

    @place.setter
    def place(self, place: Place) -> None:
        self.seen, self.consumed, self.stream = place

    def end(self) -> None:
        """A pass is over."""
        self.place = BEGINNING
        self.is_over = False
        self.start = None


def is_tracked(loader: Any) -> bool:
    """Whether a loader knows its order and position: prepared ones do."""
    return isinstance(getattr(loader, "position", None), Position)


def capture(loader: Any) -> dict[str, Any] | None:
    """Return the order and position of a loader; None for one that knows neither.

    Args:
        loader: of any kind.
    """
    if not is_tracked(loader):
        return None
    position: Position = loader.position
    return {
        "version": VERSION,
        "epoch": loader.iteration,
        "seen": position.place.seen,
        "consumed": position.place.consumed,
        "groups": loader.plan.groups,
        "is_over": bool(position.seen and position.is_over),
        "own_shares": loader.plan.own_shares,
        "rows_in_batch": loader.plan.rows_in_batch,
        "start": position.start,
        "generators": [generator.get_state() for generator in generators_of(loader)],
        "seed": getattr(loader.get_sampler(), "initial_seed", None),
    }


def is_state(state: Any) -> bool:
    """Whether something is what `capture` returns, of any version."""
    return isinstance(state, Mapping) and {"version", "seen", "consumed", "generators"} <= state.keys()


def restore(loader: Any, state: Mapping[str, Any], stream: Any = None) -> None:
    """Bring a loader to an order and position; its next pass goes on there.

    Args:
        loader: a prepared one.
        state: what `capture` returned, maybe in a run of another size.
        stream: the state of its dataset, where that has one.

    Raises:
        CheckpointError: the state is none, or of a loader with other random generators.
    """
    try:
        version, place = state["version"], Place(int(state["seen"]), int(state["consumed"]), stream)
        epoch, groups, drawn = int(state["epoch"]), int(state["groups"]), state["generators"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"this is no position of a loader: {error!r}") from error
    if version != VERSION:
        raise CheckpointError(f"the position of a loader has version {version}, and this one reads {VERSION}")
    start = _fit_generators(loader, drawn, state["start"])
    if state.get("seed") is not None and hasattr(sampler := loader.get_sampler(), "initial_seed"):
        sampler.initial_seed = state["seed"]
    loader.set_epoch(epoch)
    loader.position.end()
    own_shares, rows = bool(state.get("own_shares")), state.get("rows_in_batch")
    loader.position.resume = Resume(place, start, groups, bool(state["is_over"]), own_shares, rows)


def _fit_generators(
    loader: Any, drawn: list[torch.Tensor], start: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Set the generators of a loader, and return the states that they shall have at the start of its epoch.

    A shuffle without a generator of its own gets one when several processes share it. Between a run of one
    process and one of several, the states are carried over from the one way of shuffling to the other.
    """
    generators, sampler = generators_of(loader), loader.get_sampler()
    own = getattr(sampler, "generator", None)
    if len(generators) == len(drawn) - 1 and own is None and hasattr(sampler, "generator"):
        sampler.generator = torch.Generator()
        generators = generators_of(loader)
    elif len(generators) == len(drawn) + 1 and any(own is each for each in generators):
        place = next(index for index, each in enumerate(generators) if each is own)
        del generators[place]
        if start is not None:
            states = list(start["generators"])
            states.insert(place, _state_of_plain_shuffle(start["global"]["torch"]))
            start = {**start, "generators": states}
    if len(generators) != len(drawn):
        raise CheckpointError(
            f"the loader had {len(drawn)} random generators, and {loader!r} has {len(generators)}: "
            "prepare a loader that shuffles in the same way"
        )
    for generator, state in zip(generators, drawn, strict=True):
        generator.set_state(state)
    return start


def _state_of_plain_shuffle(torch_state: torch.Tensor) -> torch.Tensor:
    """The generator of torch's shuffle, which seeds it from the global one behind the seed of the workers."""
    source = torch.Generator()
    source.set_state(torch_state)
    draws = [int(torch.empty((), dtype=torch.int64).random_(generator=source).item()) for _ in range(2)]
    return torch.Generator().manual_seed(draws[1]).get_state()


def capture_stream(loader: Any) -> dict[str, Any]:
    """Return the state of a dataset that can only be read in order, as this process reads it; empty without
    one.

    Args:
        loader: of any kind; one whose dataset has none gives an empty dictionary.
    """
    captured: dict[str, Any] = loader.capture_stream() if is_tracked(loader) else {}
    return captured


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that belong to a loader, its samplers and its dataset, each once."""
    owners: list[Any] = [
        loader,
        loader.get_sampler(),
        loader.dataset,
        getattr(loader.dataset, "dataset", None),
    ]
    index_sampler = loader._index_sampler
    while index_sampler is not None:
        owners.append(index_sampler)
        index_sampler = getattr(index_sampler, "batch_sampler", None)
    found = [
        generator
        for name in ("generator", "synchronized_generator")
        for owner in owners
        if not hasattr(owner, "initial_seed")  # draws from its seed and the epoch alone
        if isinstance(generator := getattr(owner, name, None), torch.Generator)
    ]
    return list({id(generator): generator for generator in found}.values())


def stream_of(loader: Any) -> Any:
    """Return the iterable dataset whose state can be taken as it is read; None without one."""
    if loader.num_workers or not isinstance(loader.dataset, IterableDataset):
        return None
    for dataset in (getattr(loader.dataset, "dataset", None), loader.dataset):
        if callable(getattr(dataset, "state_dict", None)) and callable(
            getattr(dataset, "load_state_dict", None)
        ):
            return dataset
    return None


def after_first(
    source: Iterator[Any], then: Callable[[], None], kept: int = 0, count: int = 1
) -> Iterator[Any]:
    """Give a source on, and call something when its first items have been read.

    Args:
        source: the items.
        then: what is called.
        kept: further items, before the first ones, that are not counted.
        count: how many are read before it is called.
    """
    yield from islice(source, kept)
    first = list(islice(source, count))
    then()
    yield from first
    yield from source


def _draw_states(loader: Any) -> dict[str, Any]:
    return {
        "global": rng.capture_on_cpu(),
        "generators": [generator.get_state() for generator in generators_of(loader)],
    }


def _set_states(loader: Any, states: Mapping[str, Any]) -> None:
    rng.restore(states["global"])
    for generator, state in zip(generators_of(loader), states["generators"], strict=True):
        generator.set_state(state)


def _nothing() -> None:
    """A pass that goes on from no checkpoint has nothing to bring back."""
