"""Weights in files of limited size: readable by others, nothing stale left behind."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from accelerate.base import CheckpointError, ConfigurationError
from accelerate.checkpointing import find_shards, save_from_shards, save_sharded
from accelerate.commands.model_tensors import read_tensors

STATE = {f"layer{index}.weight": torch.full((256,), float(index)) for index in range(4)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_file_without_an_index(tmp_path: Path) -> None:
    save_sharded(STATE, tmp_path / "out")
    assert names(tmp_path / "out") == ["model.safetensors"]


@pytest.mark.parametrize(("safe", "stem"), [(True, "model"), (False, "pytorch_model")])
def test_several_files_contain_each_tensor_once(tmp_path: Path, safe: bool, stem: str) -> None:
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


def test_files_of_an_earlier_save_are_removed_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "model-card.safetensors").write_text("mine")
    save_sharded(STATE, tmp_path, 1100)
    save_sharded(STATE, tmp_path)
    assert names(tmp_path) == ["model-card.safetensors", "model.safetensors"]


@pytest.mark.parametrize("safe", [True, False])
def test_a_model_without_weights_is_a_file_too(tmp_path: Path, safe: bool) -> None:
    (path,) = save_sharded({}, tmp_path, safe=safe)
    assert find_shards(tmp_path) == [path]
    assert path.is_file()


def test_files_of_torch_hold_no_more_than_their_tensors(tmp_path: Path) -> None:
    memory = torch.zeros(10**5)
    save_sharded(
        {"part": memory[:3], "a": STATE["layer0.weight"], "b": STATE["layer0.weight"]}, tmp_path, safe=False
    )
    read = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 10**4
    assert read["part"].tolist() == [0, 0, 0]
    assert read["a"].data_ptr() == read["b"].data_ptr(), "what is shared stays so"


def test_an_index_finds_its_files(tmp_path: Path) -> None:
    written = save_sharded(STATE, tmp_path, 2100)
    assert find_shards(tmp_path) == find_shards(tmp_path / "model.safetensors.index.json") == written
    assert find_shards(written[0]) == [written[0]]
    written[1].unlink()
    with pytest.raises(CheckpointError, match=f"names files that are not beside it: {written[1].name}"):
        find_shards(tmp_path)


def test_links_to_files_of_other_folders_are_read(tmp_path: Path) -> None:
    save_sharded(STATE, tmp_path / "blobs", 2100)
    (tmp_path / "linked").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "linked" / path.name).symlink_to(f"../blobs/{path.name}")
    found = find_shards(tmp_path / "linked")
    assert len(found) > 1
    assert all(path.is_symlink() and path.parent.name == "linked" for path in found)


@pytest.mark.parametrize("kind", ["absolute", "above"])
def test_an_index_reads_no_files_of_other_folders(tmp_path: Path, kind: str) -> None:
    (weights,) = save_sharded(STATE, tmp_path / "other")
    name = str(weights) if kind == "absolute" else "../other/model.safetensors"
    (tmp_path / "own").mkdir()
    index = tmp_path / "own" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(STATE, name)}))
    with pytest.raises(CheckpointError, match="Each file must be in the folder of the index"):
        find_shards(tmp_path / "own")
    with pytest.raises(ConfigurationError, match="Each file must be in the folder of the index"):
        read_tensors(str(tmp_path / "own"), None, False)


@pytest.mark.parametrize(
    ("size", "files"),
    [(2100, 2), ("2.1KB", 2), (" 2.1 kb ", 2), ("3KB", 2), ("3KiB", 2), ("1GB", 1), ("10GB", 1), (0, 4)],
)
def test_a_size_reaches_huggingface_hub_as_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | str, files: int
) -> None:
    current = huggingface_hub.split_torch_state_dict_into_shards

    def split_of_the_lowest_version(state: Any, *, filename_pattern: str, max_shard_size: int) -> Any:
        assert max_shard_size < 10**12  # text has no order with numbers
        return current(state, filename_pattern=filename_pattern, max_shard_size=max_shard_size)

    monkeypatch.setattr(huggingface_hub, "split_torch_state_dict_into_shards", split_of_the_lowest_version)
    assert len(save_sharded(STATE, tmp_path, size)) == files


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_shard_size='much'"):
        save_sharded(STATE, tmp_path / "new", "much")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="it is a file"):
        save_sharded(STATE, tmp_path / "file")


def test_one_file_is_gathered_at_a_time(tmp_path: Path) -> None:
    tied = torch.randn(64)
    state = {"tied": tied, **{f"layer{index}": torch.randn(64) for index in range(6)}, "head": tied}
    save_sharded(state, tmp_path / "whole", 600)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def gather(value: torch.Tensor) -> torch.Tensor:
        nonlocal most
        whole = value.clone()
        alive.append(weakref.ref(whole))
        most = max(most, sum(reference() is not None for reference in alive))
        return whole

    save_from_shards(state, gather, tmp_path / "shards", 600, writes=True)
    assert most == 2  # tensors of 256 bytes in a file of 600
    files = names(tmp_path / "whole")
    assert files == names(tmp_path / "shards")
    for name in files:
        ours, theirs = tmp_path / "shards" / name, tmp_path / "whole" / name
        if name.endswith(".json"):
            assert ours.read_bytes() == theirs.read_bytes()
            continue
        with safe_open(ours, "pt") as first, safe_open(theirs, "pt") as second:
            assert first.metadata() == second.metadata()
        torch.testing.assert_close(load_file(ours), load_file(theirs), atol=0, rtol=0)


def test_a_rank_that_cannot_write_gathers_all_tensors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    gathered: list[int] = []
    state = {str(index): torch.full((64,), float(index)) for index in range(6)}

    def gather(value: torch.Tensor) -> torch.Tensor:
        gathered.append(int(value[0]))
        return value

    with pytest.raises(ValueError, match="it is a file"):
        save_from_shards(state, gather, tmp_path / "file", 600, writes=True)
    assert gathered == list(range(6))
