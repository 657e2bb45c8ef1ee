from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate import dispatch_model
from accelerate.base import CheckpointError, ConfigurationError
from accelerate.big_modeling import dispatch, find_offloaded, keep_in_memory, keep_on_disk


def build() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    return model


def test_find_offloaded_lists_tensors_by_device() -> None:
    model = build()
    found = find_offloaded(model, {"": 0, "0.bias": "cpu", "1": "disk"}, {"disk", "cpu"}, False)
    assert found == {"0.weight": "cpu", "0.bias": "cpu", "1.weight": "disk", "1.bias": "disk"}
    assert "1.running_mean" in find_offloaded(model, {"": "disk"}, {"disk"}, True)


def test_memory_holds_shared_tensors_once() -> None:
    model = build()
    kept = keep_in_memory(model, ["0.weight", "2.weight"], None, "cpu")
    assert kept["0.weight"] is kept["2.weight"]
    assert kept["0.weight"].data_ptr() == model[0].weight.data_ptr()
    given = torch.ones(2, 2)
    assert torch.equal(keep_in_memory(model, ["0.weight"], {"0.weight": given}, "cpu")["0.weight"], given)
    with pytest.raises(ConfigurationError, match="weight have no values"):
        keep_in_memory(model.to("meta"), ["0.weight"], None, "cpu")


def test_memory_is_pinned_for_copies_to_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: locked.append(self) or self)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    for device, expected in (("cuda:0", 1), ("cpu", 0), ("meta", 0), ("mps", 0)):
        locked.clear()
        keep_in_memory(build(), ["0.weight", "2.weight"], None, device)
        assert len(locked) == expected
    monkeypatch.setattr(dispatch, "PINNED_PART", 0)
    locked.clear()
    keep_in_memory(build(), ["0.weight"], None, "cuda:0")
    assert not locked


def test_only_tensors_with_values_are_offloaded_to_the_disk(tmp_path: Path) -> None:
    model = build()
    index = keep_on_disk(model, ["0.weight", "0.bias"], tmp_path, None, [], {"": "disk"})
    assert set(index) == {"0.weight", "0.bias"}
    assert {path.name for path in tmp_path.iterdir()} == {"index.json", "0.weight.dat", "0.bias.dat"}
    model.to("meta")
    assert keep_on_disk(model, ["0.weight"], tmp_path, None, [], {"": "disk"}).keys() == {"0.weight"}
    with pytest.raises(ConfigurationError, match="1.weight have no values"):
        keep_on_disk(model, ["1.weight"], tmp_path, None, [], {"": "disk"})
    assert keep_on_disk(model, [], None, None, [], {}) == {}


def test_a_folder_that_another_model_has_overwritten(tmp_path: Path) -> None:
    first, second = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    x = torch.ones(1, 2)
    dispatch_model(first, {"": "disk"}, offload_dir=tmp_path)
    first(x)
    past = (tmp_path / "0.weight.dat").stat().st_mtime_ns - 10**9
    dispatch_model(second, {"": "disk"}, offload_dir=tmp_path)
    for path in tmp_path.glob("*.dat"):
        os.utime(path, ns=(past, past))  # clocks of files are coarse
    with pytest.raises(CheckpointError, match="Use a separate folder for each model"):
        first(x)
