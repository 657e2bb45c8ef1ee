"""Optimizers are mapped to the new parameters, by name and by identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import PreparationError
from accelerate.state import PartialState
from accelerate.strategies.dtensors import (
    ParameterRemapper,
    fsdp2_canonicalize_names,
    fsdp2_switch_optimizer_parameters,
    named_parameters,
)
from accelerate.strategies.fsdp import get_parameters_from_modules


def renew(model: nn.Module) -> dict[str, nn.Parameter]:
    """Give a model new parameters, as sharding does."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    return named_parameters(model)


def held(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def test_names_of_wrappers_are_no_part_of_names() -> None:
    wrapped = {"a._checkpoint_wrapped_module.b": 1, "_orig_mod.c.d": 2, "x._fsdp_wrapped_module.y": 3, "e": 4}
    assert fsdp2_canonicalize_names(wrapped) == {"a.b": 1, "c.d": 2, "x.y": 3, "e": 4}


def test_tied_parameters_have_all_their_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert set(named_parameters(model)) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_an_optimizer_releases_its_parameters_and_is_remapped_by_name() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 1)
    groups = [{"params": [model.bias, other.weight]}, {"params": [model.weight], "lr": 2.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    unrelated = torch.optim.SGD(other.parameters(), lr=1.0)
    remapper = ParameterRemapper(model, [optimizer, unrelated])
    assert held(optimizer) == [[], []]
    assert held(unrelated) == [[id(other.weight), id(other.bias)]]
    parameters = renew(model)
    remapper.rejoin(parameters)
    assert held(optimizer) == [[id(model.bias), id(other.weight)], [id(model.weight)]]
    assert optimizer.param_groups[1]["lr"] == 2.0


def test_old_parameters_are_mapped_to_new_ones() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    remapper = ParameterRemapper(model, [])
    parameters = renew(model)
    assert [(old is weight, new is model.weight) for old, new in remapper.replaced(parameters)] == [
        (True, True)
    ]


def test_joined_parameters_are_stepped_once() -> None:
    model, flat = nn.Linear(2, 2), nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.SGD([("weight", model.weight), ("bias", model.bias)], lr=1.0)
    remapper = ParameterRemapper(model, [optimizer])
    remapper.rejoin({"weight": flat, "bias": flat})
    assert held(optimizer) == [[id(flat)]]
    assert "param_names" not in optimizer.param_groups[0]


def test_groups_that_sharding_has_joined_are_refused() -> None:
    model, flat = nn.Linear(2, 2), nn.Parameter(torch.zeros(6))
    first, second = (
        torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=1.0) for _ in range(2)
    )
    with pytest.raises(PreparationError, match="groups of SGD share .* Set use_orig_params=True"):
        ParameterRemapper(model, [first]).rejoin({"weight": flat, "bias": flat})
    with pytest.raises(PreparationError, match="groups of SGD share"):
        fsdp2_switch_optimizer_parameters(second, {model.weight: flat, model.bias: flat})


def test_a_parameter_missing_after_sharding_is_named() -> None:
    model = nn.Linear(2, 2)
    remapper = ParameterRemapper(model, [torch.optim.SGD(model.parameters(), lr=1.0)])
    with pytest.raises(PreparationError, match="1 parameters that SGD steps are gone after sharding: bias"):
        remapper.rejoin({"weight": model.weight})


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.Adafactor])
def test_an_optimizer_that_has_stepped_is_refused(states: None, kind: Any) -> None:
    PartialState(cpu=True)
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters())
    model(torch.tensor([[1.0, 2.0]])).square().sum().backward()
    optimizer.step()
    with pytest.raises(PreparationError, match="holds the state of 2 parameters"):
        ParameterRemapper(model, [optimizer])
    ParameterRemapper(nn.Linear(2, 2), [optimizer])  # not its model


def test_switching_by_identity() -> None:
    model, new = nn.Linear(2, 2), nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fsdp2_switch_optimizer_parameters(optimizer, {model.weight: new})
    assert held(optimizer) == [[id(new), id(model.bias)]]


def test_switching_in_attributes_of_an_optimizer() -> None:
    model, new = nn.Linear(2, 2), nn.Parameter(torch.zeros(2, 2))
    weight, bias = model.weight, model.bias
    optimizer, inner = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
    own = {
        "one": weight,
        "list": [bias, [weight]],
        "pairs": ((weight, "w"), (bias, "b")),
        "by_parameter": {weight: 1, bias: 2},
        "by_name": {"w": weight},
        "set": {weight},
        "inner": inner,
    }
    vars(optimizer).update(own)
    own["list"].append(own["list"])  # type: ignore[attr-defined]
    fsdp2_switch_optimizer_parameters(optimizer, {weight: new})
    assert held(inner) == [[id(new), id(bias)]]
    found = vars(optimizer)
    assert found["list"] is own["list"]
    assert found["one"] is found["list"][1][0] is found["by_name"]["w"] is new
    assert [pair[0] for pair in found["pairs"]] == [new, bias]
    assert [*map(id, found["by_parameter"])] == [id(new), id(bias)]
    assert [*map(id, found["set"])] == [id(new)]


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (None, set()),
        ("0", {"0.weight", "0.bias"}),
        ("[01]", {"0.weight", "0.bias", "1.weight", "1.bias"}),
        ("x", set()),
    ],
)
def test_parameters_of_modules_by_name(modules: str | None, expected: set[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = get_parameters_from_modules(modules, model, "cpu")
    assert found == {p for name, p in model.named_parameters() if name in expected}


def test_parameters_of_modules_themselves() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert get_parameters_from_modules([model[1]], model, None) == set(model[1].parameters())
