"""Values of recomputed blocks are those of their forward, or raise an error."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate import Accelerator
from accelerate.base import ConfigurationError
from accelerate.plugins import ActivationCheckpointing

pytestmark = pytest.mark.usefixtures("states")


class Scaled(nn.Module):
    """Block that scales its hidden states by a value."""

    def __init__(self, value: Callable[[], Any]) -> None:
        super().__init__()
        self.up, self.down, self.value = nn.Linear(4, 4), nn.Linear(4, 4), value

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.down((self.up(x) * self.value()).relu())
        return hidden


def train(model: nn.Module, handlers: list[Any], num_steps: int, between: Any = None) -> list[Tensor]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(num_steps):
        loss = model(torch.full((3, 4), step + 1.0)).square().mean()
        if between is not None:
            between(model)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [*model.state_dict().values(), torch.rand(1)]


def check(build: Callable[[], nn.Module], num_steps: int = 5, between: Any = None, **policy: Any) -> None:
    """Compares training with that without recomputation."""
    torch.manual_seed(1)
    expected = train(copy.deepcopy(model := build()), [], num_steps, between)
    for first, second in zip(
        expected,
        train(model, [ActivationCheckpointing(**policy)], num_steps, between),
        strict=True,
    ):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def count_calls() -> Callable[[], float]:
    number = 0

    def value() -> float:
        nonlocal number
        number += 1
        return 1.0 / number

    return value


def rotate() -> Callable[[], float]:
    values = deque([1.0, 2.0, 3.0])

    def value() -> float:
        values.rotate()
        return values[0]

    return value


POLICIES: list[dict[str, Any]] = [{}, {"save_operators": "matmul"}, {"every": 2}, {"offload": True}]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("state", [count_calls, rotate, lambda: random.Random(0).random])
def test_values_that_are_not_restored_raise_an_error(state: Any, policy: dict[str, Any]) -> None:
    value = state()
    model = nn.Sequential(*(Scaled(value) for _ in range(3)))
    with pytest.raises(ConfigurationError, match=r"='Scaled': its recomputation has other values"):
        train(model, [ActivationCheckpointing(**policy)], 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hook_inside_of_a_block_that_counts_raises_an_error(policy: dict[str, Any]) -> None:
    """Outputs of matrix products that are kept would hide its effect on the gradients of weights."""
    model = nn.Sequential(*(Scaled(lambda: 1.0) for _ in range(3)))
    value = count_calls()
    for block in model:
        block.get_submodule("down").register_forward_pre_hook(lambda _, inputs: (inputs[0] * value(),))
    with pytest.raises(ConfigurationError, match="leave Scaled out of the blocks"):
        train(model, [ActivationCheckpointing(**policy)], 2)


class Noisy(nn.Module):
    """Block that adds noise from a generator that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
        hidden: Tensor = self.linear(x) * torch.rand(4, generator=generator)
        return hidden


class OfNoisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy() for _ in range(3))
        self.generator = torch.Generator().manual_seed(0)

    def __deepcopy__(self, memo: Any) -> OfNoisy:  # generators have no copies
        copied = OfNoisy()
        copied.load_state_dict(self.state_dict())
        return copied

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.generator)
        return x


@pytest.mark.parametrize("policy", POLICIES)
def test_draws_of_a_generator_among_the_inputs_are_repeated_in_each_step(policy: dict[str, Any]) -> None:
    check(OfNoisy, **policy)


def test_a_recomputation_has_the_mode_of_its_forward() -> None:
    def between(model: nn.Module) -> None:
        model.eval()

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(3)))

    check(build, num_steps=1, between=between)


class Penalized(nn.Module):
    """Block that computes a gradient in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(leaf).tanh().sum(), leaf)
        hidden: Tensor = self.linear(x) - 0.1 * slope
        return hidden


def test_a_block_may_compute_gradients_in_its_forward() -> None:
    check(lambda: nn.Sequential(*(Penalized() for _ in range(3))))
