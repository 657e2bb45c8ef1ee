"""Weights in files of limited size: readable by others, nothing stale left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accelerate.base.errors import ConfigurationError
from accelerate.checkpointing.shards import save_sharded

STATE = {f"layer{index}.weight": torch.full((256,), float(index)) for index in range(4)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_file_without_an_index(tmp_path: Path) -> None:
    save_sharded(STATE, tmp_path / "out")
    assert names(tmp_path / "out") == ["model.safetensors"]


@pytest.mark.parametrize(("safe", "stem"), [(True, "model"), (False, "pytorch_model")])
def test_several_files_hold_everything_once(tmp_path: Path, safe: bool, stem: str) -> None:
    save_sharded(STATE, tmp_path, 2100, safe)
    suffix = "safetensors" if safe else "bin"
    files = [f"{stem}-0000{n}-of-00002.{suffix}" for n in (1, 2)]
    assert names(tmp_path) == [*files, f"{stem}.{suffix}.index.json"]
    index = json.loads((tmp_path / f"{stem}.{suffix}.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(STATE)
    read = {}
    for name in files:
        path = tmp_path / name
        read.update(load_file(path) if safe else torch.load(path, weights_only=True))
    assert all(torch.equal(read[name], tensor) for name, tensor in STATE.items())
    assert len(read) == len(STATE)


def test_files_of_an_earlier_call_go_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "model-card.safetensors").write_text("mine")
    save_sharded(STATE, tmp_path, 1100)
    save_sharded(STATE, tmp_path)
    assert names(tmp_path) == ["model-card.safetensors", "model.safetensors"]


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_shard_size='much'"):
        save_sharded(STATE, tmp_path, "much")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="it is a file"):
        save_sharded(STATE, tmp_path / "file")
