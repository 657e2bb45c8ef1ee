"""The collectives on one process: identity, and errors that need no other process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.ops import (
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    gather_tensor_shape,
    gather_valid,
    gather_valid_objects,
    reduce,
)
from accelerate.ops.collectives import gather_uneven

pytestmark = pytest.mark.usefixtures("states")

DATA = {"a": torch.arange(3), "b": [torch.tensor(1.0), (torch.ones(2, 2),)]}


@pytest.mark.parametrize(
    "function", [gather, gather_object, broadcast, reduce, gather_uneven, copy_tensor_to_devices]
)
def test_collectives_of_one_process_return_the_object_itself(function: Any) -> None:
    result = function(DATA)
    assert result["a"] is DATA["a"]
    assert result["b"][0] is DATA["b"][0]


def test_broadcast_object_list_returns_the_list() -> None:
    objects = ["a", 1]
    assert broadcast_object_list(objects) is objects


def test_reduce_scales() -> None:
    tensor = torch.tensor([2.0])
    assert reduce({"x": tensor}, "sum", scale=0.5)["x"].tolist() == [1.0]
    assert tensor.tolist() == [2.0]


def test_reduce_names_a_wrong_reduction() -> None:
    message = "reduction='median': no such reduction. Use one of 'sum', 'mean', 'max', 'min', 'none'."
    with pytest.raises(ValueError, match=message):
        reduce(torch.ones(1), "median")


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_maximum_and_minimum_of_one_process(reduction: str) -> None:
    assert reduce(torch.tensor([2.0, 3.0]), reduction, scale=2.0).tolist() == [4.0, 6.0]
    with pytest.raises(ValueError, match="complex numbers have no order"):
        reduce({"a": torch.ones(1), "b": torch.ones(1) * 1j}, reduction)


def test_gather_valid_keeps_the_first_samples() -> None:
    kept = gather_valid({"x": torch.arange(4), "y": torch.arange(8).reshape(4, 2)}, (3,))
    assert kept["x"].tolist() == [0, 1, 2]
    assert kept["y"].shape == (3, 2)
    assert gather_valid_objects(["a", "b", "c"], (2,)) == ["a", "b"]


@pytest.mark.parametrize("tensor", [torch.tensor(1.0), torch.ones(2)])
def test_gather_valid_refuses_what_has_too_few_samples(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="counts=3: this process has [02] samples and not 3"):
        gather_valid(tensor, (3,))


def test_gather_valid_objects_refuses_a_short_list() -> None:
    with pytest.raises(ValueError, match="counts=3: this process has 1 samples and not 3"):
        gather_valid_objects(["a"], (3,))


def test_counts_are_one_for_each_process() -> None:
    with pytest.raises(ValueError, match="there are 1 processes"):
        gather_valid(torch.ones(2), (1, 1))


def test_shape_of_a_tensor() -> None:
    assert gather_tensor_shape(torch.ones(2, 3)).tolist() == [2, 3]


def test_copying_without_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="no process has one"):
        copy_tensor_to_devices(None)
