"""transformers' Trainer.evaluate over datasets of three kinds: the mean loss, the true one, and the labels.

Usage: evaluating.py FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from material import tell
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments

BATCH = 8
WAYS = {"default": None, "dispatch": True, "shard": False}


class Squares(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": x.square().mean() + 0 * self.unused.sum(), "logits": x[:, None]}


def row(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(float(number)), "labels": torch.tensor(number)}


class Map(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Any:
        return row(number)


class Stream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return map(row, range(self.size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


def evaluate(kind: Any, way: str, size: int, folder: str) -> list[Any]:
    arguments = TrainingArguments(
        folder,
        per_device_eval_batch_size=BATCH,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        accelerator_config={"dispatch_batches": WAYS[way]},
    )

    def labels(found: Any) -> dict[str, bool]:
        return {"labels": sorted(found.label_ids.tolist()) == list(range(size))}

    trainer = Trainer(Squares(), arguments, eval_dataset=kind(size), compute_metrics=labels)
    metrics = trainer.evaluate()
    return [metrics["eval_loss"], sum(number**2 for number in range(size)) / size, metrics["eval_labels"]]


def sizes(kind: Any, way: str) -> tuple[int, int]:
    """Returns a size that two and three processes divide, and one without a batch of samples and padding.

    No weight takes the padding of such a batch out of a mean.
    """
    is_sharded = way == "shard" or (way == "default" and kind is Map)
    return 48, 56 if is_sharded else 66


def main() -> None:
    found = {
        f"{kind.__name__}, {way}, {size}": evaluate(kind, way, size, sys.argv[1])
        for kind in (Map, SizedStream, Stream)
        for way in WAYS
        for size in sizes(kind, way)
    }
    if os.environ.get("RANK", "0") == "0":
        tell(found)


if __name__ == "__main__":
    main()
