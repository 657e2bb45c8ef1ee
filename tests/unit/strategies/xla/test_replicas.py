"""Models on XLA devices have new parameters, which optimizers follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import PreparationError
from accelerate.state import GradientState
from accelerate.strategies import Context
from accelerate.strategies.xla import XlaOptimizer, XlaReplicas


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight


@pytest.fixture
def strategy(context: Context) -> XlaReplicas:
    """Its device is another one, so that a module moved there gets new parameters."""
    return XlaReplicas(replace(context, device=torch.device("meta")))


def test_optimizers_follow_and_ties_hold(strategy: XlaReplicas) -> None:
    model = Tied()
    before = [torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.SGD(model.parameters(), lr=1.0)]
    session = strategy.session
    prepared = strategy.wrap_optimizer(before[0], to_device=False)
    session.prepared.optimizers.append(prepared)
    old = model.first.weight
    with session.following([before[1]]):
        assert strategy.wrap_model(model, to_device=True, evaluation=False) is model
    assert model.first.weight is model.second.weight
    assert model.first.weight is not old
    late = strategy.wrap_optimizer(torch.optim.SGD([old], lr=1.0), to_device=False)
    expected = {id(p) for p in model.parameters()}
    for optimizer in (prepared, before[1]):
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == expected
    assert late.param_groups[0]["params"] == [model.first.weight]
    assert isinstance(late, XlaOptimizer)


def test_gradients_are_averaged_before_they_are_clipped(fake: Any, context: Context) -> None:
    strategy = XlaReplicas(context)
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), 7.0)
    assert strategy.clip_grad_norm([weight], 1.0) == 4.0
    assert weight.grad.item() == pytest.approx(1.0, abs=1e-5)
    strategy.clip_grad_value(weight, 0.5)
    assert weight.grad.item() == 0.5
    assert fake.calls == [("sum", 1, 0.25)]


def test_gradients_that_still_add_up_are_not_averaged(fake: Any, context: Context) -> None:
    strategy = XlaReplicas(context)
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), 7.0)
    GradientState()._set_sync_gradients(False)
    strategy.clip_grad_value([weight], 100.0)
    assert (weight.grad.item(), fake.calls) == (7.0, [])


def test_a_split_model_is_refused(strategy: XlaReplicas) -> None:
    model: Any = nn.Linear(1, 1)
    model.hf_device_map = {"a": 0, "b": "cpu"}
    with pytest.raises(PreparationError, match="XLA devices take whole models"):
        strategy.check_model(model)
