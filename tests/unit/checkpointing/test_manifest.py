"""What a complete checkpoint holds, and how it is told from a broken one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accelerate.base import CheckpointError
from accelerate.checkpointing import Manifest, manifest, seal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "deep.bin").write_bytes(b"deep")
    names = ("model.safetensors", "empty.bin", "sub/deep.bin")
    files = {name: seal(tmp_path, name, rank) for rank, name in enumerate(names)}
    Manifest(files, world_size=3, step=7, epoch=1, iteration=4, run={"num_steps": 2}).write(tmp_path)
    return tmp_path


def test_it_comes_back_as_it_was(folder: Path) -> None:
    read = manifest.read(folder)
    assert (read.world_size, read.step, read.epoch, read.iteration, read.run) == (
        3,
        7,
        1,
        4,
        {"num_steps": 2},
    )
    assert read.files["sub/deep.bin"].rank == 2
    assert read.size == 256 * 40 + 4
    assert manifest.problems(folder, read, deep=True) == []


def flip(path: Path, place: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "deep", "problem"),
    [
        (lambda folder: (folder / "empty.bin").unlink(), False, "empty.bin is missing"),
        (
            lambda folder: (folder / "sub/deep.bin").write_bytes(b"de"),
            False,
            "2 bytes instead of 4: it is cut off",
        ),
        (lambda folder: flip(folder / "model.safetensors"), False, ""),
        (
            lambda folder: flip(folder / "model.safetensors"),
            True,
            "model.safetensors does not fit its checksum",
        ),
        (lambda folder: (folder / "sub/deep.bin").write_bytes(b"DEEP"), True, "another file"),
    ],
)
def test_damage_is_named(folder: Path, damage: object, deep: bool, problem: str) -> None:
    damage(folder)  # type: ignore[operator]
    found = manifest.problems(folder, manifest.read(folder), deep=deep)
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def test_only_the_named_files_are_looked_at(folder: Path) -> None:
    (folder / "empty.bin").unlink()
    assert manifest.problems(folder, manifest.read(folder), ["sub/deep.bin"], deep=True) == []


def test_a_folder_without_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no manifest\.json"):
        manifest.read(tmp_path)


def test_every_flipped_bit_and_every_cut_is_found(folder: Path) -> None:
    path = folder / manifest.NAME
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        flip(path, place)
        if json_like(path) != json.loads(whole):  # not a blank turned into another blank
            with pytest.raises(CheckpointError):
                manifest.read(folder)
        path.write_bytes(whole[:place])
        with pytest.raises(CheckpointError, match="damaged"):
            manifest.read(folder)
        path.write_bytes(whole)


def json_like(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def test_a_later_format_is_refused(folder: Path) -> None:
    content = json.loads((folder / manifest.NAME).read_text())
    (folder / manifest.NAME).write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99, and this version reads format 1"):
        manifest.read(folder)
