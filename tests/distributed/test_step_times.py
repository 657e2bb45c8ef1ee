"""`Accelerator.step_times` on several ranks: who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.debug import CommDebugMode

from accelerate import Accelerator
from accelerate.accelerator.accumulation import local_scalar


def train_with_a_slow_rank() -> dict[str, float]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(12):
        if step == 2:
            before = accelerator.step_times()
        if accelerator.process_index == 1:
            time.sleep(0.1)
        accelerator.backward(model(torch.ones(4, 64)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return (accelerator.step_times() - before).seconds_by


def test_the_fast_rank_waits_for_the_slow_one_in_collectives(run: Callable[..., Any]) -> None:
    fast, slow = run(train_with_a_slow_rank, processes=2)
    # Ten sleeps of 0.1 s: the times of a busy machine are below the half of it.
    assert fast["collectives"] > 0.5
    assert fast["backward"] < fast["collectives"]
    assert slow["collectives"] < fast["collectives"]
    assert slow["rest"] > 0.9


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


def read_distributed_losses() -> tuple[float, bool, int]:
    Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", (2,))
    with CommDebugMode() as counter:
        replicated, partial = (
            local_scalar(DTensor.from_local(torch.tensor(1.5), mesh, [placement], run_check=False))
            for placement in (Replicate(), Partial())
        )
    assert type(replicated) is torch.Tensor
    return float(replicated), partial is None, counter.get_total_counts()


def test_a_distributed_loss_is_recorded_only_where_it_needs_no_collective(run: Callable[..., Any]) -> None:
    assert run(read_distributed_losses, processes=2) == [(1.5, True, 0)] * 2
