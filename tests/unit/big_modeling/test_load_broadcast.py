"""Weights broadcast in a world of one process; tests/distributed broadcasts between ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accelerate import PartialState
from accelerate.base import CheckpointError
from accelerate.big_modeling import receive_weights
from accelerate.weights import StoredWeights

pytestmark = pytest.mark.usefixtures("states")
CPU = torch.device("cpu")


def opened(path: Path) -> StoredWeights:
    return StoredWeights.open([path])


def test_all_tensors_are_received_from_the_file(tmp_path: Path) -> None:
    PartialState(cpu=True)
    state = {"a": torch.rand(2, 3), "none": torch.empty(0, 2), "one": torch.tensor(3, dtype=torch.int16)}
    save_file(state, tmp_path / "w.safetensors")
    found = receive_weights(tmp_path / "w.safetensors", opened)
    weights = found.weights
    assert found.opened not in (None, weights)
    assert found.path == tmp_path / "w.safetensors"
    assert weights.files.keys() == state.keys()
    for name, tensor in state.items():
        assert weights.shape(name) == tensor.shape
        assert torch.equal(weights.read(name, CPU), tensor)
        assert weights.read(name, CPU).dtype == tensor.dtype
        assert weights.files[name].locate(name) is None


def test_extra_state_is_received_from_the_file(tmp_path: Path) -> None:
    PartialState(cpu=True)
    torch.save({"a": torch.ones(1), "m._extra_state": {"n": 3}}, tmp_path / "w.bin")
    weights = receive_weights(tmp_path / "w.bin", opened).weights
    assert list(weights.extra) == ["m._extra_state"]
    assert weights.extra["m._extra_state"].read("m._extra_state", CPU) == {"n": 3}


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    PartialState(cpu=True)
    with pytest.raises(CheckpointError, match="is missing"):
        receive_weights(tmp_path / "none", opened)
