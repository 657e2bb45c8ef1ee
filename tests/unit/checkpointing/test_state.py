"""The functions that write and read states without a run around them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.base import CheckpointError
from accelerate.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    read_device,
    save_accelerator_state,
    save_custom_state,
)

pytestmark = pytest.mark.usefixtures("states")


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def parts() -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), DataLoader(range(6))
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 / (step + 1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    return model, optimizer, schedule, loader


def test_all_objects_are_saved_and_loaded(tmp_path: Path) -> None:
    model, optimizer, schedule, loader = parts()
    schedule.step()
    states = [model.state_dict()]
    assert save_accelerator_state(tmp_path, states, [optimizer], [schedule], [loader], 0, 9) == tmp_path
    assert sorted(os.listdir(tmp_path)) == [
        "model.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
        "sampler.bin",
        "scheduler.bin",
    ]
    weight, drawn, rate = model.weight.clone(), torch.rand(1), schedule.get_last_lr()
    other, its_optimizer, its_schedule, its_loader = parts()
    found = load_accelerator_state(tmp_path, [other], [its_optimizer], [its_schedule], [its_loader], 0)
    assert found == {"step": 9}
    assert torch.equal(other.weight, weight)
    assert its_schedule.get_last_lr() == rate
    assert torch.equal(torch.rand(1), drawn)
    assert its_optimizer.state_dict()["state"][0]["momentum_buffer"] is not None


def test_nothing_is_changed_when_a_file_is_missing(tmp_path: Path) -> None:
    model, optimizer, schedule, loader = parts()
    save_accelerator_state(tmp_path, [model.state_dict()], [], [], [], 0, 0)
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(CheckpointError, match=r"holds no optimizer\.bin"):
        load_accelerator_state(tmp_path, [model], [optimizer], [], [], 0)
    assert not model.weight.any()


def test_a_custom_object_is_saved_and_loaded(tmp_path: Path) -> None:
    Accelerator(cpu=True)
    save_custom_state(Counter(5), tmp_path, 3)
    assert os.listdir(tmp_path) == ["custom_checkpoint_3.pkl"]
    counter = Counter()
    load_custom_state(counter, tmp_path, 3)
    assert counter.count == 5
    with pytest.raises(CheckpointError, match=r"holds no custom_checkpoint_0\.pkl"):
        load_custom_state(counter, tmp_path)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Accelerator(cpu=True)
    save_custom_state(Counter(1), tmp_path)

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        save_custom_state(Counter(2), tmp_path)
    monkeypatch.undo()
    counter = Counter()
    load_custom_state(counter, tmp_path)
    assert counter.count == 1
    assert os.listdir(tmp_path) == ["custom_checkpoint_0.pkl"]


def test_map_location_selects_the_device_of_weights() -> None:
    Accelerator(cpu=True)
    assert read_device(None) == "cpu"
    assert read_device("on_device") == torch.device("cpu")
    assert read_device("meta") == "meta"
    with pytest.raises(TypeError, match="map_location='invalid': it is not a device"):
        read_device("invalid")
