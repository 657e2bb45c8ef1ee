"""A checkpoint is loaded into the objects that trained on after it, or into new ones: all else is equal."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fuzz import sources
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import resume
from accelerate.utils import set_seed

pytestmark = [
    pytest.mark.usefixtures("states"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]
SAMPLES, BATCH, EPOCHS = 12, 2, 3
Step = tuple[int, int, list[int]]
Stop = tuple[int, int]
"""The checkpoint is saved behind this batch of an epoch; -1: before the first one."""


def indices_of(kind: type[sources.Stream]) -> sources.Stream:
    """A stream whose samples are their indices."""
    return type(kind.__name__, (kind,), {"read": lambda self, index: index})(SAMPLES)


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(range(SAMPLES), BATCH, shuffle=True, **options)  # type: ignore[arg-type]


WORKERS: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
WITH_WORKERS = ("shuffled", "stream by epoch")
LOADERS = {
    "shuffled": lambda: shuffled(**WORKERS),
    "stream by epoch": lambda: DataLoader(indices_of(sources.EpochStream), BATCH, **WORKERS),
    "position": lambda: DataLoader(indices_of(sources.PositionStream), BATCH),
    "restart": lambda: DataLoader(indices_of(sources.RestartStream), BATCH),
    "counting": lambda: DataLoader(indices_of(sources.CountingStream), BATCH),
}


class Reader:
    """Reads the epochs of a loader, and saves or loads between two batches."""

    def __init__(self, kind: str, config: dict[str, Any], seed: int = 0) -> None:
        set_seed(seed)
        self.accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        self.has_workers = kind in WITH_WORKERS
        self.by_itself = bool(config.get("use_stateful_dataloader"))
        self.loader: Any = self.accelerator.prepare(LOADERS[kind]())

    def read(self, first: int = 0, seen: int = 0) -> Iterator[Step]:
        for epoch in range(first, EPOCHS):
            start = seen if epoch == first else 0
            if not start:
                yield epoch, -1, []
            skips = start and not self.by_itself
            batches = self.accelerator.skip_first_batches(self.loader, start) if skips else self.loader
            for number, batch in enumerate(batches, start):
                yield epoch, number, batch.tolist()

    def rest(self, stop: Stop) -> tuple[list[Step], float]:
        steps = list(self.read(stop[0], stop[1] + 1))
        self.close()
        return [step for step in steps if step[1] >= 0], torch.rand(()).item()

    def close(self) -> None:
        """End the workers: they are in a cycle of references."""
        has_workers = self.has_workers
        self.accelerator.free_memory()
        self.__dict__.clear()
        if has_workers:
            gc.collect()


def behind(stop: Stop, kind: str, config: dict[str, Any]) -> tuple[list[Step], float]:
    """What a run without a break does behind a batch."""
    steps, drawn = Reader(kind, config).rest((0, -1))
    return [step for step in steps if step[:2] > stop], drawn


def save(reader: Reader, stop: Stop, folder: Path) -> Iterator[Step]:
    """Read up to a batch and save; returns the pass, which is not over."""
    source = reader.read()
    for step in source:
        if step[:2] == stop:
            break
    reader.accelerator.save_state(folder)
    return source


STOPS = [(1, 2), (0, 5), (2, -1)]
IN_GATE = (("shuffled", False), ("position", True), ("restart", False), ("counting", True))
CASES = [
    pytest.param(kind, stateful, marks=[] if (kind, stateful) in IN_GATE else [pytest.mark.slow])
    for kind in LOADERS
    for stateful in (False, True)
]


@pytest.mark.parametrize(("kind", "stateful"), CASES)
def test_new_objects_go_on_as_without_a_break(tmp_path: Path, kind: str, stateful: bool) -> None:
    config = {"use_stateful_dataloader": stateful}
    for stop in STOPS:
        reader = Reader(kind, config)
        save(reader, stop, tmp_path)
        reader.close()
        resumed = Reader(kind, config, seed=5)
        resumed.accelerator.load_state(tmp_path)
        assert resumed.rest(stop) == behind(stop, kind, config), stop


@pytest.mark.parametrize(("kind", "stateful"), CASES)
def test_objects_that_were_rolled_back_continue_as_without_an_interruption(
    tmp_path: Path, kind: str, stateful: bool
) -> None:
    config = {"use_stateful_dataloader": stateful}
    for stop in (0, -1), (1, 5):
        reader = Reader(kind, config)
        source = save(reader, stop, tmp_path)
        for _ in range(3):
            next(source)
        source.close()  # type: ignore[attr-defined]
        reader.accelerator.load_state(tmp_path)
        assert reader.rest(stop) == behind(stop, kind, config), stop


def test_a_checkpoint_that_is_loaded_inside_a_pass_is_not_changed_by_its_end(tmp_path: Path) -> None:
    stop = (1, 2)
    reader = Reader("shuffled", {"use_seedable_sampler": True})
    source = save(reader, stop, tmp_path)
    next(source)
    reader.accelerator.load_state(tmp_path)
    source.close()  # type: ignore[attr-defined]
    assert reader.rest(stop) == behind(stop, "shuffled", {"use_seedable_sampler": True})


@pytest.mark.parametrize("kind", ["shuffled", "position"])
def test_a_checkpoint_that_is_saved_again_before_it_was_used_is_the_same(tmp_path: Path, kind: str) -> None:
    stop = (1, 2)
    before = Reader(kind, {})
    save(before, stop, tmp_path / "one")
    before.close()
    between = Reader(kind, {}, seed=3)
    between.accelerator.load_state(tmp_path / "one")
    between.accelerator.save_state(tmp_path / "two")
    resumed = Reader(kind, {}, seed=5)
    resumed.accelerator.load_state(tmp_path / "two")
    assert resumed.rest(stop) == behind(stop, kind, {})


def test_the_state_of_a_dataset_is_saved_between_epochs() -> None:
    loader: Any = Accelerator(cpu=True).prepare(DataLoader(indices_of(sources.CountingStream), BATCH))
    list(loader)
    assert resume.capture_stream(loader)["dataset"]["state"] == {"index": 0, "epoch": 1}


def test_a_dataset_that_restarts_after_an_unfinished_pass_restarts_after_a_resume(tmp_path: Path) -> None:
    reader = Reader("restart", {})
    next(iter(reader.loader))
    reader.accelerator.save_state(tmp_path)
    resumed = Reader("restart", {})
    resumed.accelerator.load_state(tmp_path)
    assert [index for batch in resumed.loader for index in batch.tolist()] == list(range(SAMPLES))


def test_the_state_behind_a_whole_pass_is_saved_after_a_pass_left_early() -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader: Any = accelerator.prepare(DataLoader(indices_of(sources.PositionStream), BATCH))
    for _ in loader:
        break
    for _ in loader:
        streams = resume.capture_stream(loader)
    assert streams["dataset"]["state"] == {"index": 0}
