"""The contract of every number format."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from accelerate.devices import CPU
from accelerate.precision import PRECISIONS, Precision, PrecisionRequest, resolve_precision


@pytest.fixture(params=sorted(PRECISIONS))
def precision(request: pytest.FixtureRequest) -> Precision:
    return resolve_precision(PrecisionRequest(request.param, CPU))


def scaled(precision: Precision, loss: torch.Tensor) -> torch.Tensor:
    return loss if precision.scale_loss is None else precision.scale_loss(loss)


def test_convert_returns_the_module_it_was_given(precision: Precision) -> None:
    model = torch.nn.Linear(2, 2)
    assert precision.convert(model) is model
    assert precision.convert(model) is model
    assert model(torch.ones(1, 2)).dtype == torch.float32


def test_unscale_divides_gradients_by_the_scale(precision: Precision) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([weight], lr=1.0)
    optimizer = SimpleNamespace(optimizer=inner, scaler=precision.scaler, gradients_unscaled=False)
    scaled(precision, (weight * 2).sum()).backward()
    precision.unscale([optimizer])
    precision.unscale([optimizer])
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_gradients_of_a_scaled_loss_have_its_scale(precision: Precision) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    loss = (weight * 2).sum()
    scaled(precision, loss).backward(retain_graph=True)
    scaled(precision, loss).backward()
    assert weight.grad is not None
    assert weight.grad.item() / precision.gradient_scale() == 4.0


def test_autocast_can_be_turned_off(precision: Precision) -> None:
    with precision.autocast(enabled=False):
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.float32
