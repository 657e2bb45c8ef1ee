"""Tests of whole weights."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch

from accelerate.base import ConfigurationError
from accelerate.strategies.deepspeed import copy_to_cpu, gathered_parameters
from accelerate.strategies.deepspeed.engine import whole_weights


def test_views_of_one_buffer_are_copied_separately_and_tied_names_stay_tied():
    buffer = torch.arange(6.0)
    state = {"a": buffer[:2], "b": buffer[2:].view(2, 2), "c": buffer[:2], "extra": 3}
    copied = copy_to_cpu(state)
    assert copied["a"] is copied["c"]
    assert copied["extra"] == 3
    assert copied["b"].untyped_storage().nbytes() == 16
    assert torch.equal(copied["b"], state["b"])


def test_a_model_without_shards_is_unchanged():
    model = torch.nn.Linear(2, 2)
    with gathered_parameters(model):
        assert model.weight.shape == (2, 2)


def test_a_sharded_weight_is_gathered_when_it_is_read(monkeypatch):
    """Stand-ins for the parameters of ZeRO stage 3, which are empty outside of `GatheredParameters`."""
    model = torch.nn.Linear(2, 3)
    whole = model.weight.detach().clone()

    @contextmanager
    def gather(parameters):
        (parameter,) = parameters
        parameter.data = whole.clone()
        yield
        parameter.data = torch.empty(0)

    model.weight.ds_id, model.weight.ds_shape = 0, whole.shape
    model.weight.data = torch.empty(0)
    package = ModuleType("deepspeed")
    package.zero = SimpleNamespace(GatheredParameters=gather)
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    weights, read = whole_weights(SimpleNamespace(module=model))
    assert [tuple(weight.shape) for weight in weights.values()] == [(3, 2), (3,)]
    assert torch.equal(read(weights["weight"]), whole)
    assert torch.equal(read(weights["bias"]), model.bias)
    assert model.weight.numel() == 0


def test_layers_that_deepspeed_splits_are_refused():
    with pytest.raises(ConfigurationError, match="autotp_size"):
        whole_weights(SimpleNamespace(module=torch.nn.Linear(2, 2), autotp_size=lambda: 2))
