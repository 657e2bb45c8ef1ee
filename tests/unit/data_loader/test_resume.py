"""An interrupted and resumed run has the same samples and weights as one without a break."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stand_ins.drawing import Noisy, Passes
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from accelerate import Accelerator, DataLoaderConfiguration, rng
from accelerate.base import CheckpointError
from accelerate.data_loader import advance, resume
from accelerate.utils import set_seed
from accelerate.weights import load

pytestmark = [
    pytest.mark.usefixtures("states"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]
SAMPLES, BATCH, EPOCHS = 23, 3, 3
Steps = list[tuple[int, int, list[float]]]


class Plain(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), torch.ones(3) * index


class Augmented(Plain):
    """Draws random numbers for each sample."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), torch.randn(3)


class Batches:
    """A custom batch sampler: sizes and order from Python's generator."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        while order:
            size = random.choice([2, 3])
            yield order[:size]
            del order[:size]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([Plain()[index] for index in range(SAMPLES)])


class StreamWithState(IterableDataset[Any]):
    """Resumes at its position, and counts what it reads."""

    def __init__(self) -> None:
        self.index = self.read = 0

    def __iter__(self) -> Iterator[Any]:
        while self.index < SAMPLES:
            self.index += 1
            self.read += 1
            yield Plain()[self.index - 1]
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


def build(kind: str, workers: int) -> DataLoader[Any]:
    shared: dict[str, Any] = {"num_workers": workers, "batch_size": BATCH}
    match kind:
        case "shuffled":
            return DataLoader(Plain() if workers else Augmented(), shuffle=True, **shared)
        case "own generator":
            return DataLoader(Plain(), shuffle=True, generator=torch.Generator().manual_seed(3), **shared)
        case "with replacement":
            return DataLoader(Plain(), sampler=RandomSampler(Plain(), replacement=True), **shared)
        case "batch sampler":
            return DataLoader(Plain(), batch_sampler=Batches(), num_workers=workers)  # type: ignore[arg-type]
        case "own states":
            return DataLoader(Plain() if workers else Noisy(SAMPLES), sampler=Passes(SAMPLES), **shared)
        case "in order":
            return DataLoader(Augmented() if not workers else Plain(), **shared)
        case "stream":
            return DataLoader(Stream(), **shared)
    return DataLoader(StreamWithState(), **shared)


KINDS = (
    "shuffled",
    "own generator",
    "with replacement",
    "batch sampler",
    "own states",
    "in order",
    "stream",
    "stream with state",
)


def train(
    folder: Path, kind: str, workers: int, config: dict[str, Any], stop: Any = None, resume_after: Any = None
) -> tuple[Steps, Any]:
    """The documented loop; it stops behind the step `stop`, or resumes after the step `resume_after`."""
    set_seed(99 if resume_after else 0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), 0.01), build(kind, workers)
    )
    steps: Steps = []
    first_epoch, seen = 0, 0
    if resume_after:
        accelerator.load_state(folder)
        first_epoch, seen = resume_after[0], resume_after[1] + 1
    for epoch in range(first_epoch, EPOCHS):
        batches, before = loader, 0
        if epoch == first_epoch and seen:
            before = seen
            if not config.get("use_stateful_dataloader"):
                batches = accelerator.skip_first_batches(loader, seen)
        for number, (index, inputs) in enumerate(batches, start=before):
            accelerator.backward(model(inputs).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            steps.append((epoch, number, index.flatten().tolist()))
            if (epoch, number) == stop:
                accelerator.save_state(folder)
                return steps, None
    return steps, [parameter.detach().clone() for parameter in model.parameters()]


CONSTANT_MEMORY = {"use_constant_memory_sampler": True}
CONFIGS: tuple[dict[str, Any], ...] = ({}, {"use_seedable_sampler": True}, {"use_stateful_dataloader": True})


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "seedable", "stateful"])
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_equals_uninterrupted(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    check(tmp_path, kind, 0, config)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=["default", "seedable", "stateful"])
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_equals_uninterrupted_with_workers(
    tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    check(tmp_path, kind, 2, config)


@pytest.mark.parametrize("kind", ["shuffled", "own generator"])
@pytest.mark.parametrize("stateful", [False, True])
def test_an_order_that_is_computed_resumes(tmp_path: Path, kind: str, stateful: bool) -> None:
    check(tmp_path, kind, 0, {**CONSTANT_MEMORY, "use_stateful_dataloader": stateful})


@pytest.mark.parametrize("before", [False, True])
def test_an_epoch_does_not_resume_with_another_sampler(before: bool) -> None:
    def prepare(computed: bool) -> Any:
        config = DataLoaderConfiguration(use_seedable_sampler=True, use_constant_memory_sampler=computed)
        return Accelerator(cpu=True, dataloader_config=config).prepare(build("shuffled", 0))

    loader, other = prepare(before), prepare(not before)
    states = [resume.capture(loader) for _ in loader]
    with pytest.raises(
        CheckpointError, match=f"use_constant_memory_sampler was {before} and is {not before}"
    ):
        resume.restore(other, states[0] or {})
    for allowed in (states[-1], resume.capture(loader)):
        resume.restore(other, allowed or {})


def check(
    folder: Path, kind: str, workers: int, config: dict[str, Any], places: Any = ("first", "middle", "last")
) -> None:
    whole, weights = train(folder, kind, workers, config)
    last = max(number for epoch, number, _ in whole if epoch == 1)
    for stop in ({"first": (0, 0), "middle": (1, 4), "last": (1, last)}[place] for place in places):
        before, _ = train(folder, kind, workers, config, stop=stop)
        behind, again = train(folder, kind, workers, config, resume_after=stop)
        assert before + behind == whole, stop
        assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True)), stop


def test_a_stream_with_state_reads_nothing_twice() -> None:
    accelerator = Accelerator(cpu=True)
    dataset = StreamWithState()
    loader = accelerator.prepare(DataLoader(dataset, batch_size=BATCH))
    state = {**(resume.capture(loader) or {}), "seen": 5, "consumed": 5}
    resume.restore(loader, state, {"dataset": {"state": {"index": 15}, "first": []}})
    assert len(list(accelerator.skip_first_batches(loader, 5))) == 3
    assert dataset.read == SAMPLES - 15


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "seedable", "stateful"])
@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("kind", ["shuffled", "stream", "stream with state"])
def test_between_two_epochs_the_next_order_is_the_same(
    tmp_path: Path, kind: str, config: dict[str, Any], epochs: int
) -> None:
    def run(resume_after: bool) -> list[Any]:
        set_seed(7 if resume_after else 0)
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        loader = accelerator.prepare(build(kind, 0))
        if resume_after:
            accelerator.load_state(tmp_path)
        else:
            for _ in range(epochs):
                list(loader)
            accelerator.save_state(tmp_path)
        drawn = torch.rand(1).item()
        return [drawn, *(index.tolist() for _ in range(2) for index, _ in loader)]

    assert run(resume_after=False) == run(resume_after=True)


def test_a_pass_without_a_late_start_repeats_the_epoch_from_its_beginning(tmp_path: Path) -> None:
    whole, _ = train(tmp_path, "own generator", 0, {}, stop=(0, 4))
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(build("own generator", 0))
    resume.restore(loader, load(tmp_path / "sampler.bin"))
    assert [index.flatten().tolist() for index, _ in loader][:5] == [indices for _, _, indices in whole]


def test_another_kind_of_loader_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    plain, shuffled = accelerator.prepare(build("in order", 0), build("own generator", 0))
    with pytest.raises(CheckpointError, match="had 1 random generators, and .* has 0"):
        resume.restore(plain, resume.capture(shuffled) or {})
    with pytest.raises(CheckpointError, match="this is not the position of a loader"):
        resume.restore(plain, {"epoch": 1})


@pytest.mark.parametrize("source", [list(range(50)), range(50), (n for n in range(50)), Batches()])
@pytest.mark.parametrize("count", [0, 1, 7, 49, 50, 60])
def test_advance_equals_reading(source: Any, count: int) -> None:
    if isinstance(source, Batches):
        source = RandomSampler(range(50), generator=torch.Generator().manual_seed(count))
        whole = list(RandomSampler(range(50), generator=torch.Generator().manual_seed(count)))
    elif not isinstance(source, (list, range)):
        source, whole = (n for n in range(50)), list(range(50))
    else:
        whole = list(source)
    iterator = iter(source)
    advance(iterator, count)
    assert list(iterator) == whole[count:]


def test_a_stream_with_a_shuffle_buffer_loses_no_sample() -> None:
    datasets = pytest.importorskip("datasets")
    accelerator = Accelerator(cpu=True)

    def prepare() -> Any:
        rows = datasets.Dataset.from_dict({"x": list(range(SAMPLES))})
        stream = rows.to_iterable_dataset().shuffle(seed=3, buffer_size=8)
        return accelerator.prepare(DataLoader(stream, BATCH))

    loader, again, order = prepare(), prepare(), []
    for batch in loader:
        order.append(batch["x"].tolist())
        if len(order) == 3:
            resume.restore(again, resume.capture(loader), resume.capture_stream(loader))  # type: ignore[arg-type]
    assert [batch["x"].tolist() for batch in accelerator.skip_first_batches(again, 3)] == order[3:]


def test_the_state_after_the_last_batch_is_over_and_the_next_epoch_is_not() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(range(3)))  # type: ignore[arg-type]
    states = [resume.capture(loader)["is_over"] for _ in loader]  # type: ignore[index]
    assert states == [False, False, True]
    assert resume.capture(loader)["is_over"] is False  # type: ignore[index]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_skips_nothing_after_the_last_batch_reads_the_next_epoch(kind: str, workers: int) -> None:
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(build(kind, workers))
    for _ in loader:
        if accelerator.gradient_state.end_of_dataloader:
            state, streams = resume.capture(loader), resume.capture_stream(loader)
            generators = rng.capture()
    expected = [list(loader) for _ in range(2)]
    again = accelerator.prepare(build(kind, workers))
    rng.restore(generators)
    assert state is not None
    resume.restore(again, state, streams)
    for batches in expected:
        for batch, other in zip(batches, again, strict=True):
            assert all(map(torch.equal, batch, other))
    assert again.iteration == loader.iteration


def test_a_state_restored_in_the_middle_of_a_pass_replaces_its_position() -> None:
    loader = Accelerator(cpu=True).prepare(build("own generator", 0))
    fresh = resume.capture(loader)
    assert fresh is not None
    batches = iter(loader)
    next(batches), next(batches)
    assert resume.capture(loader)["seen"] == 2  # type: ignore[index]
    resume.restore(loader, fresh)
    state = resume.capture(loader)
    assert state is not None
    assert (state["seen"], state["consumed"], state["start"]) == (0, 0, None)


class Around(IterableDataset[Any]):
    """A dataset that reads another one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


def test_the_stream_is_the_dataset_that_has_a_state() -> None:
    stream = StreamWithState()
    assert resume.stream_of(DataLoader(stream)) is stream
    assert resume.stream_of(DataLoader(Around(stream))) is stream
    assert resume.stream_of(DataLoader(Stream())) is None
    assert resume.stream_of(DataLoader(stream, num_workers=1)) is None  # each worker has a copy
    mapped = Plain()
    mapped.state_dict = mapped.load_state_dict = dict  # type: ignore[attr-defined]
    assert resume.stream_of(DataLoader(mapped)) is None
