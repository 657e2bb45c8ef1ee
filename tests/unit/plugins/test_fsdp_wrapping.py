"""Names become classes, policies become modules."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from accelerate.base import ConfigurationError
from accelerate.plugins import bind_policy, find_units, get_module_class_from_name, read_policy


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Outer(nn.Module):
    _no_split_modules = ("Inner", "Absent")

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Inner(), Inner()])
        self.head = nn.Linear(4, 2)


def names(model: nn.Module, units: list[nn.Module]) -> list[str]:
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(unit)] for unit in units]


def test_classes_by_name() -> None:
    assert get_module_class_from_name(Outer(), "Inner") is Inner
    assert get_module_class_from_name(Outer(), "Outer") is Outer
    assert get_module_class_from_name(Outer(), "Absent") is None


@pytest.mark.parametrize("layers", [["Inner"], None])
def test_layers_to_wrap_are_those_of_the_user_or_the_model(layers: list[str] | None) -> None:
    model = Outer()
    policy = bind_policy(read_policy("TRANSFORMER_BASED_WRAP"), model, layers, None)
    assert names(model, find_units(model, policy)) == ["inner.0", "inner.1"]


def test_a_missing_layer_is_named() -> None:
    with pytest.raises(ConfigurationError, match="names Absent, and Outer has no .* Name some of Inner"):
        bind_policy(read_policy("transformer_based_wrap"), Outer(), ["Absent"], None)


def test_sizes() -> None:
    model = Outer()
    policy = bind_policy(read_policy("size_based_wrap"), model, None, 15)
    assert names(model, find_units(model, policy)) == ["inner.0.linear", "inner.1.linear"]
    assert bind_policy(size_based_auto_wrap_policy, model, None, 0) is None


def test_no_policy_makes_no_units() -> None:
    assert read_policy(None) is None
    assert read_policy("NO_WRAP") is None
    assert find_units(Outer(), None) == []


def test_policies_of_users() -> None:
    def only_heads(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or isinstance(module, nn.Linear) and nonwrapped_numel == 10

    model = Outer()
    assert names(model, find_units(model, only_heads)) == ["head"]
    assert names(model, find_units(model, ModuleWrapPolicy({Inner}))) == ["inner.1", "inner.0"]
    bound = partial(only_heads)
    assert bind_policy(bound, model, ["Inner"], 3) is bound


def test_a_module_in_two_places_is_one_unit() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model.append(model[0])
    policy = bind_policy(read_policy("size_based_wrap"), model, None, 5)
    assert find_units(model, policy) == [model[0]]
    assert all(isinstance(unit, torch.nn.Linear) for unit in find_units(model, policy))
