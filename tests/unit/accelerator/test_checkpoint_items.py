"""Which parts of a run are saved, and that shards need a folder in common."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.accelerator import state_items
from accelerate.base import CheckpointError

pytestmark = pytest.mark.usefixtures("states")


def prepared() -> tuple[Any, nn.Module, Any]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    return accelerator, model, optimizer


def names(accelerator: Any, common: bool = True) -> list[str]:
    request = SimpleNamespace(target="x", is_generation=False)
    staging: Any = SimpleNamespace(is_common=common, is_owner=True, folder=Path("x"), request=request)
    return [payload.name for payload in state_items.collect(accelerator._runtime, staging, 0, True)]


def test_states_are_unsharded_unless_the_strategy_saves_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, _, _ = prepared()
    others = ["random_states_0.pkl"]
    assert names(accelerator) == ["model.safetensors", "optimizer.bin", *others]
    monkeypatch.setattr(type(accelerator._runtime.strategy.state), "saves_shards", True)
    shards = ["pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/__0_0.distcp"]
    assert names(accelerator) == [*shards, *others]


def test_shards_need_a_folder_that_all_see(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, _, _ = prepared()
    monkeypatch.setattr(type(accelerator._runtime.strategy.state), "saves_shards", True)
    with pytest.raises(CheckpointError, match="FSDP_STATE_DICT_TYPE=FULL_STATE_DICT"):
        names(accelerator, common=False)


def test_save_hooks_receive_the_weights_and_may_remove_them(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, _, _ = prepared()
    monkeypatch.setattr(type(accelerator._runtime.strategy.state), "saves_shards", True)
    seen: list[Any] = []

    def hook(models: list[Any], weights: list[Any], folder: str) -> None:
        seen.append((len(models), list(weights.pop()), folder))

    accelerator.register_save_state_pre_hook(hook)
    assert names(accelerator) == ["optimizer_0/__0_0.distcp", "random_states_0.pkl"]
    assert seen == [(1, ["weight", "bias"], "x")]


@pytest.mark.parametrize("blocking", [True, False])
def test_one_process_saves_and_loads_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocking: bool, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, model, optimizer = prepared()
    monkeypatch.setattr(type(accelerator._runtime.strategy.state), "saves_shards", True)
    accelerator.save_state(tmp_path / "a", blocking=blocking)
    before = model.weight.clone()
    model.weight.data.zero_()
    optimizer.optimizer.state.clear()
    accelerator.wait_for_checkpoint()
    accelerator.load_state(tmp_path / "a")
    assert torch.equal(model.weight, before)
    assert set(optimizer.optimizer.state[model.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    accelerator._runtime.prepared.optimizers.clear()
    accelerator.load_state(tmp_path / "a")
    assert "holds optimizer_0/.metadata, and this run has prepared" in caplog.text
