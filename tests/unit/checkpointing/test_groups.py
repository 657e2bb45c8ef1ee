"""The groups of an optimizer: by name, by order, and refused where they are those of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import CheckpointError
from accelerate.checkpointing import ByOrder, by_name, group_places

NAMES = [[["a.weight", "tied.weight"], ["a.bias"]]]


def stepped(lr: float) -> torch.optim.Optimizer:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def test_groups_have_places() -> None:
    found = group_places([{"lr": 0.1, "params": [0, 1]}], [["a", "b"]])
    assert found == {
        ("optimizer", "param_groups", 0, "lr"): 0.1,
        ("optimizer", "param_groups", 0, "params"): ["a", "b"],
    }


@pytest.mark.parametrize("named", [True, False])
def test_states_are_loaded_by_name_and_by_order(named: bool) -> None:
    optimizer, other = stepped(0.1), stepped(0.5)
    state: Any = optimizer.state_dict()
    if named:
        state = by_name(state, NAMES)
        assert list(state["state"]) == ["a.weight", "a.bias"]
        assert state["param_groups"][0]["params"] == ["a.weight", "a.bias"]
        state["state"]["tied.weight"] = state["state"].pop("a.weight")
    owner = ByOrder(other, lambda: NAMES)
    owner.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.1
    old, new = optimizer.state_dict()["state"], owner.state_dict()["state"]
    assert all(torch.equal(old[index][key], new[index][key]) for index in old for key in old[index])


def test_states_of_others_are_refused() -> None:
    optimizer = stepped(0.1)
    owner = ByOrder(optimizer, lambda: [[["b"], ["c"]]])
    with pytest.raises(CheckpointError, match=r"parameters it does not step: a\.bias, a\.weight"):
        owner.load_state_dict(by_name(optimizer.state_dict(), NAMES))
    twice = by_name(optimizer.state_dict(), NAMES)
    twice["param_groups"] *= 2
    with pytest.raises(CheckpointError, match="has 2 groups, and there are 1"):
        ByOrder(optimizer, lambda: NAMES).load_state_dict(twice)
