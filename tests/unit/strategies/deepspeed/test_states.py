"""Tests of whole weights."""

from __future__ import annotations

import torch

from accelerate.strategies.deepspeed import copy_to_cpu, gathered_parameters


def test_views_of_one_buffer_are_copied_separately_and_tied_names_stay_tied():
    buffer = torch.arange(6.0)
    state = {"a": buffer[:2], "b": buffer[2:].view(2, 2), "c": buffer[:2], "extra": 3}
    copied = copy_to_cpu(state)
    assert copied["a"] is copied["c"]
    assert copied["extra"] == 3
    assert copied["b"].untyped_storage().nbytes() == 16
    assert torch.equal(copied["b"], state["b"])


def test_a_model_without_shards_is_left_as_it_is():
    model = torch.nn.Linear(2, 2)
    with gathered_parameters(model):
        assert model.weight.shape == (2, 2)
