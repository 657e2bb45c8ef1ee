"""Checkpoints of a run on the device: how long a save blocks, how steps slow down, and what is restored."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .models import TINY, Gpt2, Shape, tokens_for
from .setting import Setting

MOST_STEPS = 400  # while a save goes on
TOLERANCE = 1e-3  # of losses: some kernels add up in another order each time


class Training:
    """GPT-2 with AdamW on fixed batches."""

    def __init__(self, setting: Setting, **choices: Any) -> None:
        torch.manual_seed(0)
        shape = setting.size(Shape(), TINY)
        precision = "bf16" if setting.backend.supports(torch.bfloat16) else "no"
        self.setting = setting
        self.accelerator = setting.make_accelerator(mixed_precision=precision, **choices)
        model = Gpt2(shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.batches = tokens_for(shape, 4, setting.size(8, 2), setting.device)

    def step(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens)
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def time_step(self, number: int) -> float:
        return self.setting.time(partial(self.step, self.batches[number % len(self.batches)]))

    def state(self) -> list[Tensor]:
        """Return copies of all weights, moments and the state of the device's generator, on the CPU."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        generator = self.accelerator.state.device_backend.rng_state()
        return [
            each.detach().to("cpu", copy=True) for each in [*self.model.parameters(), *moments, generator]
        ]


def save_and_restore(setting: Setting) -> None:
    """Save both ways between steps, train on, and load."""
    training = Training(setting)
    usual = median([training.time_step(number) for number in range(setting.size(20, 6))][2:])
    setting.report("step", usual, "s")
    blocking, background = setting.folder / "blocking", setting.folder / "background"
    states = {blocking: training.state()}
    setting.report("blocked, blocking", setting.time(lambda: training.accelerator.save_state(blocking)), "s")
    size = sum(path.stat().st_size for path in blocking.rglob("*"))
    setting.report("checkpoint", size, "B")
    training.time_step(0)
    states[background] = training.state()
    save_in_background(setting, training, background, usual)
    for folder, state in states.items():
        check_restored(training, folder, state)


def save_in_background(setting: Setting, training: Training, folder: Path, usual: float) -> None:
    """Save while steps change everything that is saved."""
    save = partial(training.accelerator.save_state, folder, blocking=False)
    setting.report("blocked, in the background", setting.time(save), "s")
    meanwhile: list[float] = []
    while not folder.exists() and len(meanwhile) < MOST_STEPS:
        meanwhile.append(training.time_step(len(meanwhile)))
    setting.report("waited for the rest", setting.time(training.accelerator.wait_for_checkpoint), "s")
    setting.report("steps while it is written", len(meanwhile), "")
    if meanwhile:
        setting.report("such a step over the usual one", median(meanwhile) / usual, "x")
    training.time_step(0)


def keep_recent(setting: Setting) -> None:
    """Keep checkpoints in memory between steps, beside copies of the state to pinned memory and back."""
    from accelerate.utils import ProjectConfiguration

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as memory:
        project = ProjectConfiguration(str(setting.folder), fast_dir=memory, fast_every=1)
        training = Training(setting, project_config=project)
        batches = iter(training.accelerator.prepare(DataLoader(torch.zeros(100, 1))))
        next(batches)
        training.time_step(0)
        moments = [value for state in training.optimizer.state.values() for value in state.values()]
        state = [each.detach() for each in [*training.model.parameters(), *moments]]
        host = [torch.empty_like(each, device="cpu", pin_memory=not setting.is_host) for each in state]
        saves, copies = [], []
        for _ in range(setting.size(8, 4)):  # the first ones allocate memory
            copies.append(setting.time(partial(copy_all, host, state)))
            saved = training.state()
            saves.append(setting.time(partial(next, batches)))
            training.accelerator.wait_for_checkpoint()
            training.time_step(0)
        usual = min(copies)
        setting.report("state", sum(each.nbytes for each in state), "B")
        setting.report("copy to pinned memory", usual, "s")
        setting.report("blocked, the first time", saves[0], "s")
        setting.report("blocked", median(saves[2:]), "s")
        setting.report("blocked over the copy", median(saves[2:]) / usual, "x", at_most=1.3)
        setting.report("load", setting.time(training.accelerator.load_state), "s")
        for restored, before in zip(training.state(), saved, strict=True):
            assert torch.equal(restored, before), "a recent checkpoint has other values than were saved"
        training.accelerator.end_training()


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def average_weights(setting: Setting) -> None:
    """Average the weights in each step, beside steps without an average."""
    training = Training(setting)
    usual = [training.time_step(number) for number in range(setting.size(24, 6))]
    before = setting.allocated()
    average = training.accelerator.average(training.model, decay=0.9)
    if before is not None:
        size = sum(each.nbytes for each in training.model.parameters())
        taken = (setting.allocated() or 0) - before
        setting.report("memory over that of the weights", taken / size, "x", at_most=1.03)
    naive = [each.detach().clone() for each in training.model.parameters()]
    steps = []
    for number in range(setting.size(24, 6)):
        steps.append(training.time_step(number))
        for mean, weight in zip(naive, training.model.parameters(), strict=True):
            mean.lerp_(weight.detach(), 0.1)
    setting.report(
        "step over one without an average", median(steps[4:]) / median(usual[4:]), "x", at_most=1.03
    )
    weights = [each.detach().clone() for each in training.model.parameters()]
    with average.applied():
        for mean, weight in zip(naive, training.model.parameters(), strict=True):
            assert (mean - weight).abs().max() <= 1e-7, "the average is not that of a loop"
    for restored, weight in zip(training.model.parameters(), weights, strict=True):
        assert torch.equal(restored, weight)


def check_restored(training: Training, folder: Path, state: list[Tensor]) -> None:
    """Load a checkpoint twice: all values are those that were saved, and the steps after it are the same."""
    losses: list[list[Any]] = []
    for _ in range(2):
        training.accelerator.load_state(folder)
        for restored, saved in zip(training.state(), state, strict=True):
            assert torch.equal(restored, saved), f"{folder.name} has other values than were saved"
        losses.append([float(training.step(tokens)) for tokens in training.batches])
    for first, second in zip(*losses, strict=True):
        assert abs(first - second) <= TOLERANCE * abs(first), losses
