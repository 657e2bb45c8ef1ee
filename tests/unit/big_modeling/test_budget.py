"""The units of a model, and how much memory each device may take of it."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise
from operator import le
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from accelerate.base import ConfigurationError, CustomDtype
from accelerate.big_modeling import (
    Unit,
    budget,
    even_limits,
    fits,
    get_balanced_memory,
    get_max_memory,
    min_units_on_first,
    plan_memory,
    smallest_limit,
    split_into_units,
    total,
)
from accelerate.devices import hardware_table


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
    units = split_into_units(Net())
    assert [unit.names for unit in units] == [
        ("scale",),
        ("embed", "head"),
        *((f"layers.{index}.{name}",) for index in range(2) for name in ("steps", "a", "b")),
    ]
    assert [unit.size for unit in units] == [4, 40 + 20, 12, 16, 16, 12, 16, 16]
    assert [unit.buffers for unit in units] == [0, 0, 12, 0, 0, 12, 0, 0]
    assert [unit.block for unit in units] == [4, 60, 44, 44, 44, 44, 44, 44]


def test_classes_that_stay_whole() -> None:
    named = [unit.names for unit in split_into_units(Net(), "Block")]
    assert named == [("scale",), ("embed", "head"), ("layers.0",), ("layers.1",)]
    model = Net()
    model._no_split_modules = ["Block"]
    assert [unit.names for unit in split_into_units(model)] == named
    assert len(split_into_units(model, [])) == 8


def test_a_chain_of_ties_is_one_group() -> None:
    one, two, three = (nn.Linear(2, 2) for _ in range(3))
    model = nn.ModuleDict({"one": one, "other": nn.Linear(2, 2), "two": two, "three": three})
    two.weight = three.weight
    one.bias = three.bias
    assert [unit.names for unit in split_into_units(model)] == [("one", "two", "three"), ("other",)]


def test_a_module_in_two_places_is_one_unit() -> None:
    layer = nn.Linear(2, 2)
    assert [unit.names for unit in split_into_units(nn.Sequential(layer, nn.ReLU(), layer))] == [("0", "2")]


def test_shared_buffers_do_not_tie_modules() -> None:
    model = nn.ModuleList([Block(), Block()])
    model[1].steps = model[0].steps
    units = split_into_units(model, ["Block"])
    assert [unit.size for unit in units] == [44, 32]


LAYER = 20 * 20 * 4


def chain(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(count)))


def test_sizes_are_read_and_sorted() -> None:
    found = get_max_memory({"disk": "1TB", "cpu": "1GB", 1: 7.9, 0: "2MiB"})
    assert list(found.items()) == [(0, 2**21), (1, 7), ("cpu", 10**9), ("disk", 10**12)]


def test_sizes_as_text_are_replaced_by_bytes_in_place() -> None:
    """Transformers plans with the dict of its user after it has passed it here."""
    given: dict[Any, Any] = {"cpu": "4kB", 0: "1MB", "disk": 7.5}
    get_balanced_memory(chain(1), given)
    assert given == {"cpu": 4000, 0: 10**6, "disk": 7.5}
    assert list(given) == ["cpu", 0, "disk"]
    assert get_max_memory(MappingProxyType({"cpu": "4kB"})) == {"cpu": 4000}


@pytest.mark.parametrize("place", ["cuda", -1, True, 1.5])
def test_other_devices_are_refused(place: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_memory"):
        get_max_memory({place: 7})


@pytest.mark.parametrize("size", [None, [5], float("nan"), float("inf"), "12GBB", -3])
def test_invalid_sizes_are_refused(size: Any) -> None:
    with pytest.raises(ConfigurationError, match="size"):
        get_max_memory({"cpu": size})


def test_names_of_classes_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no_split_module_classes=3: it does not name classes"):
        split_into_units(nn.Linear(2, 1), no_split_module_classes=3)  # type: ignore[arg-type]


def test_sizes_without_devices_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="it must map devices to sizes"):
        get_max_memory(["5GB"])  # type: ignore[arg-type]


class FakeBackend:
    name = "cuda"
    is_host = shares_host_memory = False

    @staticmethod
    def count() -> int:
        return 2

    @staticmethod
    def free_memory(index: int = 0) -> int:
        return 1000 * (index + 1)


@pytest.mark.cpu_only
def test_the_default_budget_is_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_table.CPU.__class__, "free_memory", lambda self, index=0: 10000)
    assert get_max_memory() == {"cpu": 10000}
    monkeypatch.setattr(budget.hardware_table, "detect", FakeBackend)
    assert get_max_memory() == {0: 1000, 1: 2000, "cpu": 10000}
    assert plan_memory(None) == {0: 900, 1: 1800, "cpu": 9000}
    assert plan_memory({0: 1000}) == {0: 1000}
    monkeypatch.setattr(FakeBackend, "name", "mps")
    monkeypatch.setattr(FakeBackend, "shares_host_memory", True)
    assert get_max_memory() == {"mps": 1000}


def test_shares_are_as_even_as_layers_allow() -> None:
    found = get_balanced_memory(chain(7), {0: 10**6, 1: 10**6, 2: 10**6, "cpu": 5})
    assert found == {0: 3 * LAYER, 1: 2 * LAYER, 2: 10**6, "cpu": 5}
    assert get_balanced_memory(chain(6), {0: 10**6, 1: 10**6})[0] == 3 * LAYER
    assert get_balanced_memory(chain(6), {0: 10**6, 1: 10**6}, dtype=torch.float16)[0] == 3 * LAYER // 2
    whole = get_balanced_memory(nn.Sequential(chain(2), chain(1)), {0: 10**6, 1: 10**6}, ["Sequential"])
    assert whole[0] == 2 * LAYER


def test_a_small_device_gives_the_others_larger_shares() -> None:
    found = get_balanced_memory(chain(7), {0: LAYER, 1: 10**6, 2: 10**6})
    assert found == {0: LAYER, 1: 3 * LAYER, 2: 10**6}
    found = get_balanced_memory(chain(9), dict.fromkeys(range(4), 10**6))
    assert list(found.values())[:3] == [3 * LAYER, 2 * LAYER, 2 * LAYER]


def test_packed_formats_are_counted_in_whole_bytes() -> None:
    odd = nn.Sequential(*(nn.Linear(3, 1, bias=False) for _ in range(2)))
    packed = dict.fromkeys(("0.weight", "1.weight"), CustomDtype.INT4)
    assert get_balanced_memory(odd, {0: 10, 1: 10}, special_dtypes=packed) == {0: 2, 1: 10}


@pytest.mark.parametrize(("count", "room"), [(0, 10), (1, 10**6)])
def test_full_devices_get_a_budget_of_zero(count: int, room: int) -> None:
    found = get_balanced_memory(chain(count), {0: room, 1: room, "disk": 7}, low_zero=True)
    assert found == {0: 0, 1: room, "disk": 7}


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    limits=st.lists(st.integers(10, 120), min_size=1, max_size=4),
)
def test_even_shares_minimize_the_largest_share(sizes: list[int], limits: list[int]) -> None:
    units = [Unit((str(index),), size, 0, size) for index, size in enumerate(sizes)]
    cuts = combinations_with_replacement(range(len(sizes) + 1), len(limits) - 1)
    ways = [[sum(sizes[start:end]) for start, end in pairwise([0, *cut, len(sizes)])] for cut in cuts]
    possible = [way for way in ways if all(map(le, way, limits))]
    assert fits(units, limits) == bool(possible)
    if possible:
        shares = even_limits(units, limits)
        assert shares in possible
        assert max(shares) == min(map(max, possible)) == smallest_limit(units, limits)
        least = min(sum(sizes[:count]) for count in range(len(sizes) + 1) if fits(units[count:], limits[1:]))
        assert total(units[: min_units_on_first(units, limits)]) == least


def test_low_zero_gives_the_first_device_a_small_share() -> None:
    assert get_balanced_memory(chain(6), {0: 10**6, 1: 10**6, 2: 10**6}, low_zero=True) == {
        0: 0,
        1: 3 * LAYER,
        2: 10**6,
    }
    found = get_balanced_memory(chain(6), {0: 10**6, 1: 4 * LAYER + 1}, low_zero=True)
    assert found == {0: 2 * LAYER, 1: 4 * LAYER + 1}


@pytest.mark.parametrize(
    "memory", [{"cpu": 10}, {0: 10**6, "cpu": 10}, {0: LAYER, 1: LAYER}, {0: 0, 1: 10**6}]
)
def test_without_several_accelerators_the_budget_is_unchanged(memory: Any) -> None:
    assert get_balanced_memory(chain(6), memory) == memory
