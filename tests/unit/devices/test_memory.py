"""Emptying caches and dropping references."""

import gc
import weakref

import pytest
import torch

from accelerate.devices import CPU, CUDA, hardware_table


@pytest.mark.parametrize("collect", [True, False])
def test_clear_device_cache_empties_the_cache_and_collects_garbage_on_request(
    collect, monkeypatch, fake_torch
):
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    monkeypatch.setattr(hardware_table, "detect", lambda: CUDA)
    hardware_table.clear_device_cache(garbage_collection=collect)
    assert fake_torch.paths == ["torch.cuda.empty_cache"]
    assert collected == [1] * collect


def test_release_memory_returns_nones_and_frees_what_they_held(monkeypatch):
    monkeypatch.setattr(hardware_table, "detect", lambda: CPU)
    model, tensor = torch.nn.Linear(2, 2), torch.ones(3)
    watch = weakref.ref(model)
    model, tensor = hardware_table.release_memory(model, tensor)
    assert (model, tensor) == (None, None)
    gc.collect()
    assert watch() is None
    assert hardware_table.release_memory() == []
