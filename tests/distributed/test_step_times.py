"""`Accelerator.step_times` on several ranks: who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from accelerate import Accelerator


def train_with_a_slow_rank() -> dict[str, float]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(12):
        if step == 2:
            before = accelerator.step_times()
        if accelerator.process_index == 1:
            time.sleep(0.03)
        accelerator.backward(model(torch.ones(4, 64)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return (accelerator.step_times() - before).seconds_by


def test_the_fast_rank_waits_for_the_slow_one_in_collectives(run: Callable[..., Any]) -> None:
    fast, slow = run(train_with_a_slow_rank, processes=2)
    assert fast["collectives"] > 0.2
    assert fast["backward"] < 0.1
    assert slow["collectives"] < 0.1
    assert slow["rest"] > 0.25


def wait_for_a_slow_rank() -> dict[str, float]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    accelerator.backward(model(torch.ones(4, 4)).sum())
    optimizer.step()
    if accelerator.process_index == 1:
        time.sleep(0.3)
    accelerator.wait_for_everyone()
    accelerator.gather(torch.ones(2))
    return accelerator.step_times().seconds_by


def test_barriers_and_collectives_of_the_program_are_counted(run: Callable[..., Any]) -> None:
    fast, slow = run(wait_for_a_slow_rank, processes=2)
    assert fast["collectives"] > 0.2
    assert slow["rest"] > 0.25
