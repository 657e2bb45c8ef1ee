"""Optimizers that update parameters in the backward pass."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.base import ConfigurationError, PreparationError
from accelerate.strategies import Context

pytestmark = pytest.mark.usefixtures("states")


class Fused(torch.optim.Optimizer):
    """Plain descent, done while gradients appear; it has no `step`, as LOMO's."""

    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), {"lr": lr})

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        loss.backward()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= lr * parameter.grad
                    parameter.grad = None


def build(accelerator: Accelerator, lr: float = 0.5) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return accelerator.prepare(model, Fused(model, lr))


@pytest.mark.parametrize(("given", "expected"), [({}, 0.5), ({"learning_rate": 0.25}, 0.75)])
def test_fused_backward_updates_parameters_and_step_counts(given: dict[str, float], expected: float) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = build(accelerator)
    assert accelerator.has_lomo_optimizer
    accelerator.backward(model(torch.ones(1, 1)).sum(), **given)
    assert model.weight.item() == expected
    assert optimizer.step() is None
    optimizer.zero_grad()
    assert (model.weight.item(), optimizer.num_updates) == (expected, 1)


def test_forward_backward_updates_parameters_too() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = build(accelerator)
    loss = accelerator.forward_backward(model, (torch.ones(1, 1), None), lambda output, target: output.sum())
    optimizer.step()
    assert (loss.item(), model.weight.item(), optimizer.num_updates) == (1.0, 0.5, 1)


def test_a_schedule_sets_the_rate() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = build(accelerator)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step))
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
    assert model.weight.item() == 0.25


def test_with_a_gradient_scaler_step_updates_the_parameters() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = build(accelerator)
    optimizer.scaler = torch.amp.GradScaler("cpu")
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    assert (model.weight.item(), optimizer.num_updates) == (0.5, 1)


def test_unsupported_settings_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model, _ = build(accelerator)
    loss = model(torch.ones(1, 1)).sum()
    with pytest.raises(ConfigurationError, match=r"retain_graph=\[True\].*without arguments"):
        accelerator.backward(loss, retain_graph=True)
    build(accelerator)
    with pytest.raises(ConfigurationError, match="2 prepared optimizers update parameters in the backward"):
        accelerator.backward(loss)


def test_other_optimizers_have_no_fused_backward() -> None:
    accelerator = Accelerator(cpu=True)
    assert not accelerator.has_lomo_optimizer
    with pytest.raises(ConfigurationError, match="fused_backward"):
        accelerator.lomo_backward(torch.tensor(1.0), 0.1)


def test_fused_optimizers_with_several_processes_are_refused() -> None:
    strategy = Accelerator(cpu=True)._runtime.strategy
    assert isinstance(strategy.context, Context)
    strategy.replicas = 4
    with pytest.raises(PreparationError, match="models of 4 processes would diverge"):
        strategy.check_optimizer(Fused(torch.nn.Linear(1, 1), 0.1))


def test_accumulation_makes_no_larger_batches(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(Accelerator(cpu=True, gradient_accumulation_steps=3))
    assert "gradient_accumulation_steps=3 does not make its batches larger" in caplog.text
