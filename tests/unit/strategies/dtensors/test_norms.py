"""Norms and bounds on one process; several are in the distributed tests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.base import ConfigurationError
from accelerate.strategies.dtensors import clip_values, gradient_norm, local_gradients, scale_down

CPU = torch.device("cpu")


def parameters() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(n)) for n in (2, 3, 1, 0)]
    for index, parameter in enumerate(made[:2] + made[3:]):
        parameter.grad = torch.arange(float(parameter.numel())) - index - 2.0
    return made


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf")])
def test_the_norm_is_torch_s(norm_type: float) -> None:
    ours, theirs = parameters(), [p for p in parameters() if p.numel()]
    expected = nn.utils.clip_grad_norm_(theirs, 1.5, norm_type)
    norm = gradient_norm(ours, norm_type, CPU)
    torch.testing.assert_close(norm, expected)
    scale_down(ours, norm, 1.5)
    torch.testing.assert_close(local_gradients(ours)[:2], local_gradients(theirs))


def test_the_norm_of_float64_gradients_is_as_precise() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    assert gradient_norm([parameter], 2.0, CPU).item() == pytest.approx(0.14**0.5, rel=1e-15)


def test_measuring_the_norm_does_not_change_gradients() -> None:
    ours = parameters()
    scale_down(ours, gradient_norm(ours, 2.0, CPU), float("inf"))
    assert torch.equal(ours[0].grad, parameters()[0].grad)  # type: ignore[arg-type]


def test_the_norm_without_gradients_is_zero() -> None:
    assert gradient_norm([], 2.0, CPU).item() == 0.0
    assert gradient_norm([nn.Parameter(torch.ones(2))], 2.0, CPU).item() == 0.0


def test_no_norm_of_type_zero() -> None:
    with pytest.raises(ConfigurationError, match="norm_type=0: it is not the p of a p-norm"):
        gradient_norm(parameters(), 0, CPU)


def test_values() -> None:
    ours = parameters()
    clip_values(iter(ours), 1.0)
    assert all(part.numel() == 0 or part.abs().max() <= 1.0 for part in local_gradients(ours))
    clip_values(ours[0], 0.25)
    assert ours[0].grad is not None
    assert ours[0].grad.abs().max() == 0.25
