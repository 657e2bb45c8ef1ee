"""Weights of losses in a window."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from accelerate.accelerator import (
    Accelerator,
    ItemWeighting,
    factor_of,
    read_items,
    rescale_gradients,
    sum_items,
)
from accelerate.base import ConfigurationError, StateError
from accelerate.state import PartialState

pytestmark = pytest.mark.usefixtures("states")


def test_even_weights_divide_by_the_rounds() -> None:
    accelerator = Accelerator(cpu=True)
    loss = torch.tensor(6.0)
    assert accelerator._accumulation.scale(loss) is loss
    accelerator.gradient_accumulation_steps = 3
    assert accelerator._accumulation.scale(loss) == 2.0


def test_counted_weights_rescale_earlier_gradients() -> None:
    PartialState(cpu=True)
    model = torch.nn.Linear(1, 1, bias=False)
    weights = ItemWeighting(replicas=1)
    for _ in range(2):
        weights.begin()
        for items in (1, 3):
            weights.add(items, [model])
            if items == 3:
                weights.complete()
            weights.scale(model(torch.full((items, 1), float(items))).sum()).backward()
        assert model.weight.grad == 10.0 / 4
        model.zero_grad()


@pytest.mark.parametrize("value", [3, 3.0, torch.tensor(3), torch.tensor([3.0]), Fraction(3)])
def test_items_are_any_number(value: Any) -> None:
    assert read_items(value) == 3.0


@pytest.mark.parametrize(
    "value", [-1, float("nan"), float("inf"), "3", None, True, [3], torch.ones(2), torch.tensor(-2)]
)
def test_other_items_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="num_items"):
        read_items(value)


def test_items_are_summed_together() -> None:
    assert sum_items([]) == 0.0
    assert sum_items([1, torch.tensor(2), 3.5]) == 6.5
    assert sum_items([torch.tensor(1), torch.tensor([2])]) == 3.0
    assert sum_items([torch.tensor(1), torch.tensor(2.5)]) == 3.5
    for values in ([torch.tensor(1), torch.tensor(-2)], [torch.ones(2)], [1, "2"]):
        with pytest.raises(ConfigurationError, match="num_items"):
            sum_items(values)


def test_no_items_have_no_mean() -> None:
    assert factor_of(8.0, 2) == 0.25
    with pytest.raises(StateError, match="no items"):
        factor_of(0.0, 2)


def test_shared_and_sparse_parameters_are_rescaled_once() -> None:
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    linear = torch.nn.Linear(2, 2, bias=False)
    model = torch.nn.Sequential(embedding, linear)
    model(torch.tensor([1])).sum().backward()
    sparse, dense = embedding.weight.grad.to_dense().clone(), linear.weight.grad.clone()
    rescale_gradients([model, linear], 0.5)
    assert torch.equal(embedding.weight.grad.to_dense(), sparse / 2)
    assert torch.equal(linear.weight.grad, dense / 2)


def test_a_model_without_gradients_is_unchanged() -> None:
    model = torch.nn.Linear(1, 1)
    rescale_gradients([model], 2.0)
    assert model.weight.grad is None


def test_gradients_do_not_depend_on_the_number_of_items_in_the_window_before() -> None:
    def train(items: list[int]) -> torch.Tensor:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3)
        for round_items in (*items, 3, 4):
            model.zero_grad()
            for inputs in torch.rand(2, round_items, 3, generator=torch.Generator().manual_seed(1)):
                with accelerator.accumulate(model, num_items=round_items):
                    accelerator.backward(model(inputs).pow(2).sum())
        return model.weight.grad  # type: ignore[return-value]

    assert torch.equal(train([]), train([7]))
    assert torch.equal(train([5]), train([7, 11]))


@pytest.mark.parametrize("steps_inside", [True, False])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_the_last_batch_of_a_window_may_have_no_backward_pass(
    max_norm: float | None, steps_inside: bool
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def step() -> None:
        if max_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    for items in (8, 4, 0) * 2:
        with accelerator.accumulate(model, num_items=items):
            if items:
                accelerator.backward(-2 * model(torch.ones(items, 1)).sum())
            if steps_inside:
                step()
        if not steps_inside:
            step()
    assert model.weight.item() == pytest.approx(2 * min(2, max_norm or 2))


def test_a_window_of_no_items_and_no_losses_is_not_an_error() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.clone()
    for _ in range(4):
        with accelerator.accumulate(model, num_items=0):
            optimizer.step()
    assert torch.equal(model.weight, before)


def test_gradients_are_rescaled_before_they_are_read() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    for items in (4, 0):
        with accelerator.accumulate(model, num_items=items):
            if items:
                accelerator.backward(model(torch.ones(items, 1)).sum())
            accelerator.unscale_gradients()
            found = model.weight.grad.item()
    assert found == 1.0
