"""The metadata of a folder of shards: written, read, and refused where it is something else."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stand_ins.objects import CreatesFolder
from torch.distributed.checkpoint.metadata import TensorProperties

from accelerate.base import CheckpointError
from accelerate.checkpointing import shard_files, shard_index
from accelerate.checkpointing.local_shards import write_item

WEIGHT = ("model", "a.weight")


def entry(rank: int, rows: int = 2) -> list[Any]:
    box = [(4, 3), "float32", (rank * 2, 0), (rows, 3)]
    return [WEIGHT, box, [f"__{rank}_0.distcp", 10, 99]]


def test_written_metadata_is_read(tmp_path: Path) -> None:
    value = [("model", "extra"), None, ["__0_0.distcp", 200, 5]]
    shard_files.finish(tmp_path, [[entry(0), value], [entry(1)]])
    found = shard_index.read(tmp_path, "model")
    assert set(found.paths) == {WEIGHT, ("model", "extra")}
    stored = found.stored(WEIGHT)
    assert stored is not None
    assert (stored.shape, stored.dtype, stored.device.type) == ((4, 3), torch.float32, "meta")
    assert found.stored(("model", "extra")) is None
    (tmp_path / "__0_0.distcp").write_bytes(bytes(109))
    with pytest.raises(CheckpointError, match=r"^[^;]*/__1_0.distcp is missing$"):
        found.check_files(["model.a.weight"])
    with pytest.raises(CheckpointError, match="__0_0.distcp has 109 bytes, and at least 205 are needed"):
        found.check_files(["model.extra"])


@pytest.mark.parametrize("second", [[], [entry(0)], [entry(1, rows=1)]], ids=["missing", "twice", "cut"])
def test_tensors_that_are_not_whole_are_refused(tmp_path: Path, second: list[Any]) -> None:
    if second == [entry(0)]:
        second = [entry(1), *second]
    with pytest.raises(CheckpointError, match=r"The parts of model\.a\.weight do not make whole tensors"):
        shard_files.finish(tmp_path, [[entry(0)], second])
    assert not (tmp_path / shard_index.NAME).exists()


def test_a_save_of_one_rank_is_refused_where_parts_are_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="do not make whole tensors"):
        shard_files.finish(tmp_path, [[entry(0)]])


def test_older_versions_of_torch_read_the_properties_of_tensors() -> None:
    properties = write_item("a", (4, 3), torch.float16, (0, 0), (4, 3)).tensor_data.properties
    state = properties.__reduce_ex__(2)[2]
    assert len(state) == 5
    assert pickle.loads(pickle.dumps(properties)) == TensorProperties(torch.float16)


def test_the_metadata_names_no_folder(tmp_path: Path) -> None:
    shard_files.finish(tmp_path / ".", [[entry(0), entry(1)]])
    assert str(tmp_path).encode() not in (tmp_path / shard_index.NAME).read_bytes()


def test_a_state_without_a_key_is_read_under_its_name(tmp_path: Path) -> None:
    flat = [("a.weight",), [(2,), "float32", (0,), (2,)], ["f", 0, 99]]
    shard_files.finish(tmp_path, [[flat]])
    assert set(shard_index.read(tmp_path, "model").paths) == {WEIGHT}


def test_reading_metadata_runs_no_code(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / shard_index.NAME).write_bytes(pickle.dumps(CreatesFolder(mark)))
    with pytest.raises(CheckpointError, match=r"\.metadata holds a `posix\.mkdir`"):
        shard_index.read(tmp_path, "model")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("module", "name"), [("torch", "load"), ("torch.distributed.checkpoint.metadata", "os.system")]
)
def test_functions_of_torch_are_refused(tmp_path: Path, module: str, name: str) -> None:
    text = f"c{module}\n{name}\n.".encode()
    (tmp_path / shard_index.NAME).write_bytes(text)
    with pytest.raises(CheckpointError, match="holds a `torch"):
        shard_index.read(tmp_path, "model")


def test_missing_and_damaged_metadata_raise_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{tmp_path.name}/\.metadata is missing"):
        shard_index.read(tmp_path, "model")
    shard_files.finish(tmp_path, [[entry(0), entry(1)]])
    path = tmp_path / shard_index.NAME
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="it is damaged, or not metadata of shards"):
        shard_index.read(tmp_path, "model")
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="not metadata of shards"):
        shard_index.read(tmp_path, "model")
