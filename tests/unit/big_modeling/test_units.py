from __future__ import annotations

import torch
from torch import nn

from accelerate.big_modeling import find_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.b = nn.Linear(2, 2, bias=False)
        self.register_buffer("steps", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(5, 2)
        self.layers = nn.ModuleList([Block(), Block()])
        self.drop = nn.Dropout()
        self.head = nn.Linear(2, 5)
        self.head.weight = self.embed.weight


def test_leaves_single_tensors_and_tied_groups() -> None:
    units = find_units(Net())
    assert [unit.names for unit in units] == [
        ("scale",),
        ("embed", "head"),
        *((f"layers.{index}.{name}",) for index in range(2) for name in ("steps", "a", "b")),
    ]
    assert [unit.size for unit in units] == [4, 40 + 20, 12, 16, 16, 12, 16, 16]
    assert [unit.buffers for unit in units] == [0, 0, 12, 0, 0, 12, 0, 0]
    assert [unit.block for unit in units] == [4, 60, 44, 44, 44, 44, 44, 44]


def test_classes_that_stay_whole() -> None:
    named = [unit.names for unit in find_units(Net(), "Block")]
    assert named == [("scale",), ("embed", "head"), ("layers.0",), ("layers.1",)]
    model = Net()
    model._no_split_modules = ["Block"]
    assert [unit.names for unit in find_units(model)] == named
    assert len(find_units(model, [])) == 8


def test_a_chain_of_ties_is_one_group() -> None:
    one, two, three = (nn.Linear(2, 2) for _ in range(3))
    model = nn.ModuleDict({"one": one, "other": nn.Linear(2, 2), "two": two, "three": three})
    two.weight = three.weight
    one.bias = three.bias
    assert [unit.names for unit in find_units(model)] == [("one", "two", "three"), ("other",)]


def test_a_module_in_two_places_is_one_unit() -> None:
    layer = nn.Linear(2, 2)
    assert [unit.names for unit in find_units(nn.Sequential(layer, nn.ReLU(), layer))] == [("0", "2")]


def test_buffers_that_are_shared_do_not_tie() -> None:
    model = nn.ModuleList([Block(), Block()])
    model[1].steps = model[0].steps
    units = find_units(model, ["Block"])
    assert [unit.size for unit in units] == [44, 32]
