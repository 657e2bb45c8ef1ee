"""What a prepared loader costs over the loader it was made from, paired with the raw call in one run.

`python benchmarks/loader.py [--json]` prints for each pair the CPU time of a batch and their ratio.
Passes over both loaders alternate, and the median of the ratios of neighbouring passes is reported: what else
the machine does counts for both alike.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from statistics import median
from time import process_time
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accelerate.data_loader import prepare_data_loader

SAMPLES, FEATURES, BATCH_SIZE, PASSES = 16_384, 64, 16, 25
CPU = torch.device("cpu")


def make_dataset() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(10, (SAMPLES,)))


def seconds_for_a_pass(loader: Iterable[Any]) -> float:
    start = process_time()
    for _ in loader:
        pass
    return process_time() - start


def compare(name: str, budget: float, raw: Any, ours: Any) -> dict[str, Any]:
    """Read both loaders in turn.

    Args:
        name: What is compared.
        budget: The ratio that must not be passed.
        raw: The loader of plain torch.
        ours: The prepared one.

    Returns:
        The name, microseconds a batch of both, the median ratio and the budget.
    """
    if len(raw) != len(ours):
        raise ValueError(f"{name}: {len(raw)} batches against {len(ours)} compare nothing")
    pairs = [(seconds_for_a_pass(raw), seconds_for_a_pass(ours)) for _ in range(PASSES + 2)][2:]
    plain, prepared = (min(column) / len(raw) * 1e6 for column in zip(*pairs, strict=True))
    ratio = median(ours / raw for raw, ours in pairs)
    return {"name": name, "raw_us": plain, "ours_us": prepared, "ratio": ratio, "budget": budget}


def prepared_over_plain() -> dict[str, Any]:
    dataset = make_dataset()
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    ours = prepare_data_loader(loader, CPU, 1, 0, put_on_device=True)
    return compare("prepared loader over the plain one", 1.05, loader, ours)


def shard_over_distributed_sampler() -> dict[str, Any]:
    dataset = make_dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=True)
    raw = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    ours = prepare_data_loader(loader, CPU, 2, 0, put_on_device=True, rng_types=["generator"])
    return compare("2-process sharded loader over DistributedSampler", 1.08, raw, ours)


COMPARISONS: tuple[Callable[[], dict[str, Any]], ...] = (prepared_over_plain, shard_over_distributed_sampler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    for measure in COMPARISONS:
        row = measure()
        if as_json:
            print(json.dumps(row))
            continue
        print(
            f"{row['name']:<50} raw {row['raw_us']:7.1f} us  ours {row['ours_us']:7.1f} us  "
            f"ratio {row['ratio']:.3f}  (budget {row['budget']:.2f})"
        )


if __name__ == "__main__":
    main()
