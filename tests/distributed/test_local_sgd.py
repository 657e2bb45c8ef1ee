"""Processes that train on their own between averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelerate.accelerator import Accelerator
from accelerate.local_sgd import LocalSGD

Run = Callable[..., list[Any]]


def train(unwraps: bool = False) -> list[float]:
    """Move one weight by 1 a step on rank 0 and by 3 on rank 1; average after each second step."""
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    pull = -1.0 if accelerator.process_index == 0 else -3.0
    weights = []
    averaged = accelerator.unwrap_model(model) if unwraps else model
    with LocalSGD(accelerator, averaged, local_sgd_steps=2) as local_sgd:
        for _ in range(5):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 1), pull)).sum())
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
            weights.append(next(model.parameters()).item())
    weights.append(next(model.parameters()).item())
    return weights


@pytest.mark.parametrize("unwraps", [False, True])
def test_weights_differ_between_averages_and_are_equal_after(run: Run, unwraps: bool) -> None:
    assert run(train, unwraps) == [[1.0, 4.0, 5.0, 8.0, 9.0, 10.0], [3.0, 4.0, 7.0, 8.0, 11.0, 10.0]]
