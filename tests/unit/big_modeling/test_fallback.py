from __future__ import annotations

import torch
from torch import nn

from accelerate.big_modeling import Unit, fallback_allocate, place_in_gaps
from accelerate.weights import compute_module_sizes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))
        self.a = nn.Linear(4, 4)


def build() -> nn.ModuleDict:
    blocks = nn.ModuleList([Block(), Block()])
    return nn.ModuleDict({"embed": nn.Embedding(10, 4), "layers": blocks, "head": nn.Linear(4, 10)})


def test_the_first_that_fits_or_a_part_of_one() -> None:
    model = build()
    modules, sizes = list(model.named_children()), compute_module_sizes(model)
    name, module, left = fallback_allocate(modules, sizes, 170)
    assert (name, module, [each for each, _ in left]) == ("embed", model["embed"], ["layers", "head"])
    name, module, left = fallback_allocate(modules, sizes, 100)
    assert (name, module) == ("layers.0", model["layers"][0])
    assert [each for each, _ in left] == ["embed", "layers.1", "head"]
    name, module, left = fallback_allocate(modules, sizes, 15)
    assert (name, module) == ("layers.0.own", model["layers"][0].own)
    assert [each for each, _ in left] == ["embed", "layers.0.a", "layers.1", "head"]


def test_nothing_fits() -> None:
    model = build()
    modules, sizes = list(model.named_children()), compute_module_sizes(model)
    assert fallback_allocate(modules, sizes, 10) == (None, None, modules)
    assert fallback_allocate(modules, sizes, 50, ["Block"])[0] is None


def test_tied_modules_are_left_together() -> None:
    model = build()
    model["head"].weight = model["embed"].weight
    modules, sizes = list(model.named_children()), compute_module_sizes(model)
    tied = [["embed.weight", "head.weight"]]
    assert fallback_allocate(modules, sizes, 170, ["Block"], tied)[0] == "layers.0"


def test_gaps_take_the_first_run_that_fits() -> None:
    units = [Unit((str(index),), size, 0, size) for index, size in enumerate((9, 2, 3, 9, 1))]
    assert place_in_gaps(units, [None] * 5, {0: 5, 1: 4}, 0) == [None, 0, 0, None, 1]
    assert place_in_gaps(units, [None] * 5, {0: 5}, 3) == [None, 0, None, None, None]
    assert place_in_gaps(units, [0, None, None, None, None], {0: 9, 1: 5}, 99) == [0, 1, 1, None, None]
