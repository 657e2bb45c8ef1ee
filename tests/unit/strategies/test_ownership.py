"""Training mistakes are found when objects are prepared."""

from __future__ import annotations

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
