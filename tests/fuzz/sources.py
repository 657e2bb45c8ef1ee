"""Datasets, samplers and loaders that the schedules of `trial.py` train with.

Sample `i` is its index and three numbers made of it; `augment` adds a random number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

if TYPE_CHECKING:
    from trial import Schedule

Sample = tuple[Tensor, Tensor]

AUGMENTATIONS: dict[str, Callable[[], float]] = {
    "": lambda: 0.0,
    "python": random.random,
    "numpy": np.random.random_sample,
    "torch": lambda: float(torch.rand(())),
}


def make_sample(index: int, length: int, augment: str) -> Sample:
    return torch.tensor([index]), torch.arange(3.0) * index / length + AUGMENTATIONS[augment]()


class Samples(Dataset[Sample]):
    def __init__(self, length: int, augment: str) -> None:
        self.length = length
        self.augment = augment

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        return make_sample(index, self.length, self.augment)


class Stream(IterableDataset[Sample]):
    """Reads its samples in order; worker `i` of `n` reads each `n`-th one."""

    def __init__(self, length: int, augment: str = "") -> None:
        self.length = length
        self.augment = augment

    def order(self) -> list[int]:
        return list(range(self.length))

    def own_order(self) -> list[int]:
        info = get_worker_info()
        return self.order() if info is None else self.order()[info.id :: info.num_workers]

    def read(self, index: int) -> Sample:
        return make_sample(index, self.length, self.augment)

    def __iter__(self) -> Iterator[Sample]:
        return map(self.read, self.own_order())


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


class EpochStream(Stream):
    """Shuffles by the epoch that is set."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return random.Random(self.epoch).sample(range(self.length), self.length)


class GeneratorStream(Stream):
    """Shuffles with a generator of its own."""

    def __init__(self, length: int, augment: str = "") -> None:
        super().__init__(length, augment)
        self.generator = torch.Generator().manual_seed(length)

    def order(self) -> list[int]:
        return torch.randperm(self.length, generator=self.generator).tolist()


class PositionStream(Stream):
    """Goes on at its position, which is the beginning again behind the last sample."""

    index = 0

    def __iter__(self) -> Iterator[Sample]:
        order = self.own_order()
        while self.index < len(order):
            self.index += 1
            yield self.read(order[self.index - 1])
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


class RestartStream(Stream):
    """Begins again with each iterator, but for the first one after a state was loaded."""

    index = start = 0

    def __iter__(self) -> Iterator[Sample]:
        start, self.start = self.start, 0
        for self.index, index in enumerate(self.own_order()[start:], start + 1):  # noqa: B020
            yield self.read(index)

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.index = state["index"]


class CountingStream(PositionStream):
    """Counts its epochs, and shuffles by them."""

    epoch = 0

    def order(self) -> list[int]:
        return random.Random(self.epoch).sample(range(self.length), self.length)

    def __iter__(self) -> Iterator[Sample]:
        yield from super().__iter__()
        self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index, self.epoch = state["index"], state["epoch"]


class ShardedStream(Stream):
    """Shards itself, as streams of the library datasets do."""

    num_shards = 4

    def __init__(self, length: int, augment: str = "", shards: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__(length, augment)
        self.shards = shards
        self.num_shards = len(shards)

    def shard(self, num_shards: int, index: int) -> ShardedStream:
        return type(self)(self.length, self.augment, self.shards[index::num_shards])

    def order(self) -> list[int]:
        return [index for shard in self.shards for index in range(shard, self.length, 4)]


class ShardedPositionStream(ShardedStream, PositionStream):
    """Shards itself, and goes on at its position."""


class EndlessStream(PositionStream):
    def __iter__(self) -> Iterator[Sample]:
        while True:
            self.index += 1
            yield self.read(self.index % self.length)


STREAMS: dict[str, Callable[..., Stream]] = {
    "stream": Stream,
    "sized": SizedStream,
    "epoch": EpochStream,
    "generator": GeneratorStream,
    "position": PositionStream,
    "restart": RestartStream,
    "counting": CountingStream,
    "sharded": ShardedStream,
    "sharded position": ShardedPositionStream,
    "endless": EndlessStream,
}
STATEFUL = frozenset({"position", "restart", "counting", "sharded position", "endless"})
SHARDED = frozenset({"sharded", "sharded position"})


class Backwards(Sampler[int]):
    """A sampler without random numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length - 1, -1, -1))

    def __len__(self) -> int:
        return self.length


class Batches:
    """A batch sampler: sizes and order from Python's generator, or from a generator of its own."""

    def __init__(self, length: int, generator: torch.Generator | None) -> None:
        self.length = length
        if generator is not None:
            self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        generator = getattr(self, "generator", None)
        draw = random.Random(int(torch.randint(2**31, (), generator=generator))) if generator else random
        order = list(range(self.length))
        draw.shuffle(order)
        while order:
            size = draw.choice([2, 3])
            yield order[:size]
            del order[:size]


def make_loader(schedule: Schedule) -> DataLoader[Any]:
    length, generator = schedule.samples, torch.Generator().manual_seed(schedule.seed)
    options: dict[str, Any] = {"num_workers": schedule.workers}
    if schedule.workers:
        options |= {"persistent_workers": schedule.persistent, "prefetch_factor": schedule.prefetch}
    sizes: dict[str, Any] = {"batch_size": schedule.batch, "drop_last": schedule.drop_last}
    if schedule.source != "map":
        return DataLoader(STREAMS[schedule.source](length, schedule.augment), **sizes, **options)
    data = Samples(length, schedule.augment)
    match schedule.sampler:
        case "batches":
            return DataLoader(data, batch_sampler=Batches(length, None), **options)  # type: ignore[arg-type]
        case "batches with generator":
            return DataLoader(data, batch_sampler=Batches(length, generator), **options)  # type: ignore[arg-type]
        case "shuffle":
            return DataLoader(data, shuffle=True, **sizes, **options)
        case "shuffle with generator":
            return DataLoader(data, shuffle=True, generator=generator, **sizes, **options)
        case "backwards":
            return DataLoader(data, sampler=Backwards(length), **sizes, **options)
        case "replacement":
            return DataLoader(data, sampler=RandomSampler(data, replacement=True), **sizes, **options)
        case "subset":
            return DataLoader(data, sampler=SubsetRandomSampler(range(length)), **sizes, **options)
        case "weighted" | "weighted of torch":
            weights, own = (
                torch.arange(1.0, length + 1),
                generator if schedule.sampler == "weighted" else None,
            )
            sampler = WeightedRandomSampler(weights.tolist(), length, generator=own)
            return DataLoader(data, sampler=sampler, **sizes, **options)
    return DataLoader(data, **sizes, **options)


SAMPLERS = (
    "sequential",
    "shuffle",
    "shuffle",
    "shuffle with generator",
    "backwards",
    "replacement",
    "weighted",
    "weighted of torch",
    "subset",
    "batches",
    "batches with generator",
)
WHOLE_SAMPLERS = frozenset(SAMPLERS) - {"replacement", "weighted", "weighted of torch"}
"""Samplers that give each sample once in an epoch."""
