"""What a prepared loader costs over the loader it was made from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.state import PartialState
from pairing import Pair, measure, report, time_round

SAMPLES, FEATURES, BATCH_SIZE, PASSES = 8_192, 64, 16, 61
MANY, STORED, STARTS = 10**9, 10**6, 15
CPU = torch.device("cpu")


def make_dataset() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(10, (SAMPLES,)))


class Indices(Dataset[int]):
    """Samples that cost nothing to read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


def reading(loader: Iterable[Any]) -> Callable[[], None]:
    """Make the work of one pass over a loader."""

    def read() -> None:
        for _ in loader:
            pass

    return read


def compare(work: str, budget: float, raw: DataLoader[Any], ours: DataLoader[Any]) -> Pair:
    """Measure whole passes over two loaders of equally many batches."""
    if len(raw) != len(ours):
        raise ValueError(f"{work}: {len(raw)} batches against {len(ours)} compare nothing")
    name = f"{work}, a pass of {len(raw)} batches"
    return measure(name, reading(raw), reading(ours), budget=budget, repetitions=1, rounds=PASSES)


def start(skipped: int) -> Pair:
    """Measure the first batch of a shuffle in constant memory, beside a stored one of fewer samples."""

    def first_of(samples: int, skipped: int, **settings: bool) -> Callable[[], None]:
        loader = DataLoader(Indices(samples), batch_size=BATCH_SIZE, shuffle=True)
        prepared = prepare_data_loader(loader, CPU, 8, 0, put_on_device=True, data_seed=0, **settings)

        def read() -> None:
            with closing(iter(skip_first_batches(prepared, skipped))) as batches:
                next(batches)

        return read

    stored = first_of(STORED, 0, use_seedable_sampler=True)
    computed = first_of(MANY, skipped, use_constant_memory_sampler=True)
    raw, ours = (min(time_round(work, 1) for _ in range(STARTS)) for work in (stored, computed))
    where = f"batch {skipped + 1}" if skipped else "first batch"
    work = f"{where} of a shuffle of {MANY:.0e} samples, beside a stored one of {STORED:.0e}"
    return Pair(work, raw, ours, ours, 0.05, "s")


def main() -> int:
    torch.set_num_threads(1)
    PartialState(cpu=True)
    dataset = make_dataset()
    shuffled = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=True)
    distributed = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    prepared = prepare_data_loader(shuffled, CPU, 1, 0, put_on_device=True)
    shard = prepare_data_loader(shuffled, CPU, 2, 0, put_on_device=True, rng_types=["generator"])
    pairs = [
        compare("prepared loader over the plain one", 1.10, shuffled, prepared),
        compare("2-process sharded loader over DistributedSampler", 1.15, distributed, shard),
        start(0),
        start(MANY // BATCH_SIZE // 16),
    ]
    return report(pairs, "Data loading")


if __name__ == "__main__":
    sys.exit(main())
