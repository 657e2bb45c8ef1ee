"""Numbered checkpoints: which is the newest, which are deleted."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from accelerate.checkpointing import Manifest, checkpoints_below, manifest, retention, seal
from accelerate.checkpointing.folder import name_of


def make(parent: Path, *numbers: int, complete: bool = True) -> None:
    for number in numbers:
        path = parent / name_of(number)
        path.mkdir()
        if complete:
            Manifest({}, world_size=1, iteration=number).write(path)


def numbers(parent: Path) -> list[int]:
    return [each.number for each in retention.survey(parent)]


def test_checkpoints_are_ordered_by_number_from_the_newest(tmp_path: Path) -> None:
    make(tmp_path, 2, 10, 9)
    (tmp_path / "checkpoint_old").mkdir()
    (tmp_path / "checkpoint_11").write_text("a file")
    assert numbers(tmp_path) == [10, 9, 2]


def test_a_missing_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert retention.survey(tmp_path / "nothing") == []


def test_incomplete_checkpoints_have_a_fault(tmp_path: Path) -> None:
    make(tmp_path, 1)
    make(tmp_path, 2, complete=False)
    newest, older = retention.survey(tmp_path)
    assert "there is no manifest.json" in newest.fault
    assert older.fault == ""


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (3, [5, 4, 3]), (9, [5, 4, 3, 2, 1])])
def test_the_oldest_checkpoints_are_removed(tmp_path: Path, keep: int, left: list[int]) -> None:
    make(tmp_path, 1, 2, 3, 4, 5)
    gone = retention.prune(tmp_path, keep)
    assert numbers(tmp_path) == left
    assert [path.name for path in gone] == [f"checkpoint_{n}" for n in range(1, 6) if n not in left]


def test_the_newest_complete_checkpoint_is_kept(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    make(tmp_path, 3, 4, complete=False)
    retention.prune(tmp_path, 1)
    assert numbers(tmp_path) == [4, 2]


def test_numbers_of_checkpoints_being_written_are_taken(tmp_path: Path) -> None:
    make(tmp_path, 1)
    (tmp_path / ".checkpoint_4.saving-otherhost-1-0x0").mkdir()
    (tmp_path / ".checkpoint_5.saving-otherhost-1-0x0").mkdir()
    os.utime(tmp_path / ".checkpoint_5.saving-otherhost-1-0x0", (0, 0))
    assert retention.taken_numbers(tmp_path) == {1, 4}


def test_a_checkpoint_replaced_during_verification_is_verified_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 1)
    problems, calls = manifest.problems, []

    def look(*args: Any, **choices: Any) -> list[str]:
        calls.append(args)
        if len(calls) > 1:
            return problems(*args, **choices)
        Manifest({}, world_size=2).write(tmp_path / "checkpoint_1")
        return ["a is missing"]

    monkeypatch.setattr(manifest, "problems", look)
    read, fault = retention.inspect(tmp_path / "checkpoint_1", deep=True)
    assert fault == ""
    assert read is not None
    assert read.world_size == 2


def save(folder: Path) -> Path:
    folder.mkdir(parents=True)
    Manifest({}, world_size=1).write(folder)
    return folder


def names(top: Path) -> list[str]:
    return [path.relative_to(top).as_posix() for path in checkpoints_below(top)]


def test_checkpoints_of_any_name_and_depth_are_found(tmp_path: Path) -> None:
    for name in (
        "best",
        "a/b/c/d/deep",
        "runs/checkpoint_2",
        "runs/checkpoint_10",
        "runs/last",
        ".hidden/one",
    ):
        save(tmp_path / name)
    assert names(tmp_path) == [
        "best",
        ".hidden/one",
        "a/b/c/d/deep",
        "runs/checkpoint_10",
        "runs/checkpoint_2",
        "runs/last",
    ]
    assert checkpoints_below(tmp_path / "best") == [tmp_path / "best"]


def test_no_folder_of_a_checkpoint_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "best")
    (tmp_path / "best/pytorch_model_fsdp_0").mkdir()
    searched: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: searched.append(Path(path).name) or scandir(path))
    assert names(tmp_path) == ["best"]
    assert searched == [tmp_path.name, "best"]


def test_of_thousands_of_other_files_none_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "data/best")
    for number in range(3000):
        (tmp_path / "data" / f"{number}.bin").touch()
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / manifest.NAME
    other.write_text('{"name": "a web page"}' + " " * 10**6)
    read: list[int] = []
    stats: list[Any] = []
    real_open, real_stat = Path.open, os.stat

    def note_open(path: Path, *args: Any, **kwargs: Any) -> Any:
        file = real_open(path, *args, **kwargs)
        reading = file.read
        wrapped = MagicMock(wraps=file)
        wrapped.__enter__.return_value.read = lambda size: read.append(size) or reading(size)
        wrapped.__exit__.side_effect = lambda *_: file.close()
        return wrapped

    def note_stat(path: Any, *args: Any, **kwargs: Any) -> Any:
        stats.append(path)
        return real_stat(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", note_open)
    monkeypatch.setattr(os, "stat", note_stat)
    assert names(tmp_path) == ["data/best"]
    assert len(read) == 2
    assert max(read) < 1000
    assert len(stats) < 20


def test_files_of_other_software_are_no_manifests(tmp_path: Path) -> None:
    for name, text in {
        "page": '{"name": "x"}',
        "list": "[1, 2]",
        "text": "files",
        "binary": "\0" * 9,
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / manifest.NAME).write_text(text)
    (tmp_path / "page/below").mkdir()
    save(tmp_path / "page/below/best")
    assert names(tmp_path) == ["page/below/best"]


@pytest.mark.parametrize("kept", [0, 1, 12, 30])
def test_damaged_manifests_are_found(tmp_path: Path, kept: int) -> None:
    path = save(tmp_path / "best") / manifest.NAME
    path.write_bytes(path.read_bytes()[:kept])
    assert names(tmp_path) == ["best"]


def test_numbered_checkpoints_without_a_manifest_are_found_and_searched(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint_1/inner/best")
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_1/inner/best"]


def test_links_are_followed_where_checkpoints_are_expected(tmp_path: Path) -> None:
    save(tmp_path / "disk/checkpoint_1")
    save(tmp_path / "disk/best")
    project = tmp_path / "project"
    project.mkdir()
    (project / "checkpoints").symlink_to("../disk")
    (project / "latest").symlink_to("../disk/best")
    (tmp_path / "disk/checkpoints").symlink_to("../project")
    assert names(project) == ["checkpoints/checkpoint_1", "checkpoints/best"]
    save(tmp_path / "archive/first")
    (project / "checkpoint_7").symlink_to("../archive/first")
    assert names(project) == ["checkpoint_7", "checkpoints/checkpoint_1", "checkpoints/best"]


def test_unfinished_saves_are_not_listed_and_replaced_checkpoints_are_restored(tmp_path: Path) -> None:
    ended = f"{socket.gethostname()}-999999999-1x1x1"
    save(tmp_path / f".best.saving-{ended}")
    save(tmp_path / f".last.old-{ended}")
    assert names(tmp_path) == ["last"]


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "best")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert names(tmp_path) == ["best"]
    assert "closed cannot be read" in caplog.text


def test_a_changed_byte_is_a_fault_where_checksums_are_compared(tmp_path: Path) -> None:
    path = tmp_path / name_of(1)
    path.mkdir()
    (path / "optimizer.bin").write_text("state")
    Manifest({"optimizer.bin": seal(path, "optimizer.bin")}, world_size=1).write(path)
    (path / "optimizer.bin").write_text("stale")
    (shallow,) = retention.survey(tmp_path)
    assert shallow.fault == ""
    assert "optimizer.bin" in retention.inspect(path, deep=True)[1]
