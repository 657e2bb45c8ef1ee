"""Decisions without other processes; communication between stages is in the distributed tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import PartialState, inference, prepare_pippy
from accelerate.base import ConfigurationError
from accelerate.inference import find_pippy_batch_size, generate_device_map, pippy_forward

pytestmark = pytest.mark.usefixtures("states")


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a = nn.Linear(8, width)
        self.b = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x))
        return out


def test_shares_are_even_and_none_is_empty() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    assert list(generate_device_map(model, 2).values()) == [0, 0, 0, 1, 1]
    assert list(generate_device_map(model, 5).values()) == [0, 1, 2, 3, 4]
    assert set(generate_device_map(model).values()) == {0}
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert list(generate_device_map(model, 3).values()) == [0, 1, 1, 2]
    with pytest.raises(ConfigurationError, match="num_processes=5: Sequential has 4 parts"):
        generate_device_map(model, 5)


def test_stages_keep_no_split_classes_whole_and_may_separate_tied_weights() -> None:
    model = nn.Sequential(nn.Embedding(5, 8), Block(), Block(), nn.Linear(8, 5, bias=False))
    model[3].weight = model[0].weight
    found = generate_device_map(model, 2, ["Block"])
    assert list(found.items()) == [("0", 0), ("1", 0), ("2", 1), ("3", 1)]
    assert "1.a" in generate_device_map(model, 2)


def test_limits() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    assert list(generate_device_map(model, 2, max_memory={0: 256, 1: "1KB"}).values()) == [0, 1, 1, 1]
    with pytest.raises(ConfigurationError, match="3 fits no process"):
        generate_device_map(model, 2, max_memory={0: 256, 1: 512})


@pytest.mark.parametrize(
    ("args", "kwargs", "size"),
    [
        ((torch.ones(3, 2),), None, 3),
        ((), {"a": torch.ones(4)}, 4),
        (({"x": torch.ones(5)},), None, 5),
        ((1, torch.tensor(2.0)), {"y": [torch.ones(6, 1)]}, 6),
        ((1,), None, None),
        (None, None, None),
    ],
)
def test_the_batch_size(args: Any, kwargs: Any, size: int | None) -> None:
    assert find_pippy_batch_size(args, kwargs) == size


def test_one_process_needs_no_stages() -> None:
    PartialState(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2))
    assert prepare_pippy(model, example_args=(torch.ones(1, 2),)) is model
    assert model.hf_split_points == []
    assert "forward" not in vars(model)
    assert pippy_forward(lambda x, y=0: x + y, 4, True, 1, y=2) == 3
    with pytest.raises(ConfigurationError, match="split_points='half'"):
        prepare_pippy(model, "half")
    with pytest.raises(ConfigurationError, match="num_chunks=0: it is too small"):
        prepare_pippy(model, num_chunks=0)


@pytest.fixture
def both_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process that simulates the first and the last of two."""
    state = SimpleNamespace(num_processes=2, is_main_process=True, is_last_process=True)
    monkeypatch.setattr(inference, "PartialState", lambda: state)
    monkeypatch.setattr(inference, "broadcast_object_list", lambda objects, from_process: objects)
    return


@pytest.mark.usefixtures("both_ends")
@pytest.mark.parametrize("size", [1, 2, 4, 5, 8, 11])
def test_batches_of_any_size_are_split_into_batches_of_the_fixed_size(size: int) -> None:
    class Fixed:
        batch_size = 4

        def __init__(self) -> None:
            self.sizes: list[int] = []

        def __call__(self, x: torch.Tensor, more: torch.Tensor) -> dict[str, torch.Tensor]:
            self.sizes.append(len(x))
            return {"sum": x + more}

    forward = Fixed()
    x = torch.arange(float(size))
    output = pippy_forward(forward, 2, False, x, more=2 * x)
    assert torch.equal(output["sum"], 3 * x)
    assert set(forward.sizes) == {4}


@pytest.mark.usefixtures("both_ends")
def test_without_a_fixed_size_it_is_padded_to_chunks() -> None:
    sizes = []
    output = pippy_forward(lambda x: sizes.append(len(x)) or x, 4, False, torch.arange(5))
    assert sizes == [8]
    assert output.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigurationError, match="no argument of rank 0"):
        pippy_forward(lambda x: x, 4, False, 7)
