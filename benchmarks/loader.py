"""What a prepared loader costs over the loader it was made from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accelerate.data_loader import prepare_data_loader
from pairing import Pair, measure, report

SAMPLES, FEATURES, BATCH_SIZE, PASSES = 8_192, 64, 16, 61
CPU = torch.device("cpu")


def make_dataset() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(10, (SAMPLES,)))


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


def main() -> int:
    torch.set_num_threads(1)
    dataset = make_dataset()
    shuffled = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=True)
    distributed = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    prepared = prepare_data_loader(shuffled, CPU, 1, 0, put_on_device=True)
    shard = prepare_data_loader(shuffled, CPU, 2, 0, put_on_device=True, rng_types=["generator"])
    pairs = [
        compare("prepared loader over the plain one", 1.05, shuffled, prepared),
        compare("2-process sharded loader over DistributedSampler", 1.08, distributed, shard),
    ]
    return report(pairs, "Data loading")


if __name__ == "__main__":
    sys.exit(main())
