"""Loops of any order have the weights of a run without failures when a replica group ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchft")

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--main_process_port", "0"]
SECONDS = 240
SCRIPT = """
import itertools, os, pathlib, signal, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from accelerate import Accelerator

folder, order = pathlib.Path(os.environ["FOLDER"]), os.environ["ORDER"]
replica = int(os.environ.get("ACCELERATE_REPLICA", "0"))
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=int(os.environ["STEPS"]))
torch.manual_seed(0)
middle = nn.BatchNorm1d(8) if order == "statistics" else nn.Tanh()
first, second = nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 4)), nn.Linear(4, 4)
first, second = first.double(), second.double()
both = [*first.parameters(), *second.parameters()]
one = torch.optim.AdamW(first.parameters() if order in ("two optimizers", "gan") else both, lr=0.02)
two = torch.optim.SGD(second.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
data = [torch.randn(4, generator=generator).double() for _ in range(64)]
loader = DataLoader(data, batch_size=2)
first, second, one, loader = accelerator.prepare(first, second, one, loader)
if order in ("two optimizers", "gan"):
    two = accelerator.prepare(two)


def fail(number):
    if replica == int(os.environ.get("REPLICA", "-1")) and number == int(os.environ["NUMBER"]):
        if not (folder / "failed").exists():
            (folder / "failed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(number, batch):
    if order == "plain":
        loss = second(first(batch)).square().mean()
        accelerator.backward(loss)
        fail(number)
        one.step()
        one.zero_grad()
    elif order in ("zero first", "statistics"):
        one.zero_grad()
        loss = second(first(batch)).square().mean()
        fail(number)
        accelerator.backward(loss)
        one.step()
    elif order == "zero after forward":
        loss = second(first(batch)).square().mean()
        one.zero_grad()
        accelerator.backward(loss)
        fail(number)
        one.step()
    elif order == "two backward":
        hidden = first(batch)
        accelerator.backward(second(hidden).square().mean())
        fail(number)
        accelerator.backward(second(first(batch + 1)).abs().mean())
        one.step()
        one.zero_grad()
    elif order == "two optimizers":
        one.zero_grad()
        two.zero_grad()
        loss = second(first(batch)).square().mean()
        accelerator.backward(loss)
        fail(number)
        one.step()
        two.step()
    elif order == "gan":
        loss = F.softplus(second(first(batch).detach())).mean() + F.softplus(-second(batch)).mean()
        accelerator.backward(loss)
        two.step()
        two.zero_grad()
        fail(number)
        loss = F.softplus(-second(first(batch))).mean()
        accelerator.backward(loss)
        one.step()
        one.zero_grad()
        two.zero_grad()
    elif order == "closure":
        def closure():
            one.zero_grad()
            loss = second(first(batch)).square().mean()
            accelerator.backward(loss)
            return loss
        fail(number)
        one.step(closure)


number = 0
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(first, second):
            train(number, batch)
        number += 1
        time.sleep(float(os.environ.get("PAUSE", "0")))
others = {f"second.{name}": value for name, value in accelerator.get_state_dict(second).items()}
state = {**accelerator.get_state_dict(first), **others}
if accelerator.process_index == 0:
    torch.save(state, folder / f"end-{replica}.pt")
"""
REFUSED = {"gan": "after an optimizer has stepped on this batch"}
ORDERS = [
    "plain",
    "zero first",
    "zero after forward",
    "two backward",
    "two optimizers",
    "gan",
    "closure",
    "statistics",
]


def launch(folder: Path, *options: str, **variables: str) -> tuple[list[dict[str, Any]], int, str]:
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "FOLDER": str(folder), "OMP_NUM_THREADS": "1", **variables}
    words = [*LAUNCH, *options, str(folder / "script.py")]
    ended = subprocess.run(
        words, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False
    )
    return [torch.load(path) for path in sorted(folder.glob("end-*.pt"))], ended.returncode, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["1", "2"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_loop_has_the_weights_of_a_run_without_failures(tmp_path: Path, order: str, steps: str) -> None:
    expected, code, err = launch(tmp_path / "plain", "--num_processes", "2", ORDER=order, STEPS=steps)
    assert code == 0, err
    found, code, err = launch(
        tmp_path / "failed", "--replicas", "2", ORDER=order, STEPS=steps, REPLICA="1", NUMBER="9", PAUSE="0.3"
    )
    if order in REFUSED:
        assert code == 1
        assert REFUSED[order] in err
        return
    assert code == 0, err
    assert "and is started again" in err
    for state in found:
        torch.testing.assert_close(state, expected[0], atol=1e-9, rtol=1e-9)
