"""Objects are restored to their previous state, also after changes in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import CheckpointError
from accelerate.checkpointing import changes, inner_optimizers, keep_object, keep_optimizer, keep_weights


class Worn(torch.optim.SGD):
    """Loads in place, and fails afterwards."""

    def load_state_dict(self, state_dict: Any) -> None:
        for state in self.state.values():
            state["momentum_buffer"].zero_()
            state["other"] = 1
        self.param_groups[0]["lr"] = 7.0
        self.param_groups.append({})
        self.note = True
        raise RuntimeError("it refuses")


def stepped() -> Worn:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = Worn([parameter], lr=0.5, momentum=0.9)
    parameter.sum().backward()
    optimizer.step()
    return optimizer


def test_an_optimizer_that_loads_in_place_is_restored() -> None:
    optimizer = stepped()
    (state,) = optimizer.state.values()
    bring_back = keep_optimizer(optimizer)
    with pytest.raises(RuntimeError, match="refuses"):
        optimizer.load_state_dict({})
    bring_back()
    assert list(optimizer.state.values())[0] is state
    assert list(state) == ["momentum_buffer"]
    assert state["momentum_buffer"].tolist() == [1.0, 1.0, 1.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]
    assert not hasattr(optimizer, "note")


def test_large_states_are_not_copied_and_changes_of_them_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "LARGEST", 4)
    optimizer = stepped()
    untouched = keep_optimizer(optimizer)
    untouched()
    bring_back = keep_optimizer(optimizer)
    with pytest.raises(RuntimeError, match="refuses"):
        optimizer.load_state_dict({})
    with pytest.raises(CheckpointError, match="its tensors were changed"):
        bring_back()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]


def test_optimizers_are_found_below_what_wraps_them() -> None:
    class Wrapper:
        def __init__(self, **inside: Any) -> None:
            vars(self).update(inside)

    optimizer = stepped()
    assert inner_optimizers(Wrapper(owner=Wrapper(optimizer=optimizer))) == [optimizer]
    assert inner_optimizers(Wrapper(base_optimizer=optimizer)) == [optimizer]
    assert inner_optimizers(3) == []


class Plain:
    def __init__(self, state: Any, *, refuses: bool = False) -> None:
        self.state, self.refuses, self.calls = state, refuses, 0

    def state_dict(self) -> Any:
        if self.state is None:
            raise ValueError("there is none yet")
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.calls += 1
        self.state[:] = state
        if self.refuses:
            raise RuntimeError("it refuses")


def test_an_object_changed_in_place_is_restored() -> None:
    owner = Plain([1, [2], torch.ones(2), (None, "a")])
    inside = owner.state
    bring_back = keep_object(owner)
    owner.state[1].append(3)
    owner.state[2].zero_()
    owner.more = True  # type: ignore[attr-defined]
    bring_back()
    assert owner.state is inside
    assert owner.state[:2] == [1, [2]]
    assert owner.state[2].tolist() == [1.0, 1.0]
    assert vars(owner).keys() == {"state", "refuses", "calls"}
    assert owner.calls == 0, "what is counted is brought back, too"


def test_an_object_that_was_not_changed_loads_nothing() -> None:
    owner = Plain([1])
    keep_object(owner)()
    assert owner.calls == 0


def test_an_object_whose_load_fails_after_a_change_is_restored() -> None:
    owner = Plain([1, 2], refuses=True)
    bring_back = keep_object(owner)
    owner.state[:] = [7]
    bring_back()
    assert owner.state == [1, 2]


def test_attributes_of_an_object_without_a_state_are_restored() -> None:
    owner = Plain(None)
    bring_back = keep_object(owner)
    owner.state = [3]
    bring_back()
    assert owner.state is None


def test_a_scaler_is_restored() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    before = {name: str(value) for name, value in vars(scaler).items()}
    bring_back = keep_object(scaler)
    with pytest.raises(KeyError):
        scaler.load_state_dict({"scale": 2.0})
    assert scaler.get_scale() == 2.0
    bring_back()
    assert {name: str(value) for name, value in vars(scaler).items()} == before


def test_weights_are_restored_in_place() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weight = model[0].weight
    bring_back = keep_weights(model)
    model.load_state_dict({name: value + 1 for name, value in before.items()}, assign=True)
    weight.data.zero_()
    bring_back()
    assert model[0].weight is weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
