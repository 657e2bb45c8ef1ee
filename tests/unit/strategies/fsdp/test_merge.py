from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from accelerate.base import CheckpointError, ConfigurationError
from accelerate.checkpointing import find_shards, shards
from accelerate.commands.merge import main
from accelerate.strategies.fsdp import merge, merge_fsdp_weights

WEIGHTS = {
    "layers.0.weight": torch.arange(64.0).reshape(8, 8),
    "layers.0.bias": torch.arange(8, dtype=torch.bfloat16),
    "layers.1.weight": torch.arange(64.0).reshape(8, 8) + 1,
    "steps": torch.tensor(3),
}


def save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder as `torch.distributed.checkpoint` writes it."""
    layout = getattr(request, "param", "nested")
    state = dict(WEIGHTS) if layout == "flat" else {"model": dict(WEIGHTS)}
    folder = tmp_path / "shards"
    inner = folder / "pytorch_model_fsdp_0" if layout == "whole checkpoint" else folder
    save(state, inner)
    return folder


in_each_layout = pytest.mark.parametrize("checkpoint", ["nested", "flat", "whole checkpoint"], indirect=True)


def assert_same(found: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@in_each_layout
@pytest.mark.parametrize("safe", [True, False])
def test_shards_become_one_file(checkpoint: Path, tmp_path: Path, safe: bool) -> None:
    target = tmp_path / "deep" / "whole"
    merge_fsdp_weights(str(checkpoint), str(target), safe_serialization=safe)
    names = [path.name for path in target.iterdir()]
    assert names == ["model.safetensors" if safe else "pytorch_model.bin"]
    path = target / names[0]
    assert_same(load_file(path) if safe else torch.load(path, weights_only=True))
    assert checkpoint.is_dir()
    (tmp_path / "new").touch()
    assert path.stat().st_mode == (tmp_path / "new").stat().st_mode


def test_a_large_model_becomes_several_files_and_an_index(checkpoint: Path, tmp_path: Path) -> None:
    merge._merge(checkpoint, tmp_path / "whole", max_file_bytes=300)
    index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in WEIGHTS.values())
    loaded = {name: load_file(tmp_path / "whole" / name) for name in files}
    assert_same({name: loaded[place][name] for name, place in index["weight_map"].items()})
    assert len(list((tmp_path / "whole").iterdir())) == 3


@pytest.mark.parametrize("sizes", [(10**9, 300), (300, 10**9), (100, 300)])
def test_the_files_of_an_earlier_result_are_replaced(
    checkpoint: Path, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    save({name: tensor + 1 for name, tensor in WEIGHTS.items()}, tmp_path / "earlier")
    merge._merge(tmp_path / "earlier", tmp_path / "whole", max_file_bytes=sizes[0])
    merge._merge(checkpoint, tmp_path / "whole", max_file_bytes=sizes[1])
    files = find_shards(tmp_path / "whole")
    assert sorted(files) == sorted((tmp_path / "whole").glob("*.safetensors"))
    assert_same({name: tensor for file in files for name, tensor in load_file(file).items()})


def test_only_one_file_is_in_memory_at_a_time(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    load = merge._load

    def watched(found: Any, group: merge.Tensors) -> dict[str, torch.Tensor]:
        tensors = load(found, group)
        held.append(sum(tensor.nbytes for tensor in tensors.values()))
        return tensors

    monkeypatch.setattr(merge, "_load", watched)
    merge._merge(checkpoint, tmp_path / "whole", max_file_bytes=300)
    assert len(held) == 2
    assert max(held) <= 300


def test_a_failure_leaves_no_half_written_file(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensors: dict[str, torch.Tensor], aliases: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(shards, "write_whole_tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        merge_fsdp_weights(str(checkpoint), str(tmp_path / "whole"), remove_checkpoint_dir=True)
    assert list((tmp_path / "whole").iterdir()) == []
    assert checkpoint.is_dir()


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["accelerate-merge-weights", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


@in_each_layout
def test_the_command_merges_and_removes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "whole"
    assert run(monkeypatch, str(checkpoint), str(target), "--remove_checkpoint_dir") == 0
    assert_same(load_file(target / "model.safetensors"))
    assert not checkpoint.exists()
    assert str(target) in capsys.readouterr().out


def test_wrong_folders_are_one_message(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(tmp_path), str(tmp_path / "whole")) == 2
    assert "the folder contains no sharded checkpoint" in capsys.readouterr().err
    assert run(monkeypatch, str(checkpoint), str(checkpoint / "whole"), "--remove_checkpoint_dir") == 2
    assert "the result would be removed" in capsys.readouterr().err
    assert checkpoint.is_dir()


def test_a_checkpoint_without_tensors_is_refused(tmp_path: Path) -> None:
    save({"model": {"step": "three"}}, tmp_path / "shards")
    with pytest.raises(ConfigurationError, match="it holds no tensors"):
        merge_fsdp_weights(str(tmp_path / "shards"), str(tmp_path / "whole"))


def test_a_shard_that_is_cut_off_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (shard,) = checkpoint.rglob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=rf"{shard.name} has \d+ bytes, .* it is truncated"):
        merge_fsdp_weights(str(checkpoint), str(tmp_path / "whole"))
    assert list((tmp_path / "whole").iterdir()) == []
