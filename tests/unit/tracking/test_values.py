"""Values that are logged later than they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from accelerate.tracking import Snapshot, flatten, plain, read, take


@pytest.mark.parametrize("build", [torch.ones, np.ones])
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"a": v}, lambda v: [v], lambda v: ({"b": v},)])
def test_later_changes_do_not_reach_a_copy(build: Any, wrap: Any) -> None:
    value = build(2)
    copy = take(wrap(value))
    value += 1
    flat = str(read(copy))
    assert "1." in flat
    assert "2." not in flat


def test_a_copy_has_no_graph() -> None:
    assert not take(torch.ones(1, requires_grad=True) * 2).requires_grad


def test_other_objects_are_kept() -> None:
    thing = object()
    assert take(thing) is thing
    assert read({"a": thing})["a"] is thing


def test_a_snapshot_is_waited_for() -> None:
    waits: list[str] = []
    snapshot = Snapshot(torch.ones(1), lambda: waits.append("waited"))
    assert read([snapshot])[0].tolist() == [1.0]
    assert waits == ["waited"]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (torch.tensor(2.0), 2.0),
        (torch.tensor([3]), 3),
        (np.float64(0.5), 0.5),
        (np.array([4]), 4),
        ({"a": torch.tensor(1)}, {"a": 1}),
        ("text", "text"),
    ],
)
def test_numbers_are_plain(value: Any, wanted: Any) -> None:
    found = plain(value)
    assert found == wanted
    assert type(found) is type(wanted)


def test_tensors_of_more_elements_stay() -> None:
    tensor = torch.ones(2)
    assert plain(tensor) is tensor


def test_dictionaries_are_flat() -> None:
    assert flatten({"a": {"b": torch.tensor(1), "c": {"d": 2}}, "e": 3}) == {"a/b": 1, "a/c/d": 2, "e": 3}


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_tensor_of_a_gpu_is_copied_in_its_own_stream() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        value = torch.zeros(1, device="cuda")
        torch.cuda._sleep(100_000_000)
        value += 1
        copy = take(value)
        value += 1
    assert isinstance(copy, Snapshot)
    assert read(copy).tolist() == [1.0]
