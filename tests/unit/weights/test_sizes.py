from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import ConfigurationError, CustomDtype
from accelerate.big_modeling import split_into_units
from accelerate.weights import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    dtype_byte_size,
    get_max_layer_size,
    get_module_size_with_ties,
    tensor_bytes,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight


BLOCK = 80 + 72
TOTAL = 4 + 160 + 2 * BLOCK + 160


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 4),
        ("float16", 2),
        (torch.bool, 1 / 8),
        ("bool", 1 / 8),
        (torch.uint8, 1),
        (torch.complex64, 8),
        (torch.float8_e4m3fn, 1),
        (CustomDtype.FP8, 1),
        (CustomDtype.INT4, 0.5),
        (CustomDtype.INT2, 0.25),
    ],
)
def test_bytes_of_a_number(dtype: Any, size: float) -> None:
    assert dtype_byte_size(dtype) == size


def test_a_bool_is_a_bit_in_reports_and_a_byte_in_plans() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("mask", torch.ones(20, dtype=torch.bool))
    assert dict(compute_module_sizes(model)) == {"": 82.5, "weight": 64, "bias": 16, "mask": 2.5}
    assert compute_module_sizes(model, torch.float16)[""] == 42.5
    assert compute_module_sizes(model, special_dtypes={"weight": torch.bool})[""] == 20.5
    assert compute_module_total_buffer_size(model) == 2.5
    assert tensor_bytes("mask", model.mask) == 20
    assert tensor_bytes("weight", model.weight, special_dtypes={"weight": torch.bool}) == 16
    assert sum(unit.size for unit in split_into_units(model)) == 100


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="float17"):
        dtype_byte_size("float17")


def test_every_name_has_its_size() -> None:
    sizes = compute_module_sizes(Net())
    assert sizes[""] == TOTAL
    assert sizes["scale"] == 4
    assert sizes["layers"] == 2 * BLOCK
    assert sizes["layers.1"] == BLOCK
    assert sizes["layers.1.a"] == 80
    assert sizes["layers.1.a.weight"] == 64
    assert sizes["no such name"] == 0


def test_the_meta_device_takes_what_it_will_take() -> None:
    with torch.device("meta"):
        empty = Net()
    assert compute_module_sizes(empty) == compute_module_sizes(Net())


@pytest.mark.parametrize(
    ("dtype", "floats"), [(torch.float16, 2), ("bfloat16", 2), (torch.float64, 4), (CustomDtype.INT4, 0.5)]
)
def test_a_format_makes_floats_smaller_and_leaves_integers(dtype: Any, floats: float) -> None:
    integers = 2 * 8
    assert compute_module_sizes(Net(), dtype)[""] == (TOTAL - integers) / 4 * floats + integers


def test_single_tensors_have_their_own_format() -> None:
    sizes = compute_module_sizes(Net(), torch.float16, {"head.weight": torch.float32})
    assert (sizes["head"], sizes["embed"]) == (160, 80)


def test_buffers_alone() -> None:
    assert compute_module_total_buffer_size(Net()) == 2 * 40
    assert "embed" not in compute_module_sizes(Net(), buffers_only=True)


def test_shared_tensors_count_once() -> None:
    sizes = compute_module_sizes(Net(tied=True))
    assert (sizes[""], sizes["embed"], sizes["head"]) == (TOTAL - 160, 160, 0)


def test_the_largest_layer() -> None:
    net = Net()
    sizes = compute_module_sizes(net)
    children = list(net.named_children())
    assert get_max_layer_size(children, sizes, []) == (160, ["embed", "head"])
    del sizes["embed.weight"], sizes["head.weight"]
    sizes["layers.0"] = 500
    assert get_max_layer_size(children, sizes, ["Block"]) == (500, ["layers.0"])
    assert get_max_layer_size([("scale", net.scale)], sizes, []) == (4, ["scale"])
    assert get_max_layer_size([], sizes, []) == (0, [])


def test_maximum_sizes_follow_no_split_modules() -> None:
    net = Net()
    assert calculate_maximum_sizes(net) == (TOTAL, (160, ["embed", "head"]))
    net.layers[1].a = nn.Linear(30, 4)
    net._no_split_modules = ["Block"]
    assert calculate_maximum_sizes(net)[1] == (496 + 72, ["layers.1"])


def test_a_module_with_those_that_share_its_parameters() -> None:
    net = Net(tied=True)
    net.head.bias = nn.Parameter(torch.zeros(10))
    sizes, children = compute_module_sizes(net), list(net.named_children())
    found = get_module_size_with_ties(["head.weight"], sizes["embed"], sizes, children)
    assert found == (160 + 40, ["head"], [net.head])
    assert get_module_size_with_ties([], 7, sizes, children) == (7, [], [])
    both = get_module_size_with_ties(["head.weight", "head.bias"], 160, sizes, children)
    assert both == (160 + 40, ["head"], [net.head])
    alone = get_module_size_with_ties(["scale"], 7, sizes, [("scale", net.scale)])
    assert alone == (7 + sizes["scale"], ["scale"], [net.scale])
    with pytest.raises(ConfigurationError, match=r"tied_params='heads\.weight': it is in none of embed"):
        get_module_size_with_ties(["heads.weight"], 160, sizes, children)
