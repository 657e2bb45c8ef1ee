from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from accelerate.base import ConfigurationError
from accelerate.big_modeling import guard_moves, move_whole, remove_old_hooks
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module


def test_a_model_that_is_there_stays() -> None:
    model = nn.Linear(2, 2)
    model.to = None  # type: ignore[assignment]
    move_whole(model, "cpu")
    with pytest.raises(ConfigurationError, match="weight, bias have no values"):
        move_whole(nn.Linear(2, 2, device="meta"), "cpu")
    other = nn.Linear(2, 2)
    move_whole(other, "meta")
    assert other.weight.is_meta


def test_moves_are_guarded_while_there_are_hooks(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    add_hook_to_module(model, AlignDevicesHook("cpu"))
    guard_moves(model)
    with caplog.at_level(logging.WARNING):
        assert model.to(torch.float64) is model
        assert model.to(dtype=torch.float64) is model
        assert not caplog.messages
        assert model.to("cpu", torch.float32) is model
        assert model.to(device="cpu") is model
    assert model.weight.dtype == torch.float32
    assert len(caplog.messages) == 2
    words = "You shouldn't move a model that is dispatched using accelerate hooks. Linear.to() does"
    assert all(message.startswith(words) for message in caplog.messages)
    add_hook_to_module(model, AlignDevicesHook("cpu", offload=True), append=True)
    with pytest.raises(RuntimeError, match="offloaded"):
        model.to("cpu")
    remove_old_hooks(model)
    caplog.clear()
    assert model.to("cpu") is model
    assert not caplog.text


def test_hooks_of_others_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    add_hook_to_module(model[0], ModelHook())
    add_hook_to_module(model[1], AlignDevicesHook("cpu"))
    remove_old_hooks(model)
    assert hasattr(model[0], "_hf_hook")
    assert not hasattr(model[1], "_hf_hook")
