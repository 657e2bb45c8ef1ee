"""Runs that are killed at any moment: each checkpoint that was reported as saved loads.

A driver forks one run after another, kills it with SIGKILL at a random moment, mostly inside of a save, and
lets the next run load what is there before it saves in its turn. All of them work in one folder.
"""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.stand_ins.objects import Counter
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.base import CheckpointError
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration

Run = Callable[..., list[Any]]
PATIENCE = 30.0  # seconds that the driver waits for a line
WAYS = ("all", "first", "last")
COMBINATIONS = ((1, True), (1, False), (2, True), (2, False))  # processes, and whether saves block


class Training:
    """A run whose parts all hold the number of the last step, so that one can tell whether they fit."""

    def __init__(self, report: Callable[[str, int], object], folder: str = "project") -> None:
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1)
        self.accelerator = Accelerator(project_config=project)
        self.report = report
        self.counter = Counter()
        model = nn.Linear(128, 128)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), DataLoader(range(8))
        )
        self.accelerator.register_for_checkpointing(self.counter)
        self.mark(0)

    def mark(self, step: int) -> None:
        """Let all parts hold a number."""
        self.counter.count = self.accelerator.step = step
        torch.manual_seed(step * 10 + self.accelerator.process_index)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)
        for each in self.optimizer.optimizer.param_groups[0]["params"]:
            self.optimizer.optimizer.state[each]["momentum_buffer"] = torch.full_like(each, step)

    def marks(self) -> set[int]:
        """The numbers that parts hold."""
        states = self.optimizer.state_dict()["state"].values()
        tensors = [*self.model.parameters(), *(state["momentum_buffer"] for state in states)]
        seed = torch.initial_seed()
        assert seed % 10 == self.accelerator.process_index
        return {
            self.counter.count,
            self.accelerator.step,
            seed // 10,
            *(int(value) for tensor in tensors for value in tensor.unique()),
        }

    def load(self) -> int:
        """Resume from the newest checkpoint; return the number that it holds, 0 where there is none."""
        try:
            self.accelerator.load_state()
        except CheckpointError as error:
            if "none was saved" not in str(error):
                raise
            return 0
        (step,) = self.marks()
        return step

    def save_until_killed(self, step: int, blocking: bool) -> None:
        while True:
            step += 1
            self.mark(step)
            self.report("begins", step)
            self.accelerator.save_state(blocking=blocking)
            if not blocking:
                self.mark(step + 1000)  # training continues
                self.accelerator.wait_for_checkpoint()
            self.report("saved", step)


@dataclass
class Findings:
    """What the driver saw.

    Attributes:
        kills: how many runs were killed.
        inside: how many of them inside of a save.
        commits: how many saves were reported.
        loaded: the steps that the runs began with.
    """

    kills: int = 0
    inside: int = 0
    commits: int = 0
    loaded: list[int] = field(default_factory=list)


class Killed:
    """One run of several processes, and the lines that they report over a pipe, which outlives them."""

    def __init__(self, processes: int, blocking: bool) -> None:
        self.lines: list[tuple[str, int, float]] = []
        self._rest = b""
        self._pipe, end = os.pipe()
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("", 0))
            port = holder.getsockname()[1]
            self.pids = [self._fork(rank, processes, port, end, blocking) for rank in range(processes)]
            os.close(end)
            self.wait_for("loads", processes)

    def _fork(self, rank: int, processes: int, port: int, pipe: int, blocking: bool) -> int:
        if pid := os.fork():
            return pid
        try:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            os.environ.update({name: str(value) for name, value in names.items()}, MASTER_PORT=str(port))
            run = Training(lambda kind, step: os.write(pipe, f"{kind} {step}\n".encode()))
            step = run.load()
            run.report("loads", step)
            run.save_until_killed(step, blocking)
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    def read(self, seconds: float) -> bool:
        """Take in what was reported; False when no process is left that could report."""
        readable, _, _ = select.select([self._pipe], [], [], seconds)
        if not readable:
            return True
        data = os.read(self._pipe, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for kind, step in (line.decode().split() for line in lines):
            self.lines.append((kind, int(step), time.monotonic()))
        return bool(data)

    def wait_for(self, kind: str, times: int) -> None:
        end = time.monotonic() + PATIENCE
        while sum(line[0] == kind for line in self.lines) < times:
            assert time.monotonic() < end, f"no {kind!r} within {PATIENCE} s: {self.lines}"
            assert self.read(0.1), f"ended without {kind!r}: {self.lines}"

    def steps(self, kind: str) -> list[int]:
        return [line[1] for line in self.lines if line[0] == kind]

    def kill(self, way: str, pause: float) -> None:
        """End all at once, or one of them and the others a moment later, as a launcher does."""
        first = {"all": self.pids, "first": self.pids[:1], "last": self.pids[-1:]}[way]
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        if len(first) < len(self.pids):
            time.sleep(pause)
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)
        while self.read(0):
            pass
        os.close(self._pipe)


def drive(kills: int, seed: int) -> list[dict[str, Any]]:
    """Start runs and kill them, of one and two processes, with saves in the foreground and background."""
    warnings.simplefilter("ignore")
    warm_up()
    chance, home = random.Random(seed), os.getcwd()
    found = []
    for processes, blocking in COMBINATIONS:
        place = f"{processes}-{blocking}"
        os.mkdir(place)
        os.chdir(place)
        found.append(vars(kill_one_after_another(kills, processes, blocking, chance)))
        os.chdir(home)
    return found


def kill_one_after_another(kills: int, processes: int, blocking: bool, chance: random.Random) -> Findings:
    """Kill runs; each begins by loading what the one before has left."""
    found, reported, span = Findings(), 0, 0.02
    for number in range(kills + 1):
        run = Killed(processes, blocking)
        loaded = set(run.steps("loads"))
        assert len(loaded) == 1, f"ranks loaded different checkpoints: {loaded}"
        assert min(loaded) >= reported, f"run {number} loaded {loaded}, and {reported} had been reported"
        found.loaded += loaded
        if number < kills:
            # Mostly behind a commit, sometimes within the first save.
            least = 1 if chance.random() < 0.2 else processes + 1
            run.wait_for("begins", chance.randint(least, 4 * processes))
            time.sleep(chance.random() * span * 1.2)
        way = chance.choice(WAYS[: 1 if processes == 1 else None])
        run.kill(way, chance.random() * 0.05)
        found.kills += number < kills
        found.inside += number < kills and len(run.steps("begins")) > len(run.steps("saved"))
        found.commits += len(set(run.steps("saved")))
        reported = max([reported, *loaded, *run.steps("saved")])
        span = duration(run, span)
    left = os.listdir("project/checkpoints")
    assert len(left) <= 3, left  # the newest, one that was to be deleted, one that was being written
    return found


def warm_up() -> None:
    """Save and load once, so that the runs need not import again what this imports."""
    run = Training(lambda kind, step: None, "warm")
    run.accelerator.save_state()
    run.load()
    for cls in (AcceleratorState, PartialState, GradientState):
        cls._reset_state()


def duration(run: Killed, before: float) -> float:
    """Seconds that a save takes, from what was reported."""
    starts = {step: at for kind, step, at in reversed(run.lines) if kind == "begins"}
    taken = [at - starts[step] for kind, step, at in run.lines if kind == "saved"]
    return 0.5 * before + 0.5 * sum(taken) / len(taken) if taken else before


def check(run: Run, kills: int, seed: int, timeout: float) -> None:
    (found,) = run(drive, kills, seed, processes=1, timeout=timeout)
    for combination, each in zip(COMBINATIONS, found, strict=True):
        print(combination, each)
        assert each["kills"] == kills
        assert each["inside"] >= kills // 4
        assert len(each["loaded"]) == kills + 1


def test_a_killed_run_resumes_from_its_last_checkpoint(run: Run) -> None:
    check(run, 2, seed=0, timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_hundred_kills(run: Run) -> None:
    check(run, 50, seed=1, timeout=380)
