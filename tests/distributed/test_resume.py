"""Several processes that are interrupted and go on: the same run, also with another number of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

Run = Callable[..., list[Any]]
SAMPLES, BATCH, EPOCHS = 37, 3, 2


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), torch.ones(3) * index


class Stream(IterableDataset[Any]):
    """Goes on where it was."""

    def __init__(self) -> None:
        self.index = 0

    def __iter__(self) -> Iterator[Any]:
        while self.index < SAMPLES:
            self.index += 1
            yield Numbers()[self.index - 1]
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


def build(kind: str, workers: int = 0) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=BATCH, num_workers=workers)
    return DataLoader(Numbers(), batch_size=BATCH, shuffle=True, num_workers=workers)


def train(kind: str, workers: int, config: dict[str, Any], stop: Any = None, go_on: Any = None) -> Any:
    """The documented loop; it stops behind the step `stop`, or goes on behind the step `go_on`."""
    set_seed(99 if go_on else 0)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**config))
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), 0.01), build(kind, workers)
    )
    torch.manual_seed(accelerator.process_index)
    steps = []
    first, seen = 0, 0
    if go_on:
        accelerator.load_state("checkpoint")
        first, seen = go_on[0], go_on[1] + 1
    for epoch in range(first, EPOCHS):
        goes_on = epoch == first and seen > 0
        batches = accelerator.skip_first_batches(loader, seen) if goes_on else loader
        for number, (index, inputs) in enumerate(batches, start=seen if goes_on else 0):
            accelerator.backward(model(inputs).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            steps.append((epoch, number, index.flatten().tolist()))
            if (epoch, number) == stop:
                accelerator.save_state("checkpoint")
                return steps, None
    return steps, [parameter.detach().clone() for parameter in model.parameters()]


def interrupt(kind: str, workers: int, config: dict[str, Any], stops: list[Any]) -> list[Any]:
    whole, weights = train(kind, workers, config)
    found = []
    for stop in stops:
        before, _ = train(kind, workers, config, stop=stop)
        behind, again = train(kind, workers, config, go_on=stop)
        same = all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
        found.append((stop, before + behind == whole, same))
    return found


def check(
    run: Run, kind: str, workers: int, config: dict[str, Any], processes: int, stops: list[Any]
) -> None:
    for found in run(interrupt, kind, workers, config, stops, processes=processes, timeout=120):
        assert [entry for entry in found if not all(entry[1:])] == []


@pytest.mark.parametrize(
    ("kind", "config"),
    [("shuffled", {}), ("shuffled", {"dispatch_batches": True}), ("stream", {})],
    ids=["sharded", "dispatched", "stream"],
)
def test_interrupted_equals_uninterrupted(run: Run, kind: str, config: dict[str, Any]) -> None:
    check(run, kind, 0, config, 2, [(0, 2), (1, 6)])


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffled", "stream"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_seedable_sampler": True},
        {"dispatch_batches": True},
        {"dispatch_batches": False},
    ],
    ids=["default", "seedable", "dispatched", "sharded"],
)
def test_the_whole_matrix(run: Run, kind: str, workers: int, config: dict[str, Any], processes: int) -> None:
    check(run, kind, workers, config, processes, [(0, 0), (0, 2), (1, 1), (1, 4)])


def begin(folder: str, kind: str, config: dict[str, Any], batches: int) -> list[float]:
    """Read a part of an epoch and save; the samples of this process."""
    set_seed(0)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**config))
    loader = accelerator.prepare(build(kind))
    samples: list[float] = []
    for number, (index, _) in enumerate(loader, 1):
        samples += index.flatten().tolist()
        if number == batches:
            accelerator.save_state(folder)
            break
    return samples


def finish(folder: str, kind: str, config: dict[str, Any], batches: int) -> Any:
    """Go on with the epoch, and read the next one; the real samples of all processes."""
    set_seed(5)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**config))
    loader = accelerator.prepare(build(kind))
    accelerator.load_state(folder)
    rest = accelerator.skip_first_batches(loader, batches)
    return [
        [value for index, _ in part for value in accelerator.gather_for_metrics(index).flatten().tolist()]
        for part in (rest, loader)
    ]


@pytest.mark.parametrize(
    ("kind", "config"),
    [("shuffled", {}), ("shuffled", {"dispatch_batches": True}), ("stream", {"dispatch_batches": False})],
    ids=["sharded", "dispatched", "stream"],
)
def test_another_number_of_processes_goes_on_at_the_right_sample(
    run: Run, tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    for before, now in ((2, 3), (3, 1), (1, 2)):
        folder = str(tmp_path / f"{before}")
        parts = run(begin, folder, kind, config, 2, processes=before)
        seen = sorted(sample for part in parts for sample in part)
        assert len(seen) == 2 * BATCH * before
        for rest, following in run(finish, folder, kind, config, 2, processes=now):
            assert sorted(seen + rest) == list(range(SAMPLES))
            assert sorted(following) == list(range(SAMPLES))
