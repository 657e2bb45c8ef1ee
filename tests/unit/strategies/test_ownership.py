"""Training mistakes are found when objects are prepared."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from accelerate.strategies import find_unrelated_optimizers, find_unstepped_models


def test_a_parameter_that_no_optimizer_owns_is_named() -> None:
    model = torch.nn.Linear(2, 2)
    (warning,) = find_unstepped_models([model], [torch.optim.SGD([model.weight], lr=1.0)])
    assert "1 trainable parameters of Linear" in warning
    assert ": bias." in warning
    assert "requires_grad_(False)" in warning


def test_frozen_parameters_and_whole_optimizers_are_fine() -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    assert find_unstepped_models([model], [optimizer]) == []
    assert find_unrelated_optimizers([optimizer], [model]) == []


def test_long_lists_are_cut() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(4)])
    (warning,) = find_unstepped_models([model], [])
    assert "0.weight, 0.bias, 1.weight, 1.bias, 2.weight and 3 more" in warning


def test_an_optimizer_of_no_prepared_model_is_named() -> None:
    stale = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    (warning,) = find_unrelated_optimizers([stale], [torch.nn.Linear(2, 2)])
    assert warning.startswith("SGD steps no parameter of any prepared model")


class Hiding(torch.nn.Module):
    """A generator whose discriminator is a submodule with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)


class HidingParameters(Hiding):
    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return self.generator.parameters(recurse)


class HidingNames(Hiding):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.generator.named_parameters(*args, **kwargs)


class HidingModules(Hiding):
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        return self.generator.named_modules(*args, **kwargs)


@pytest.mark.parametrize("kind", [HidingParameters, HidingNames, HidingModules])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_the_optimizer_of_a_submodule_that_the_model_hides_is_related(
    kind: type[Hiding], is_wrapped: bool
) -> None:
    model = kind()
    optimizer = torch.optim.SGD(model.discriminator.parameters(), lr=1.0)
    assert find_unrelated_optimizers([optimizer], [torch.nn.Sequential(model) if is_wrapped else model]) == []


def test_the_optimizer_of_a_submodule_that_was_added_later_is_related() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.append(torch.nn.Linear(2, 2))
    assert find_unrelated_optimizers([torch.optim.SGD(model[1].parameters(), lr=1.0)], [model]) == []


def test_on_one_process_an_optimizer_may_step_what_no_model_has() -> None:
    """For example an image or an embedding that is optimized through a frozen model."""
    frozen, code = torch.nn.Linear(2, 2).requires_grad_(False), torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([code], lr=1.0)
    assert find_unrelated_optimizers([optimizer], [frozen], {id(code)}) == []
    (warning,) = find_unrelated_optimizers([optimizer], [frozen])  # several processes
    assert warning.startswith("SGD steps no parameter")


def test_the_optimizer_of_a_copy_is_named_where_the_model_is_not_stepped() -> None:
    model = HidingParameters()
    other = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=1.0)
    stepped = {id(p) for p in other.param_groups[0]["params"]}
    (warning,) = find_unrelated_optimizers([other], [model], stepped)
    assert warning.startswith("SGD steps no parameter")


def test_an_optimizer_without_parameters_yet_is_not_named() -> None:
    optimizer = torch.optim.SGD([{"params": []}], lr=1.0)
    assert find_unrelated_optimizers([optimizer], [torch.nn.Linear(2, 2)]) == []
