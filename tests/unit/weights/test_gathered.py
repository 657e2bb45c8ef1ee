"""Parameters of DeepSpeed are gathered by DeepSpeed; others are whole."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.weights import GatheredParameters, gathered


def test_without_deepspeed_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "is_deepspeed_available", lambda: False)
    parameter = nn.Parameter(torch.ones(2))
    with GatheredParameters([parameter], modifier_rank=0):
        assert parameter.tolist() == [1.0, 1.0]


def test_deepspeed_is_given_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return nullcontext()

    monkeypatch.setattr(gathered, "is_deepspeed_available", lambda: True)
    zero = SimpleNamespace(GatheredParameters=record)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=zero))
    with GatheredParameters([1], 0, enabled=False):  # type: ignore[list-item]
        pass
    assert calls == [(([1],), {"modifier_rank": 0, "fwd_module": None, "enabled": False})]
