"""Data, model, failures and log of the training that each mechanism continues."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from accelerate.test_utils.scripts.test_failures import Log, Process

torch.set_default_dtype(torch.float64)  # so that a difference of weights is not rounding
FOLDER, PAUSE = Path(os.environ["CHAOS_FOLDER"]), float(os.environ["CHAOS_PAUSE"])
EPOCHS, MEMBERS = int(os.environ["CHAOS_EPOCHS"]), int(os.environ["CHAOS_MEMBERS"])
ORDER, ACCUMULATION = os.environ.get("CHAOS_ORDER", "plain"), int(os.environ.get("CHAOS_ACCUMULATION", "1"))
TIER = os.environ.get("CHAOS_TIER", "")
"""Checkpoints: "durable" ones in the project, "fast" ones after every second step too, or ""."""
PLAN = json.loads(os.environ.get("CHAOS_PLAN", "[]"))
"""Failures that a run plans itself: the index of a member or "all", a step, and a place in it."""
SAMPLES, BATCH = 96, 2
STEPS_PER_EPOCH = SAMPLES // BATCH // MEMBERS

Sample = tuple[torch.Tensor, int, int]


def make_data() -> list[Sample]:
    """Returns inputs, labels and the index of each sample."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, generator=generator), index % 4, index) for index in range(SAMPLES)]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


class Member:
    """Replica group or rank that may fail.

    Args:
        number: Its index.
        attempt: How often all processes have been started again.
    """

    def __init__(self, number: int, attempt: int = 0) -> None:
        self.number, self.step = number, 0
        self.log = Log(FOLDER, Process(number, MEMBERS, 0, 1, attempt))
        path = FOLDER / f"pid-{number}"
        path.with_suffix(".part").write_text(f"{os.getpid()} {attempt}")
        path.with_suffix(".part").replace(path)

    def fail(self, place: str) -> None:
        """Ends this process if the plan or a file names this place for it."""
        for index, (member, step, planned) in enumerate(PLAN):
            is_due = member in (self.number, "all") and place == planned and self.step >= step
            if is_due and not (done := FOLDER / f"failed-{index}-{self.number}").exists():
                done.touch()
                self._end(place)
        order = FOLDER / f"order-{place}-{'any' if place == 'save' else self.number}"
        try:
            order.unlink()
        except FileNotFoundError:
            return
        self._end(place)

    def _end(self, place: str) -> None:
        self.log.write("failure", place=place)
        if place == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    def log_attempt(self, step: int, epoch: int, samples: list[int], num_members: int) -> None:
        """Logs samples before gradients are sent, with which the others can take the step after a failure."""
        self.log.write("attempt", step=step, epoch=epoch, samples=samples, num_members=num_members)

    def log_step(self, step: int, epoch: int, samples: list[int], num_members: int) -> None:
        """Logs the samples of a step that is taken."""
        self.log.write("step", step=step, epoch=epoch, samples=samples, num_members=num_members)

    def log_weights(self, state: dict[str, torch.Tensor]) -> None:
        """Writes the final weights."""
        weights = {name: tensor.double().flatten().tolist() for name, tensor in state.items()}
        (FOLDER / f"end-{self.number}.json").write_text(json.dumps({"weights": weights}))
