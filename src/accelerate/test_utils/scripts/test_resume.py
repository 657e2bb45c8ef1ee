"""Training script that `accelerate test --resume` launches uninterrupted, interrupted and resumed.

Each rank writes the order of its samples and the final weights to a file, and the command compares the files.
The resumed run starts with another seed than the uninterrupted one, so only the checkpoint can restore the
states of the random number generators.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from accelerate.accelerator import Accelerator
from accelerate.base import DistributedType
from accelerate.ops import broadcast_object_list
from accelerate.plugins import DataLoaderConfiguration
from accelerate.rng import set_seed

SAMPLES = 37
"""Samples for each rank, with an incomplete last batch."""

BATCH = 4
EPOCHS = 3
STOP = (1, 3)
"""Epoch and batch after which the interrupted run saves a checkpoint."""

LOST = 2
"""Batches that the interrupted run trains after the checkpoint, and that are lost."""

WHOLE, INTERRUPTED, RESUMED = "whole", "interrupted", "resumed"


def numbers(length: int) -> Any:
    """Returns a map-style dataset whose sample i is the index, of shape (1,), and three floats made of it."""
    return [(torch.tensor([index]), torch.arange(3.0) * index / length) for index in range(length)]


class Stream(IterableDataset[Any]):
    """Iterable dataset of the samples of `numbers`."""

    def __init__(self, length: int) -> None:
        self.samples = numbers(length)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class StatefulStream(Stream):
    """Iterable dataset that continues at its position after a checkpoint is loaded."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.index = 0

    def __iter__(self) -> Iterator[Any]:
        while self.index < len(self.samples):
            self.index += 1
            yield self.samples[self.index - 1]
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        """Returns the number of samples that were read."""
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues after the number of samples in the state."""
        self.index = state["index"]


def sample_again(dataset: Sized) -> RandomSampler:
    """Returns a sampler with replacement that has its own generator."""
    return RandomSampler(dataset, replacement=True, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Case:
    """Kind of loader, with its dataset, sampler, workers and fields of `DataLoaderConfiguration`."""

    name: str
    dataset: Callable[[int], Any] = numbers
    sampler: Callable[[Any], RandomSampler] | None = None
    workers: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    persistent: bool = False

    def build(self, length: int) -> DataLoader[Any]:
        """Returns the loader before `prepare`, which shuffles a map-style dataset without a sampler."""
        dataset = self.dataset(length)
        sampler = None if self.sampler is None else self.sampler(dataset)
        shuffle = self.dataset is numbers and sampler is None
        return DataLoader(
            dataset, BATCH, shuffle, sampler, num_workers=self.workers, persistent_workers=self.persistent
        )

    @property
    def key(self) -> str:
        """Name of the case in the results, and of the folder of its checkpoint."""
        return f"{self.name}, {self.workers} workers"

    @property
    def resumes_itself(self) -> bool:
        """True if the loader restores its position itself, without `skip_first_batches`."""
        return bool(self.config.get("use_stateful_dataloader", False))


CASES = (
    Case("shuffled"),
    Case("shuffled", workers=2),
    Case("shuffled, persistent workers", workers=1, persistent=True),
    Case("shuffled with a seeded sampler", config={"use_seedable_sampler": True}),
    Case("shuffled in constant memory", config={"use_constant_memory_sampler": True}),
    Case("sampler with its own generator", sampler=sample_again),
    Case("dispatched", config={"dispatch_batches": True}),
    Case("dispatched", workers=2, config={"dispatch_batches": True}),
    Case("continued by itself", config={"use_stateful_dataloader": True}),
    Case("stream", Stream),
    Case("stream with a state", StatefulStream),
)


def train(case: Case, run: str, folder: Path) -> dict[str, Any]:
    """Trains with one kind of loader.

    All ranks must call it.

    Returns:
        `steps` has [epoch, batch, samples] of each batch that is not lost. `weights` has the final weights by
        name, and is empty for the interrupted run.
    """
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(**case.config), step_scheduler_with_optimizer="per_update"
    )
    set_seed(2 if run == RESUMED else 1, device_specific=True)
    model: nn.Module = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    loader = case.build(SAMPLES * accelerator.num_processes)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    first_epoch, num_seen = 0, 0
    if run == RESUMED:
        accelerator.load_state(folder / case.key)
        first_epoch, num_seen = STOP[0], STOP[1] + 1
    steps: list[Any] = []
    for epoch in range(first_epoch, EPOCHS):
        start = num_seen if epoch == first_epoch else 0
        batches = (
            accelerator.skip_first_batches(loader, start) if start and not case.resumes_itself else loader
        )
        for number, (index, inputs) in enumerate(batches, start):
            loss = (model(inputs) - index / SAMPLES).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps.append([epoch, number, index.flatten().tolist()])
            if run == INTERRUPTED and (epoch, number) == STOP:
                accelerator.save_state(folder / case.key)
            if run == INTERRUPTED and (epoch, number) == (STOP[0], STOP[1] + LOST):
                return {"steps": steps[:-LOST], "weights": {}}
    state = accelerator.get_state_dict(model)
    return {
        "steps": steps,
        "weights": {name: tensor.double().flatten().tolist() for name, tensor in state.items()},
    }


def main() -> None:
    """Trains with each kind of loader, and writes the results of this rank to a file."""
    run, folder = sys.argv[1], Path(sys.argv[2])
    accelerator = Accelerator()
    checkpoints = Path(broadcast_object_list([str(folder)])[0]) / "checkpoints"
    results: dict[str, Any] = {
        "processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "kind": DistributedType(accelerator.distributed_type).value,
        "mixed_precision": accelerator.mixed_precision,
        "cases": {},
    }
    for case in CASES:
        result = train(case, run, checkpoints)
        results["cases"][case.key] = {"name": case.name, "workers": case.workers, **result}
    path = folder / f"{run}_{accelerator.process_index}.json"
    path.write_text(json.dumps(results), encoding="utf-8")
    accelerator.wait_for_everyone()
    if run == RESUMED and accelerator.is_local_main_process:
        shutil.rmtree(
            checkpoints, ignore_errors=True
        )  # copy of the folder on this node, if the node of rank 0 is another one
    accelerator.end_training()


if __name__ == "__main__":
    main()
