"""States of random generators in a file."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from accelerate import rng
from accelerate.base import CheckpointError
from accelerate.checkpointing import generators


def restore(states: Any) -> None:
    rng.restore(generators.check(states))


@pytest.fixture(autouse=True)
def kept() -> Any:
    states = generators.capture()
    yield
    restore(states)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_what_is_captured_is_drawn_again() -> None:
    states = generators.capture()
    assert set(states) == {"random_state", "numpy_random_seed", "torch_manual_seed"}
    drawn = draw()
    assert draw() != drawn
    restore(states)
    assert draw() == drawn


def test_further_states_are_left_alone() -> None:
    restore({**generators.capture(), "torch_xla_seed": 3, "step": 1})


@pytest.mark.parametrize("name", ["random_state", "torch_manual_seed"])
def test_a_missing_state_is_named(name: str) -> None:
    states = generators.capture()
    del states[name]
    with pytest.raises(CheckpointError, match=r"no state for the random generators .*world_size_policy"):
        restore(states)


@pytest.mark.parametrize("content", [None, 3, [1, 2], "text"])
def test_other_content_is_refused(content: Any) -> None:
    with pytest.raises(CheckpointError, match="holds a"):
        restore(content)


def test_each_rank_gets_states_of_its_own_that_follow_from_those_of_rank_0() -> None:
    states = generators.capture()
    drawn = []
    for rank in (0, 1, 0):
        rng.set_seed(generators.seed_of(states, rank))
        drawn.append(draw())
    assert drawn[0] == drawn[2] != drawn[1]
    torch.manual_seed(77)
    rng.set_seed(generators.seed_of(generators.capture(), 0))
    assert draw() != drawn[0]


def test_of_a_list_for_each_device_the_first_is_taken_where_there_are_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    first, second = torch.tensor([1]), torch.tensor([2])
    assert generators._own([first, second]) is second
    assert generators._own([first]) is first
    assert generators._own(first) is first
