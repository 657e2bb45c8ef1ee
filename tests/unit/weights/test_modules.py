"""Walking the tensors of a module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.weights import (
    all_tensors,
    get_model_tp_size,
    get_module_children_bottom_up,
    get_non_persistent_buffers,
    model_has_dtensor,
    named_module_tensors,
)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.ones(1), persistent=False)
        self.register_buffer("shown", torch.ones(1))
        self.weight = nn.Parameter(torch.ones(1))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.twin = nn.Module()
        self.twin.weight = self.inner.weight
        self.register_buffer("own", torch.ones(1), persistent=False)


def test_names_of_tensors() -> None:
    def names(**options: bool) -> list[str]:
        return [name for name, _ in named_module_tensors(Outer(), **options)]

    assert names() == ["own"]
    assert names(recurse=True) == ["inner.weight", "own", "inner.hidden", "inner.shown"]
    assert names(recurse=True, include_buffers=False) == ["inner.weight"]
    assert names(recurse=True, remove_non_persistent=True) == ["inner.weight", "inner.shown"]


def test_buffers_outside_the_state_dict() -> None:
    assert get_non_persistent_buffers(Outer()) == {"own"}
    assert get_non_persistent_buffers(Outer(), recurse=True) == {"own", "hidden"}
    assert get_non_persistent_buffers(Outer(), recurse=True, fqns=True) == {"own", "inner.hidden"}


def test_a_shared_tensor_is_there_under_each_name() -> None:
    found = all_tensors(Outer())
    assert sorted(found) == ["inner.hidden", "inner.shown", "inner.weight", "own", "twin.weight"]
    assert found["inner.weight"] is found["twin.weight"]


def test_modules_come_after_those_inside() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Linear(1, 1)))
    names = ["0", "1.0", "1.1", "1", ""]
    assert [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)] == names  # type: ignore[misc]
    assert get_module_children_bottom_up(model) == [model.get_submodule(name) for name in names]


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"tp_size": 4}, 4),
        (SimpleNamespace(tp_size=4), 4),
        ({"tp_plan": "auto"}, None),
        (SimpleNamespace(), None),
        (None, None),
    ],
)
def test_newer_models_say_it_in_their_configuration(settings: Any, size: int | None) -> None:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(distributed_config=settings)
    assert get_model_tp_size(model) == size
    model.tp_size = None
    assert get_model_tp_size(model) == size


def test_what_a_model_says_about_its_layers() -> None:
    model = nn.Linear(1, 1)
    assert get_model_tp_size(model) is None
    model.tp_size = 3
    assert get_model_tp_size(model) == 3
    model.config = SimpleNamespace(distributed_config={"tp_size": 4})
    assert get_model_tp_size(model) == 3
    assert not model_has_dtensor(model)
