"""One model or optimizer in a folder: both forms, adapters only, what is returned and what is refused."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.base import CheckpointError, ConfigurationError
from accelerate.checkpointing import folder
from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from accelerate.utils.fsdp_utils import _get_model_state_dict, _prepare_sd_options, _set_model_state_dict

pytestmark = pytest.mark.usefixtures("states")

FORMS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT")
FILES = {
    "FULL_STATE_DICT": ["optimizer_1.bin", "pytorch_model_fsdp_1.bin"],
    "SHARDED_STATE_DICT": [
        "optimizer_1/.metadata",
        "optimizer_1/__0_0.distcp",
        "pytorch_model_fsdp_1/.metadata",
        "pytorch_model_fsdp_1/__0_0.distcp",
    ],
}
FILES["LOCAL_STATE_DICT"] = FILES["SHARDED_STATE_DICT"]


def plugin(form: str, version: int = 1) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=form)


def prepared(seed: int) -> tuple[Any, Any, Any]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=seed / 10))
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    return accelerator, model, optimizer


@pytest.mark.parametrize("form", FORMS)
def test_model_and_optimizer_are_saved_and_loaded(tmp_path: Path, form: str) -> None:
    accelerator, model, optimizer = prepared(1)
    for _ in range(2):  # the second time they take the places of the first
        save_fsdp_model(plugin(form), accelerator, model, tmp_path / "a", 1)
        save_fsdp_optimizer(plugin(form), accelerator, optimizer, model, tmp_path / "a", 1)
    names = sorted(
        path.relative_to(tmp_path / "a").as_posix() for path in tmp_path.rglob("*") if path.is_file()
    )
    assert names == FILES[form]
    _, other, own = prepared(2)
    result = load_fsdp_model(plugin(form), accelerator, other, tmp_path / "a", 1)
    load_fsdp_optimizer(plugin(form), accelerator, own, other, tmp_path / "a", 1)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    before, after = optimizer.state_dict(), own.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(
        torch.equal(values[key], after["state"][index][key])
        for index, values in before["state"].items()
        for key in values
    )


def test_full_optimizer_state_dicts_use_parameter_names(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(1)
    save_fsdp_optimizer(plugin("FULL_STATE_DICT"), accelerator, optimizer, model, tmp_path)
    state = torch.load(tmp_path / "optimizer.bin")
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(state["state"]) == names
    assert state["param_groups"][0]["params"] == names


def test_the_plugin_chooses_between_two_forms(tmp_path: Path) -> None:
    accelerator, model, _ = prepared(1)
    for value, form in enumerate(FORMS[:2]):
        nn.init.constant_(model[0].weight, value)
        save_fsdp_model(plugin(form), accelerator, model, tmp_path)
    for value, form in enumerate(FORMS[:2]):
        load_fsdp_model(plugin(form), accelerator, model, tmp_path)
        assert model[0].weight.unique().tolist() == [value]
    shards = tmp_path / "pytorch_model_fsdp_0"
    load_fsdp_model(plugin("FULL_STATE_DICT"), accelerator, model, shards)
    assert model[0].weight.unique().tolist() == [0]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(1)
    with pytest.raises(
        ConfigurationError, match=r"neither pytorch_model_fsdp_0/\.metadata nor pytorch_model"
    ):
        load_fsdp_model(plugin(FORMS[0]), accelerator, model, tmp_path)
    with pytest.raises(ConfigurationError, match=r"neither optimizer_0/\.metadata nor optimizer\.bin"):
        load_fsdp_optimizer(plugin(FORMS[0]), accelerator, optimizer, model, tmp_path)


@pytest.mark.parametrize("form", FORMS[:2])
def test_damaged_files_are_named_and_change_nothing(tmp_path: Path, form: str) -> None:
    accelerator, model, _ = prepared(1)
    save_fsdp_model(plugin(form), accelerator, model, tmp_path)
    (path,) = (path for path in tmp_path.rglob("*") if path.suffix in (".distcp", ".bin"))
    path.write_bytes(path.read_bytes()[:-200])
    before = model[0].weight.clone()
    with pytest.raises(CheckpointError, match=path.name):
        load_fsdp_model(plugin(form), accelerator, model, tmp_path)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("form", FORMS[:2])
def test_a_full_disk_keeps_the_existing_files(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, model, _ = prepared(1)
    save_fsdp_model(plugin(form), accelerator, model, tmp_path)
    before = sorted(tmp_path.rglob("*"))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("unexpected pos 1 vs 0")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(CheckpointError, match="could not be written"):
            save_fsdp_model(plugin(form), accelerator, model, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    load_fsdp_model(plugin(form), accelerator, model, tmp_path)


@pytest.mark.parametrize("swaps", [True, False])
def test_a_crash_while_shards_are_replaced_leaves_a_complete_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    form = plugin("SHARDED_STATE_DICT")
    accelerator, model, _ = prepared(1)
    save_fsdp_model(form, accelerator, model, tmp_path)
    target = tmp_path / "pytorch_model_fsdp_0"
    stale = target / "__7_0.distcp"  # as of a run with more processes
    stale.write_text("")
    rename, rmtree, is_whole = os.rename, shutil.rmtree, []

    def unable_to_swap(first: Path, second: Path) -> None:
        raise OSError(38, "Function not implemented")

    def watched(change: Any) -> Any:
        def watch(*args: Any, **kwargs: Any) -> None:
            change(*args, **kwargs)
            folders = [target, *tmp_path.glob(".*.old-*")]  # those that a crash leaves, or `recover` restores
            is_whole.append(any((path / ".metadata").is_file() for path in folders))

        return watch

    if not swaps:
        monkeypatch.setattr(folder, "swap", unable_to_swap)
    monkeypatch.setattr(os, "rename", watched(rename))
    monkeypatch.setattr(shutil, "rmtree", watched(rmtree))
    save_fsdp_model(form, accelerator, model, tmp_path)
    monkeypatch.undo()
    assert all(is_whole)
    assert is_whole
    assert not stale.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pytorch_model_fsdp_0"]
    load_fsdp_model(form, accelerator, model, tmp_path)


# Adapters


class Adapted(nn.Module):
    """A simple PEFT model: the name of the adapter is a part of the names of its tensors."""

    active_adapter = "default"

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.base = nn.Linear(2, 2)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 1, bias=False)})
        for parameter in self.parameters():
            nn.init.constant_(parameter, fill)


def pick(
    model: nn.Module, state_dict: Mapping[str, Any], adapter_name: str, save_embedding_layers: bool
) -> dict[str, Any]:
    return {
        name.replace(f".{adapter_name}", ""): value for name, value in state_dict.items() if "lora_" in name
    }


@pytest.fixture
def peft(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = ModuleType("peft")
    fake.PeftModel, fake.get_peft_model_state_dict = Adapted, pick
    monkeypatch.setitem(sys.modules, "peft", fake)


@pytest.mark.usefixtures("peft")
@pytest.mark.parametrize("form", FORMS[:2])
def test_adapters_are_saved_and_loaded_alone(tmp_path: Path, form: str) -> None:
    accelerator = Accelerator(cpu=True)
    model, other = accelerator.prepare(Adapted(1.0), Adapted(2.0))
    save_fsdp_model(plugin(form), accelerator, model, tmp_path, adapter_only=True)
    result = load_fsdp_model(plugin(form), accelerator, other, tmp_path, adapter_only=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert other.lora_A["default"].weight.tolist() == [[1.0, 1.0]]
    assert other.base.bias.tolist() == [2.0, 2.0]
    if form == "FULL_STATE_DICT":
        assert list(torch.load(tmp_path / "pytorch_model_fsdp.bin")) == ["lora_A.weight"]


@pytest.mark.usefixtures("peft")
@pytest.mark.parametrize("options", [None, StateDictOptions()], ids=["module", "torch"])
def test_state_dicts_of_adapters(options: Any) -> None:
    model = Adapted(1.0)
    state = _get_model_state_dict(model, adapter_only=True, sd_options=options)
    assert list(state) == ["lora_A.weight"]
    other = Adapted(2.0)
    _set_model_state_dict(other, state, adapter_only=True, sd_options=options)
    assert other.lora_A["default"].weight.tolist() == [[1.0, 1.0]]
    assert other.base.bias.tolist() == [2.0, 2.0]
    whole = _get_model_state_dict(model, sd_options=options)
    _set_model_state_dict(other, whole, sd_options=options)
    assert other.base.bias.tolist() == [1.0, 1.0]


def test_options_of_torch_suit_the_plugin() -> None:
    assert _prepare_sd_options(plugin("FULL_STATE_DICT")) is None
    sharded, full = (_prepare_sd_options(plugin(form, 2)) for form in FORMS[:2])
    assert (sharded.full_state_dict, sharded.cpu_offload, sharded.broadcast_from_rank0) == (
        False,
        True,
        False,
    )
    assert (full.full_state_dict, full.cpu_offload, full.broadcast_from_rank0) == (True, True, True)
    bare: Any = SimpleNamespace(fsdp_version=1)
    assert _prepare_sd_options(bare) is None
