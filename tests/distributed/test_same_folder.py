"""Runs that save and load one folder at the same time: all loaded files are of one save."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stand_ins.objects import Counter
from torch import nn

from accelerate import Accelerator
from accelerate.base import CheckpointError
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration

Run = Callable[..., list[Any]]
NAMED = Path("project/checkpoints/named")
SECONDS_TO_START = 60.0


class Training:
    """A run whose parts all hold one number, which shows whether they are of one save."""

    def __init__(self, numbered: bool) -> None:
        project = ProjectConfiguration("project", automatic_checkpoint_naming=numbered, total_limit=2)
        self.accelerator = Accelerator(project_config=project)
        self.folder = None if numbered else NAMED
        self.counter = Counter()
        self.model = nn.Linear(64, 64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.accelerator.prepare(self.model, self.optimizer)
        self.accelerator.register_for_checkpointing(self.counter)

    def save(self, number: int) -> None:
        self.counter.count = self.accelerator.step = number
        for parameter in self.model.parameters():
            parameter.data.fill_(number)
            self.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
        self.accelerator.save_state(self.folder)

    def load(self) -> set[int]:
        """Load what there is; the numbers that the parts hold."""
        self.accelerator.load_state(self.folder)
        moments = [self.optimizer.state[each]["momentum_buffer"] for each in self.model.parameters()]
        tensors = [*self.model.parameters(), *moments]
        values = {int(value) for tensor in tensors for value in tensor.unique()}
        return {self.counter.count, self.accelerator.step, *values}


def save_until_end(run: int, numbered: bool) -> None:
    """Save numbers that no other run saves; each error that is not about another run ends the process."""
    chance, training = random.Random(run), Training(numbered)
    number, saved, refused = run * 100_000, 0, 0
    while not Path("end").exists():
        number += 1
        try:
            training.save(number)
            saved += 1
        except CheckpointError as error:
            if "another process" not in str(error):
                raise
            refused += 1
        Path(f"counts{run}").write_text(f"{saved} {refused}")
        time.sleep(chance.random() * 0.04)


def fork_saver(run: int, numbered: bool) -> int:
    if pid := os.fork():
        return pid
    try:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        save_until_end(run, numbered)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@contextmanager
def savers(runs: int, numbered: bool) -> Iterator[None]:
    """Keep processes that save; rank 0 starts and ends them."""
    pids = []
    if os.environ["RANK"] == "0":
        pids = [fork_saver(run, numbered) for run in range(1, runs + 1)]
    try:
        end = time.monotonic() + SECONDS_TO_START
        while not all(Path(f"counts{run}").exists() for run in range(1, runs + 1)):
            assert time.monotonic() < end
            time.sleep(0.01)
        yield
    finally:
        Path("end").touch()
        timer = time.monotonic() + 20
        codes = [ended(pid, timer) for pid in pids]
    assert codes == [0] * len(pids)


def ended(pid: int, until: float) -> int:
    """The code of a child, which is killed when it does not end in time."""
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def load_beside(loads: int, runs: int, numbered: bool) -> dict[str, Any]:
    """Load again and again what other processes save: how many loads mixed saves, failed or worked."""
    warnings.simplefilter("ignore")
    mixed, failed, loaded, chance = [], [], [], random.Random(0)
    with savers(runs, numbered):
        training = Training(numbered)
        for _ in range(loads):
            time.sleep(chance.random() * 0.02)
            try:
                numbers = training.load()
            except CheckpointError as error:
                failed.append(str(error))
                continue
            (loaded if len(numbers) == 1 else mixed).append(sorted(numbers))
        training.accelerator.wait_for_everyone()
    counts = [tuple(map(int, Path(f"counts{run}").read_text().split())) for run in range(1, runs + 1)]
    for cls in (AcceleratorState, PartialState, GradientState):
        cls._reset_state()
    return {"mixed": mixed, "failed": failed, "loaded": loaded, "counts": counts}


def check(run: Run, loads: int, runs: int, numbered: bool, processes: int) -> None:
    found = run(load_beside, loads, runs, numbered, processes=processes, timeout=280)
    first = found[0]
    different = len({tuple(each) for each in first["loaded"]})
    print(
        f"{loads} loads on {processes} processes beside {runs} runs: {len(first['mixed'])} mixed, "
        f"{len(first['failed'])} failed, {different} different; saved and refused: {first['counts']}"
    )
    assert all(each["mixed"] == [] for each in found), first["mixed"]
    assert all(each["loaded"] == first["loaded"] for each in found)
    assert all("replaced" in text for text in first["failed"]), first["failed"]
    assert len(first["failed"]) <= loads // 10
    assert different > loads // 20


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("runs", [1, 2])
def test_two_hundred_loads_beside_saves_hold_one_save_each(
    run: Run, runs: int, numbered: bool, processes: int
) -> None:
    check(run, 200, runs, numbered, processes)
