"""Interrupted runs of several processes resume exactly, also with another world size."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from tests.stand_ins.drawing import Noisy, Passes
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info

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
    """Resumes at its position."""

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


class BareStream(IterableDataset[Any]):
    """Can only be read from its beginning."""

    def __iter__(self) -> Iterator[Any]:
        return iter([Numbers()[index] for index in range(SAMPLES)])


class WorkersStream(BareStream):
    """Gives each of its workers a part of the samples."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter([Numbers()[index] for index in range(first, SAMPLES, step)])


class DrawingStream(BareStream):
    """Draws from the generator of torch, from which training draws, too."""

    def __iter__(self) -> Iterator[Any]:
        return ((index, inputs + torch.rand(())) for index, inputs in super().__iter__())


class Batches:
    """A batch sampler of the user's own: sizes and order from Python's generator."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        while order:
            size = random.choice([2, 3])
            yield order[:size]
            del order[:size]


class Backwards(Sampler[int]):
    """A sampler of the user's own, without random numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES - 1, -1, -1))

    def __len__(self) -> int:
        return SAMPLES


def build(kind: str, workers: int = 0) -> DataLoader[Any]:
    shared: dict[str, Any] = {"num_workers": workers, "batch_size": BATCH}
    match kind:
        case "stream":
            return DataLoader(Stream(), **shared)
        case "bare stream":
            return DataLoader(BareStream(), **shared)
        case "two workers":
            return DataLoader(WorkersStream(), num_workers=2, batch_size=BATCH)
        case "drawing stream":
            return DataLoader(DrawingStream(), **shared)
        case "persistent workers":
            return DataLoader(BareStream(), persistent_workers=True, **shared)
        case "own generator":
            return DataLoader(Numbers(), shuffle=True, generator=torch.Generator().manual_seed(3), **shared)
        case "with replacement":
            return DataLoader(Numbers(), sampler=RandomSampler(Numbers(), replacement=True), **shared)
        case "sampler":
            return DataLoader(Numbers(), sampler=Backwards(), **shared)
        case "own states":
            return DataLoader(Numbers() if workers else Noisy(SAMPLES), sampler=Passes(SAMPLES), **shared)
        case "batch sampler":
            return DataLoader(Numbers(), batch_sampler=Batches(), num_workers=workers)  # type: ignore[arg-type]
    return DataLoader(Numbers(), shuffle=True, **shared)


KINDS = ("shuffled", "own generator", "with replacement", "sampler", "batch sampler", "stream", "bare stream")
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "seedable": {"use_seedable_sampler": True},
    "dispatched": {"dispatch_batches": True},
    "sharded": {"dispatch_batches": False},
    "resumes by itself": {"use_stateful_dataloader": True},
    "dispatched, by itself": {"use_stateful_dataloader": True, "dispatch_batches": True},
    "sharded, by itself": {"use_stateful_dataloader": True, "dispatch_batches": False},
}


def train(kind: str, workers: int, config: dict[str, Any], stop: Any = None, resume_after: Any = None) -> Any:
    """The documented loop; it stops behind the step `stop`, or resumes after the step `resume_after`."""
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # by torchdata
    set_seed(99 if resume_after else 0)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**config))
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), 0.01), build(kind, workers)
    )
    torch.manual_seed(accelerator.process_index)
    steps = []
    first, seen = 0, 0
    if resume_after:
        accelerator.load_state("checkpoint")
        first, seen = resume_after[0], resume_after[1] + 1
    for epoch in range(first, EPOCHS):
        resumes = epoch == first and seen > 0
        skips = resumes and not config.get("use_stateful_dataloader")
        batches = accelerator.skip_first_batches(loader, seen) if skips else loader
        for number, (index, inputs) in enumerate(batches, start=seen if resumes else 0):
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
        behind, again = train(kind, workers, config, resume_after=stop)
        same = all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
        found.append((stop, before + behind == whole, same))
    return found


Case = tuple[str, int, dict[str, Any], list[Any]]


def check(run: Run, cases: list[Case], processes: int, timeout: float = 120) -> None:
    for rank in run(call_for_each, interrupt, cases, processes=processes, timeout=timeout):
        found = [(case, entry) for case, entries in zip(cases, rank, strict=True) for entry in entries]
        assert [(case[:3], entry) for case, entry in found if not all(entry[1:])] == []


def test_interrupted_equals_uninterrupted(run: Run) -> None:
    cases: list[Case] = [
        ("shuffled", 0, {}, [(0, 2), (1, 6)]),
        ("shuffled", 0, {"use_constant_memory_sampler": True}, [(0, 2), (1, 6)]),
        ("shuffled", 0, CONFIGS["dispatched"], [(0, 2), (1, 6)]),
        ("stream", 0, {}, [(0, 2), (1, 6)]),
        ("own states", 0, {}, [(0, 2), (1, 6)]),
        ("stream", 0, CONFIGS["dispatched, by itself"], [(0, 2)]),
        ("batch sampler", 0, CONFIGS["dispatched"], [(0, 2)]),
        ("batch sampler", 0, CONFIGS["resumes by itself"], [(0, 2)]),
        ("drawing stream", 0, CONFIGS["sharded"], [(0, 2)]),
        ("drawing stream", 0, CONFIGS["sharded, by itself"], [(0, 2)]),
    ]
    check(run, cases, 2)


def test_sums_of_three_processes_are_rounded_alike(run: Run) -> None:
    check(run, [("shuffled", 0, {}, [(0, 0), (1, 2)])], 3)


@pytest.mark.slow
def test_a_dispatched_stream_with_persistent_workers_resumes(run: Run) -> None:
    check(run, [("persistent workers", 1, {}, [(0, 2)])], 2)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])  # one: tests/unit/data_loader/test_position.py
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_whole_matrix(run: Run, config: dict[str, Any], processes: int) -> None:
    check(run, [(kind, 0, config, [(0, 0), (1, 1), (1, 3)]) for kind in KINDS], processes, 400)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_matrix_with_workers(run: Run, config: dict[str, Any], processes: int) -> None:
    kinds = ("shuffled", "batch sampler", "stream", "bare stream")
    check(run, [(kind, 2, config, [(0, 2), (1, 1)]) for kind in kinds], processes, 400)


def begin(folder: str, kind: str, config: dict[str, Any], batches: int) -> list[float]:
    """Read a part of an epoch and save; the samples of this process."""
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # by torchdata
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
    """Resume the epoch, and read the next one; the real samples of all processes."""
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # by torchdata
    set_seed(5)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**config))
    loader = accelerator.prepare(build(kind))
    accelerator.load_state(folder)
    continues = config.get("use_stateful_dataloader")
    rest = loader if continues else accelerator.skip_first_batches(loader, batches)
    return [
        [value for index, _ in part for value in accelerator.gather_for_metrics(index).flatten().tolist()]
        for part in (rest, loader)
    ]


RESIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "sharded": ("shuffled", {}),
    "constant memory": ("shuffled", {"use_constant_memory_sampler": True}),
    "dispatched": ("shuffled", {"dispatch_batches": True}),
    "stream": ("stream", {"dispatch_batches": False}),
    "bare stream": ("bare stream", {}),
    "two workers": ("two workers", {}),
    "bare stream, by itself": ("bare stream", {"dispatch_batches": False, "use_stateful_dataloader": True}),
}
SIZES = [(2, 3), (3, 1), (1, 2)]
IN_GATE = {
    "sharded": (2, 3),
    "dispatched": (3, 1),
    "stream": (1, 2),
    "bare stream": (2, 3),
    "two workers": (3, 1),
}


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [
        pytest.param(name, *sizes, marks=[] if IN_GATE.get(name) == sizes else pytest.mark.slow)
        for name in RESIZED
        for sizes in SIZES
    ],
)
def test_another_world_size_resumes_at_the_next_sample(
    run: Run, tmp_path: Path, name: str, before: int, now: int
) -> None:
    kind, config = RESIZED[name]
    batches = 1 if kind == "two workers" else 2  # of which the workers have read different numbers
    folder = str(tmp_path / "saved")
    parts = run(begin, folder, kind, config, batches, processes=before)
    seen = sorted(sample for part in parts for sample in part)
    assert len(seen) == batches * BATCH * before
    for rest, following in run(finish, folder, kind, config, batches, processes=now):
        assert sorted(seen + rest) == list(range(SAMPLES))
        assert sorted(following) == list(range(SAMPLES))


def go_on(
    folder: str, target: str, kind: str, config: dict[str, Any], seen: int, batches: int
) -> list[float]:
    """Resume the epoch, read a part of its rest and save; the samples of all processes."""
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # by torchdata
    set_seed(5)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**config))
    loader = accelerator.prepare(build(kind))
    accelerator.load_state(folder)
    continues = config.get("use_stateful_dataloader")
    samples: list[float] = []
    rest = loader if continues else accelerator.skip_first_batches(loader, seen)
    for number, (index, _) in enumerate(rest, 1):
        samples += accelerator.gather_for_metrics(index).flatten().tolist()
        if number == batches:
            accelerator.save_state(target)
            break
    return samples


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("shuffled", {"dispatch_batches": True}),
        pytest.param("bare stream", {}, marks=pytest.mark.slow),
        pytest.param(
            "bare stream",
            {"dispatch_batches": False, "use_stateful_dataloader": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dispatched", "stream", "stateful stream"],
)
def test_a_second_interruption_of_an_epoch_with_another_world_size(
    run: Run, tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    seen = [sample for part in run(begin, first, kind, config, 2, processes=3) for sample in part]
    seen += run(go_on, first, second, kind, config, 2, 1, processes=2)[0]
    for rest, following in run(finish, second, kind, config, 3, processes=2):
        assert sorted(seen + rest) == list(range(SAMPLES))
        assert sorted(following) == list(range(SAMPLES))
