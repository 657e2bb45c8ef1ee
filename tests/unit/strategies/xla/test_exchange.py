"""Each gradient is averaged once for each step."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.state import GradientState
from accelerate.strategies import Context
from accelerate.strategies.xla import GradientAverage, XlaOptimizer


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(2))
    made.grad = torch.full((2,), -1.0)
    return made


def test_gradients_are_averaged_once(fake: Any, context: Context) -> None:
    exchange = GradientAverage(4, context.gradients)
    first, second = parameter(), parameter()
    exchange([first])
    exchange([first, second, torch.nn.Parameter(torch.zeros(1))])
    assert first.grad is not None
    assert first.grad.tolist() == [2.0, 2.0]
    assert second.grad is not None
    assert second.grad.tolist() == [2.0, 2.0]
    assert fake.calls == [("sum", 1, 0.25), ("sum", 1, 0.25)]
    assert GradientState().is_xla_gradients_synced
    exchange.clear([first])
    exchange([first, second])
    assert len(fake.calls) == 3


def test_a_step_averages_steps_and_marks(fake: Any, context: Context) -> None:
    weight = parameter()
    optimizer = XlaOptimizer(torch.optim.SGD([weight], lr=1.0), GradientAverage(4, context.gradients))
    GradientState()._set_sync_gradients(False)
    assert optimizer.step() is None
    assert fake.calls == []
    GradientState()._set_sync_gradients(True)
    optimizer.step()
    assert weight.tolist() == [-2.0, -2.0]
    assert fake.calls == [("sum", 1, 0.25), "sync"]
    assert optimizer.num_updates == 1
    weight.grad = torch.full((2,), -1.0)
    optimizer.step()
    assert weight.tolist() == [-4.0, -4.0], "the next step averages anew"


def test_a_loader_marks_its_batches_itself(fake: Any, context: Context) -> None:
    class Loader:
        end_of_dataloader, remainder = False, -1

    loader = Loader()
    GradientState()._add_dataloader(loader)
    optimizer = XlaOptimizer(torch.optim.SGD([parameter()], lr=1.0), GradientAverage(1, context.gradients))
    optimizer.step()
    assert fake.calls == []


def test_gradients_of_a_closure_are_averaged_each_time(fake: Any, context: Context) -> None:
    weight = parameter()
    optimizer = XlaOptimizer(torch.optim.SGD([weight], lr=1.0), GradientAverage(4, context.gradients))

    def closure() -> float:
        weight.grad = torch.full((2,), -5.0)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert weight.tolist() == [-1.0, -1.0]
