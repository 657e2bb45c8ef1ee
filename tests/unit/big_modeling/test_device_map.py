"""Planning, against every possible plan of small models; checking; shortening."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate, combinations_with_replacement
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.stand_ins.models import TiedLayers
from torch import nn

from accelerate import infer_auto_device_map
from accelerate.base import ConfigurationError
from accelerate.big_modeling import (
    Unit,
    assign_units,
    check_device_map,
    check_devices,
    clean_device_map,
    device_key,
    explain_device_map,
    fallback_allocate,
    fill_empty_devices,
    shorten,
)
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


def test_fallback_allocate_returns_none_when_nothing_fits() -> None:
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
    assert fill_empty_devices(units, [None] * 5, {0: 5, 1: 4}, 0) == [None, 0, 0, None, 1]
    assert fill_empty_devices(units, [None] * 5, {0: 5}, 3) == [None, 0, None, None, None]
    assert fill_empty_devices(units, [0, None, None, None, None], {0: 9, 1: 5}, 99) == [0, 1, 1, None, None]


def test_a_row_for_each_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 16, bias=False)
        )
        model[2].weight = model[0].weight
    table = explain_device_map(model, {"0": 0, "2": 0, "1": "cpu"}, {0: 2048, 1: 10, "cpu": 1000})
    assert table.splitlines() == [
        "device  parameters    buffers      total  of limit  modules",
        "0           1.0 KB    0 bytes     1.0 KB       50%  0, 2",
        "1          0 bytes    0 bytes    0 bytes        0%",
        "cpu      128 bytes  136 bytes  264 bytes       26%  1",
    ]
    half = explain_device_map(model, {"": "disk"}, dtype="float16").splitlines()[1]
    assert half.split() == ["disk", "576", "bytes", "72", "bytes", "648", "bytes", "all"]
    special = {"0.weight": torch.float64, "2.weight": torch.float64}
    other = explain_device_map(model, {"": "disk"}, dtype="float16", special_dtypes=special).splitlines()[1]
    assert other.split()[1:3] == ["2.06", "KB"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["embed", "layers.0", "layers.1", "layers.2", "norm"], "embed, layers.0-2, norm"),
        (["h.0.a", "h.1.a", "h.1.b", "h.3.b"], "h.0-1.a, h.1.b, h.3.b"),
        ([""], "all"),
        ([], ""),
        (
            [f"{chr(97 + index)}{'x' * 9}" for index in range(9)],
            "axxxxxxxxx, bxxxxxxxxx, cxxxxxxxxx, dxxxxxxxxx, exxxxxxx ...",
        ),
    ],
)
def test_numbered_names_are_shortened_to_a_range(names: list[str], text: str) -> None:
    assert shorten(names) == text


LAYER = 20 * 20 * 4


def chain(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(count)))


# Planning


def room(units: Sequence[Unit], blocks: int) -> float:
    largest = sorted((unit.block for unit in units), reverse=True)[:blocks]
    return sum(largest) + sum(unit.buffers for unit in units)


def best_by_trial(units: Sequence[Unit], limits: Sequence[int]) -> int:
    """How many units accelerators can take at most, of all ways to cut the row into pieces."""
    for blocks in (2, 1):
        best = 0
        for cuts in combinations_with_replacement(range(len(units) + 1), len(limits)):
            edges = [0, *cuts]
            sizes = [sum(u.size for u in units[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
            first = next((index for index, size in enumerate(sizes) if size), None)
            if first is not None:
                sizes[first] += room(units[cuts[-1] :], blocks)
            if all(size <= limit for size, limit in zip(sizes, limits, strict=True)):
                best = max(best, cuts[-1])
        if best:
            return best
    return 0


UNITS = st.builds(
    lambda size, buffers, block: Unit(("x",), size, min(size, buffers), max(size, block)),
    st.integers(1, 9),
    st.integers(0, 3),
    st.integers(1, 12),
)


@settings(max_examples=150)
@given(st.lists(UNITS, max_size=7), st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(0, 30))
def test_the_plan_places_the_most_units_on_accelerators(
    units: list[Unit], limits: list[int], cpu: int
) -> None:
    places = assign_units(units, {**dict(enumerate(limits)), "cpu": cpu})
    on_accelerators = [place for place in places if isinstance(place, int)]
    assert len(on_accelerators) == best_by_trial(units, limits)
    order = [*range(len(limits)), "cpu", "disk"]
    ranks = [order.index(place) for place in places]
    assert ranks == sorted(ranks)
    if on_accelerators:
        on_cpu = [unit.size for unit, place in zip(units, places, strict=True) if place == "cpu"]
        rest = [unit.size for unit, place in zip(units, places, strict=True) if not isinstance(place, int)]
        assert len(on_cpu) == sum(total <= cpu for total in accumulate(rest))


def test_all_on_one_device_is_one_entry() -> None:
    assert infer_auto_device_map(chain(3), {0: "1MB", "cpu": "1MB"}) == {"": 0}
    assert infer_auto_device_map(chain(3), {"cpu": "1MB"}) == {"": "cpu"}
    assert infer_auto_device_map(chain(1), {0: 4 * LAYER}, clean_result=False) == {"0": 0}


def test_room_for_two_blocks_stays_free() -> None:
    found = infer_auto_device_map(chain(7), {0: 4 * LAYER, 1: 2 * LAYER, "cpu": LAYER})
    assert found == {"0": 0, "1": 0, "2": 1, "3": 1, "4": "cpu", "5": "disk", "6": "disk"}
    tight = infer_auto_device_map(chain(6), {0: 2 * LAYER, "cpu": "1MB"})
    assert [place for place in tight.values() if place == 0] == [0], "room for one where two leave nothing"


def test_the_dtype_decides_how_many_layers_fit() -> None:
    memory = {0: 3 * LAYER, "cpu": "1MB"}
    assert infer_auto_device_map(chain(6), memory, dtype="float16") == {"": 0}
    special = {f"{index}.weight": torch.float32 for index in range(6)}
    assert infer_auto_device_map(chain(6), memory, dtype="float16", special_dtypes=special)["5"] == "cpu"


def test_tied_weights_stay_together_and_the_map_follows_the_model() -> None:
    model = TiedLayers()
    found = infer_auto_device_map(model, {0: 80 + 160 + 80, "cpu": "1MB"})
    assert list(found.items()) == [
        ("embed", 0),
        *((f"layers.{index}", 0 if index < 1 else "cpu") for index in range(4)),
        ("head", 0),
    ]
    check_device_map(model, found)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        for layer in self.layers:
            layer.register_buffer("table", torch.zeros(25))


def test_buffers_stay_on_the_execution_device() -> None:
    memory = {0: 164 + 2 * 164 + 100, "cpu": "1MB"}
    assert infer_auto_device_map(Buffered(), memory, offload_buffers=True)["layers.0"] == 0
    assert infer_auto_device_map(Buffered(), {0: 2 * 164 + 64, "cpu": "1MB"}) == {"": "cpu"}
    assert infer_auto_device_map(Buffered(), {0: 164 + 164 + 300, "cpu": "1MB"})["layers.0"] == 0


def test_a_module_too_large_for_the_first_device(caplog: pytest.LogCaptureFixture) -> None:
    units = [Unit(("tied", "group"), 20, 0, 10), *(Unit((name,), 4, 0, 4) for name in "abc")]
    memory = {0: 19, "cpu": 99}
    with caplog.at_level(logging.WARNING):
        assert assign_units(units, memory) == ["cpu"] * 4
    assert "No module is on device 0" in caplog.text
    assert "fallback_allocation=True" in caplog.text
    assert assign_units(units, memory, fallback=True) == ["cpu", 0, 0, "cpu"]
    assert infer_auto_device_map(chain(2), {0: LAYER, "cpu": "1MB"}, fallback_allocation=True) == {"": "cpu"}


def test_a_limit_for_the_disk() -> None:
    with pytest.raises(ConfigurationError, match=r"leaves 1, 2 without a device"):
        infer_auto_device_map(chain(3), {"cpu": 3 * LAYER - 1, "disk": 10})


def test_a_limit_for_the_disk_may_be_used_up() -> None:
    memory = {"cpu": 3 * LAYER - 1, "disk": 2 * LAYER}
    assert infer_auto_device_map(chain(3), memory) == {"0": "cpu", "1": "disk", "2": "disk"}
    with pytest.raises(ConfigurationError, match=r"leaves 1, 2 without a device"):
        infer_auto_device_map(chain(3), {**memory, "disk": 2 * LAYER - 1})


def test_verbose_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(chain(3), {0: "1MB"}, verbose=True)
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "0",
        "4.69",
        "KB",
        "0",
        "bytes",
        "4.69",
        "KB",
        "0%",
        "all",
    ]


def test_an_empty_model() -> None:
    assert infer_auto_device_map(nn.Identity(), {0: 10}) == {}


# Shortening


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a.b": 0, "a.c": 0, "d": 1}, {"d": 1, "a": 0}),
        ({"a.b.x": 0, "a.b.y": 0, "a.c": 0}, {"": 0}),
        ({"a.b.x": 0, "a.b.y": 0, "a.c": 1, "d": 1}, {"a.c": 1, "d": 1, "a.b": 0}),
        ({"a": 0, "ab": 0, "b": 1}, {"a": 0, "ab": 0, "b": 1}),
        ({"": "cpu"}, {"": "cpu"}),
        ({"a.b": 0}, {"a.b": 0}),
        ({}, {}),
    ],
)
def test_modules_of_one_device_are_merged_into_their_parent(before: Any, after: Any) -> None:
    assert clean_device_map(before) is before
    assert list(before.items()) == list(after.items())


def test_every_tensor_needs_a_place() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    check_device_map(model, {"": "cpu"})
    check_device_map(model, {"0": 0, "1": "disk"})
    check_device_map(model, {"0.weight": 0, "0.bias": "cpu", "1": "disk"})
    with pytest.raises(ConfigurationError, match="no device to 1.weight, 1.bias, 1.running_mean"):
        check_device_map(model, {"0": 0})


def test_one_error_names_all_that_is_wrong() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_device_map(TiedLayers(), {"embed": 0, "head": "cpu"})
    text = str(caught.value)
    assert "no device to layers.0.weight" in text
    assert "embed.weight (0) and head.weight (cpu)" in text


def test_an_unknown_name_gives_a_warning() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.warns(UserWarning, match=r"do not match any submodules in the model: \['2', '0.wait'\]"):
        check_device_map(model, {"": "cpu", "2": "cpu", "0.wait": "cpu"})


def test_one_device_in_two_spellings() -> None:
    check_device_map(TiedLayers(), {"": 0, "head": "cuda:0"})
    check_device_map(TiedLayers(), {"": "cuda", "head": torch.device("cuda", 0)})
    places = [0, "0", "cuda", "cuda:1", "cpu", "mps:0", "meta", torch.device("cpu")]
    assert [device_key(place) for place in places] == ["0", "0", "0", "1", "cpu", "mps", "meta", "cpu"]


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        (None, "device_map=None: it must map modules to devices"),
        ("auto", "device_map='auto': it must map modules to devices"),
        ({"": "dsik"}, "device='dsik': torch knows no such device"),
        ({"": 1.5}, "device=1.5: torch knows no such device"),
        ({"": 0}, "there is none here"),
        ({"0": "cpu", "1": "xpu:3"}, "device='xpu:3': this machine has 0 of that kind"),
    ],
)
def test_unavailable_devices_are_refused(device_map: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_devices(device_map)


def test_available_devices_are_accepted() -> None:
    check_devices({"a": "cpu", "b": "disk", "c": torch.device("cpu"), "d": "meta", "e": None})
