"""States of random generators in a file."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from accelerate import rng
from accelerate.base import CheckpointError
from accelerate.checkpointing import capture_generators, check_generators, items, seed_of


def restore(states: Any) -> None:
    rng.restore(check_generators(states))


@pytest.fixture(autouse=True)
def kept() -> Any:
    states = capture_generators()
    yield
    restore(states)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


@pytest.mark.cpu_only
def test_restored_generators_repeat_their_numbers() -> None:
    states = capture_generators()
    assert set(states) == {"random_state", "numpy_random_seed", "torch_manual_seed"}
    drawn = draw()
    assert draw() != drawn
    restore(states)
    assert draw() == drawn


def test_unknown_states_are_ignored() -> None:
    restore({**capture_generators(), "torch_xla_seed": 3, "step": 1})


@pytest.mark.parametrize("name", ["random_state", "torch_manual_seed"])
def test_a_missing_state_is_named(name: str) -> None:
    states = capture_generators()
    del states[name]
    with pytest.raises(CheckpointError, match=r"no state for the random generators .*world_size_policy"):
        restore(states)


@pytest.mark.parametrize("content", [None, 3, [1, 2], "text"])
def test_other_content_is_refused(content: Any) -> None:
    with pytest.raises(CheckpointError, match="holds a"):
        restore(content)


def test_each_rank_gets_a_seed_derived_from_the_states_of_rank_0() -> None:
    states = capture_generators()
    drawn = []
    for rank in (0, 1, 0):
        rng.set_seed(seed_of(states, rank))
        drawn.append(draw())
    assert drawn[0] == drawn[2] != drawn[1]
    torch.manual_seed(77)
    rng.set_seed(seed_of(capture_generators(), 0))
    assert draw() != drawn[0]


def test_the_state_of_this_device_or_the_first_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    first, second = torch.tensor([1]), torch.tensor([2])
    assert items._of_this_device([first, second]) is second
    assert items._of_this_device([first]) is first
    assert items._of_this_device(first) is first
