"""Walking the tensors of a module."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.weights import (
    GatheredParameters,
    all_tensors,
    find_blocks,
    get_model_tp_size,
    get_module_children_bottom_up,
    get_non_persistent_buffers,
    has_forward,
    model_has_dtensor,
    modules,
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
        self.tied = nn.Module()
        self.tied.weight = self.inner.weight
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


def test_a_shared_tensor_has_all_its_names() -> None:
    found = all_tensors(Outer())
    assert sorted(found) == ["inner.hidden", "inner.shown", "inner.weight", "own", "tied.weight"]
    assert found["inner.weight"] is found["tied.weight"]


def test_modules_are_ordered_after_their_children() -> None:
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
def test_the_tp_size_is_read_from_the_configuration(settings: Any, size: int | None) -> None:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(distributed_config=settings)
    assert get_model_tp_size(model) == size
    model.tp_size = None
    assert get_model_tp_size(model) == size


def test_the_tp_size_and_dtensors_of_a_model_are_read() -> None:
    model = nn.Linear(1, 1)
    assert get_model_tp_size(model) is None
    model.tp_size = 3
    assert get_model_tp_size(model) == 3
    model.config = SimpleNamespace(distributed_config={"tp_size": 4})
    assert get_model_tp_size(model) == 3
    assert not model_has_dtensor(model)


class Layer(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.up = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        if experts:
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Body(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList(Layer(experts) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Net(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.stem = Layer()
        self.body = Body(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def spell(model: nn.Module, **kwargs: object) -> list[str]:
    return [f"{name}{'+' * inner}" for name, _, inner in find_blocks(model, **kwargs)]  # type: ignore[arg-type]


LEAVES = ["stem.attention", "stem.attention.out_proj", "stem.up.0+"]


def test_items_of_a_module_list_are_blocks_and_the_rest_are_single_tensors() -> None:
    assert spell(Net()) == ["", *LEAVES, "body.norm", "body.layers.0+", "body.layers.1+"]


def test_a_list_inside_opens_its_block() -> None:
    layer = ["attention+", "up+", "experts.0+", "experts.1+"]
    expected = [f"body.layers.{index}.{name}" for index in range(2) for name in layer]
    assert spell(Net(experts=2))[5:] == expected


def test_named_classes_are_blocks() -> None:
    assert spell(Net(2), whole=["Layer"]) == ["", "stem+", "body.norm", "body.layers.0+", "body.layers.1+"]


def test_every_tensor_is_in_one_block() -> None:
    for net in (Net(), Net(3), nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))):
        found = [
            f"{path}.{name}".strip(".")
            for path, module, inner in find_blocks(net)
            for name, _ in module.named_parameters(recurse=inner)
        ]
        assert sorted(found) == sorted(name for name, _ in net.named_parameters())


def test_lists_cannot_be_called() -> None:
    assert not has_forward(nn.ModuleList())
    assert not has_forward(nn.Module())
    assert has_forward(nn.Sequential())


def test_gathered_parameters_without_deepspeed_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "is_deepspeed_available", lambda: False)
    parameter = nn.Parameter(torch.ones(2))
    with GatheredParameters([parameter], modifier_rank=0):
        assert parameter.tolist() == [1.0, 1.0]


def test_deepspeed_is_given_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return nullcontext()

    monkeypatch.setattr(modules, "is_deepspeed_available", lambda: True)
    zero = SimpleNamespace(GatheredParameters=record)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=zero))
    with GatheredParameters([1], 0, enabled=False):  # type: ignore[list-item]
        pass
    assert calls == [(([1],), {"modifier_rank": 0, "fwd_module": None, "enabled": False})]
