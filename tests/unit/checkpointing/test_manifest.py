"""The manifest of a complete checkpoint, and how a damaged one is recognised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

from accelerate.base import CheckpointError, sync_folder
from accelerate.checkpointing import Manifest, check_fields, files_under, manifest, measure, refuse_name, seal


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


def test_a_written_manifest_is_read_unchanged(folder: Path) -> None:
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
            "2 bytes instead of 4: it is truncated",
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


def test_a_map_is_read_only_so_that_the_file_may_be_larger_than_the_memory(folder: Path) -> None:
    with pytest.raises(TypeError):
        manifest.map_file(folder / "model.safetensors")[0] = 1


def test_changes_of_a_writable_map_are_not_written(folder: Path) -> None:
    writable = manifest.map_writable(folder / "model.safetensors")
    writable[0] = 1
    assert writable[0] == 1
    assert manifest.problems(folder, manifest.read(folder), deep=True) == []


def test_only_the_named_files_are_checked(folder: Path) -> None:
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


RECORD = {"size": 1, "checksum": "0123456789abcdef", "rank": 0}
NESTED: list[Any] = []
for _ in range(50):
    NESTED = [NESTED]


def content(**changes: Any) -> dict[str, Any]:
    return {"files": {"a.bin": RECORD}, "world_size": 2, "step": 3, "format": 1, **changes}


def test_valid_fields_are_accepted() -> None:
    check_fields(content(iteration=None, run={"updates": [1], "gradient_order": [[0]], "mine": {"x": None}}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("files", [], r"files=\[\], and a JSON object"),
        ("files", {"a": 1}, r"files\['a'\]=1, and a JSON object of size, checksum and rank"),
        ("files", {"a": {**RECORD, "size": "1"}}, r"files\['a'\]\.size='1', and a whole number"),
        ("files", {"a": {**RECORD, "size": -1}}, r"size=-1, and a whole number of 0 or more is expected"),
        ("files", {"a": {**RECORD, "size": 10**400}}, r"size=1000+\.\.\.0+, and"),
        ("files", {"a": {**RECORD, "size": True}}, "size=True, and"),
        ("files", {"a": {**RECORD, "checksum": 7}}, "checksum=7, and 16 hexadecimal digits"),
        ("files", {"a": {**RECORD, "checksum": "0"}}, "checksum='0', and"),
        ("files", {"a": {**RECORD, "rank": None}}, "rank=None, and"),
        ("files", {"a": {"size": 1}}, r"no field files\['a'\]\.checksum, which holds 16 hexadecimal"),
        ("files", {"a": {**RECORD, "mode": 7}}, r"a field files\['a'\]\.'mode' that format 1 does not have"),
        ("files", {"../a": RECORD}, r"names the file '\.\./a', which has a component '\.\.'"),
        ("world_size", 0, "world_size=0, and a whole number of 1 or more"),
        ("world_size", -2, "world_size=-2, and"),
        ("world_size", "2", "world_size='2', and"),
        ("step", [1], r"step=\[1\], and"),
        ("step", 1.5, r"step=1\.5, and"),
        ("epoch", None, "epoch=None, and"),
        ("iteration", "4", "iteration='4', and a whole number of 0 or more, or null"),
        ("created", 5, "created=5, and printable text is expected"),
        ("created", "\x1b[2J", "created='.x1b.2J', and printable text"),
        ("created", "\ud800", "created='.ud800', and"),
        ("torch", NESTED, r"torch=\[\[\[?\.\.\.\]"),
        ("run", [], r"run=\[\], and"),
        ("run", {"updates": 7}, r"run\.updates=7, and a list of whole numbers"),
        ("run", {"updates": ["7"]}, r"run\.updates=\['7'\], and"),
        ("run", {"gradient_order": [[1], 2]}, r"run\.gradient_order=\[\[1\], 2\], and"),
        ("run", {"folders": ["a.bin"]}, r"run\.folders=\['a.bin'\], and a list of JSON objects"),
        ("run", {"folders": [{"../a": RECORD}]}, r"names the file '../a', which"),
        ("run", {"folders": [{"a": {**RECORD, "size": -1}}]}, r"run\.folders\['a'\]\.size=-1, and"),
        ("run", {"sync_gradients": 1}, r"run\.sync_gradients=1, and true or false"),
        ("algorithm", "md5", "algorithm='md5', and 'xxh3_64'"),
        ("format", "1", "format='1', and the number 1"),
        ("surprise", 1, "has a field 'surprise' that format 1 does not have"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        check_fields(content(**{field: value}))
    assert len(str(error.value)) < 300


def test_a_missing_field_is_named() -> None:
    whole = content()
    del whole["world_size"]
    with pytest.raises(CheckpointError, match="has no field world_size"):
        check_fields(whole)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "names no file"),
        (".", "names no file"),
        ("/etc/passwd", "absolute"),
        ("a/../../b", "component '..'"),
        ("a\0b", "NUL"),
        ("..\\b", "backslash"),
        ("C:\\b", "backslash"),
        ("a//b", "plain path"),
        ("./a", "plain path"),
        ("a/", "plain path"),
        ("manifest.json", "manifest itself"),
        (7, "not text"),
    ],
)
def test_a_name_that_is_no_plain_path_in_the_folder_is_refused(name: object, reason: str) -> None:
    assert reason in (refuse_name(name) or "")


@pytest.mark.parametrize("name", ["a.bin", "deep/b.bin", ".metadata", "a b", "ünï", "..a", "a\udcff"])
def test_other_names_are_accepted(name: str) -> None:
    assert refuse_name(name) is None


@pytest.mark.parametrize("size", [0, 1, manifest._STRIDE, manifest._STRIDE + 1])
def test_the_checksum_is_that_of_the_whole_content(tmp_path: Path, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    (tmp_path / "file").write_bytes(data[:size])
    assert measure(tmp_path / "file") == (size, xxhash.xxh3_64_hexdigest(data[:size]))
    assert manifest.checksum_of(data[:size]) == xxhash.xxh3_64_hexdigest(data[:size])


def test_a_sealed_file_is_described(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(b"1234")
    record = seal(tmp_path, "sub/file", rank=3)
    assert (record.name, record.size, record.rank) == ("sub/file", 4, 3)
    assert record.checksum == manifest.checksum_of(b"1234")
    with pytest.raises(FileNotFoundError):
        seal(tmp_path, "nothing")


def test_files_are_listed_with_their_folders_and_without_them(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("x")
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "a" / "deep" / "c").write_text("x")
    (tmp_path / "dangling").symlink_to("nowhere")
    sync_folder(tmp_path)
    assert list(files_under(tmp_path)) == ["a/deep/c", "b"]
