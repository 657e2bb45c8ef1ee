"""Files of shards: written by several, read by another number, and by torch itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from accelerate.base import CheckpointError
from accelerate.checkpointing import (
    LocalShards,
    Shard,
    manifest,
    shard_files,
    shard_index,
    single_shard,
    to_local_shards,
)

WEIGHT = ("model", "weight")
NAME = ("model", "name")
STEP = ("model", "step")


def part(tensor: Tensor, rank: int, ranks: int) -> LocalShards:
    rows = tensor.chunk(ranks)
    start = sum(len(each) for each in rows[:rank])
    return LocalShards(tuple(tensor.shape), tensor.dtype, (Shard((start, 0), rows[rank]),))


def save(folder: Path, tensor: Tensor, ranks: int, others: Any = None) -> None:
    reports = []
    for rank in range(ranks):
        state = {WEIGHT: part(tensor, rank, ranks), NAME: "a", STEP: torch.tensor(3.0), **(others or {})}
        payload = shard_files.payload(folder.name, rank, state)
        path = folder.parent / payload.name
        path.parent.mkdir(exist_ok=True)
        reports.append(payload.write(payload.content, path))
    assert payload.finish is not None
    payload.finish(folder, reports)


@pytest.fixture
def tensor() -> Tensor:
    return torch.arange(30.0).view(10, 3)


@pytest.fixture
def folder(tmp_path: Path, tensor: Tensor) -> Path:
    save(tmp_path / "shards", tensor, 3)
    return tmp_path / "shards"


@pytest.mark.parametrize("map_file", [None, manifest.map_writable], ids=["read", "mapped"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_any_number_of_ranks_reads_its_shards(
    folder: Path, tensor: Tensor, ranks: int, map_file: manifest.MapFile | None
) -> None:
    found = shard_index.read(folder, "model")
    for rank in range(ranks):
        target = part(tensor, rank, ranks).without_memory()
        values = shard_files.read(
            found, {WEIGHT: target, NAME: None, STEP: single_shard(torch.empty(()))}, {}, map_file
        )
        assert torch.equal(values[WEIGHT].shards[0].tensor, tensor.chunk(ranks)[rank])
        assert values[NAME] == "a"
        assert values[STEP].shards[0].tensor == 3.0


def test_shards_without_memory_are_views_of_a_mapped_file(tmp_path: Path) -> None:
    tensors = {("model", name): torch.rand(4, 3) for name in "abc"}
    odd = {("model", "t"): torch.rand(3, 4).t(), ("model", "n"): torch.rand(4, 3, dtype=torch.float64)}
    save(tmp_path / "shards", torch.zeros(3, 3), 1, {**tensors, **odd})
    maps: list[Any] = []

    def map_file(path: Path) -> Any:
        maps.append(manifest.map_writable(path))
        return maps[-1]

    found = shard_index.read(tmp_path / "shards", "model")
    targets = {path: single_shard(value).without_memory() for path, value in {**tensors, **odd}.items()}
    values = shard_files.read(found, targets, {}, map_file)
    read = {path: value.shards[0].tensor for path, value in values.items()}
    assert all(torch.equal(read[path], value) for path, value in {**tensors, **odd}.items())
    first = torch.frombuffer(maps[0], dtype=torch.uint8).data_ptr()
    is_view = {path[1]: 0 < tensor.data_ptr() - first < len(maps[0]) for path, tensor in read.items()}
    assert is_view == {"a": False, "b": True, "c": True, "t": False, "n": False}  # torch reads the first one


def test_values_that_all_ranks_read_have_a_file_of_their_own(tmp_path: Path, tensor: Tensor) -> None:
    reports, names = [], []
    for rank in range(2):
        state = {WEIGHT: part(tensor, rank, 2), NAME: "a", STEP: torch.tensor(3.0)}
        for own in shard_files.payloads("", rank, state):
            names.append(own.name)
            reports.append(own.write(own.content, tmp_path / own.name))
    shard_files.finish(tmp_path, reports)
    assert names == ["__0_values_0.distcp", "__0_0.distcp", "__1_0.distcp"]
    found = shard_index.read(tmp_path, "model")
    targets = {WEIGHT: part(tensor, 1, 2).without_memory(), NAME: None, STEP: single_shard(torch.empty(()))}
    assert set(shard_files.items_by_file(found, targets)) == {"__0_values_0.distcp", "__1_0.distcp"}
    values = shard_files.read(found, targets, {})
    assert torch.equal(values[WEIGHT].shards[0].tensor, tensor[5:])
    assert (values[NAME], values[STEP].shards[0].tensor) == ("a", 3.0)
    test_torch_reads_it(tmp_path, tensor)


def test_columns_are_read_of_what_was_saved_in_rows(folder: Path, tensor: Tensor) -> None:
    columns = LocalShards((10, 3), tensor.dtype, (Shard((0, 1), torch.empty(10, 2)),))
    shard_files.read(shard_index.read(folder, "model"), {WEIGHT: columns}, {})
    assert torch.equal(columns.shards[0].tensor, tensor[:, 1:])


def test_torch_reads_it(folder: Path, tensor: Tensor) -> None:
    state = {"model": {"weight": torch.empty(10, 3), "step": torch.empty(())}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert torch.equal(state["model"]["weight"], tensor)
    assert state["model"]["step"] == 3.0


def test_a_part_of_a_tensor_is_stored_without_the_rest(tmp_path: Path) -> None:
    save(tmp_path / "shards", torch.zeros(100_000, 3), 3)
    sizes = [path.stat().st_size for path in (tmp_path / "shards").glob("*.distcp")]
    assert len(sizes) == 3
    assert max(sizes) < 4 * 100_000 * 1.1


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    tied = torch.rand(1000, 100)
    save(tmp_path / "shards", torch.zeros(3, 3), 1)
    small = (tmp_path / "shards" / "__0_0.distcp").stat().st_size
    save(tmp_path / "tied", torch.zeros(3, 3), 1, {("model", n): tied for n in "ab"})
    assert (tmp_path / "tied" / "__0_0.distcp").stat().st_size - small < 1.1 * 4 * 100_000
    found = shard_index.read(tmp_path / "tied", "model")
    targets = {("model", name): to_local_shards(torch.empty(1000, 100), 0, 0) for name in "ab"}
    values = shard_files.read(found, targets, {})  # type: ignore[arg-type]
    assert all(torch.equal(value.shards[0].tensor, tied) for value in values.values())


def read_all(folder: Path, tensor: Tensor) -> None:
    shard_files.read(shard_index.read(folder, "model"), {WEIGHT: single_shard(torch.empty_like(tensor))}, {})


def test_a_missing_shard_is_named(folder: Path, tensor: Tensor) -> None:
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"^shards/__1_0\.distcp is missing$"):
        read_all(folder, tensor)
    shard_files.read(shard_index.read(folder, "model"), {STEP: single_shard(torch.empty(()))}, {})


def test_a_shard_that_is_cut_off_is_named(folder: Path, tensor: Tensor) -> None:
    path = folder / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"shards/__2_0\.distcp has \d+ bytes, .* it is truncated"):
        read_all(folder, tensor)


def test_a_shard_that_is_damaged_is_named(folder: Path, tensor: Tensor) -> None:
    path = folder / "__2_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CheckpointError, match=r"shards/__2_0\.distcp cannot be read: it is damaged"):
        read_all(folder, tensor)


def test_values_that_can_run_code_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "shards", torch.zeros(3, 3), 1, {("model", "object"): Path("x")})
    found = shard_index.read(tmp_path / "shards", "model")
    place = ("model", "object")
    with pytest.raises(CheckpointError, match=r"object holds a `pathlib\.\S*Path`"):
        shard_files.read(found, {place: None}, {})
    assert shard_files.read(found, {place: None}, {"weights_only": False}) == {place: Path("x")}


def test_tensors_are_copied_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP's copies ahead are awaited on the current device, and a thread that writes begins with device 0."""
    from torch.distributed.checkpoint import filesystem

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr(filesystem, "_OverlappingCpuLoader")
    save(tmp_path / "shards", torch.zeros(3, 3), 1)


def test_a_disk_that_is_full_is_an_error_of_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("unexpected pos")

    payload = shard_files.payload("shards", 0, {STEP: torch.tensor(1.0)})
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="could not be written"):
        payload.write(payload.content, tmp_path / "file")
