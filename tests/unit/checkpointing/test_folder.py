"""A folder is there as a whole or not at all, whatever fails in between."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerate.base.errors import CheckpointError
from accelerate.checkpointing import hidden, manifest
from accelerate.checkpointing.files import seal
from accelerate.checkpointing.folder import Workplace, plan_workplace, recover, remove
from accelerate.checkpointing.manifest import Manifest


def fill(workplace: Workplace, text: str, name: str = "optimizer.bin") -> None:
    """Write a complete checkpoint into an open workplace."""
    (workplace.folder / name).write_text(text)
    record = seal(workplace.folder, name)
    Manifest({name: record}, world_size=1).write(workplace.folder)


def save(target: Path, text: str, name: str = "optimizer.bin") -> None:
    workplace = plan_workplace(target)
    workplace.open()
    try:
        fill(workplace, text, name)
        workplace.publish()
    finally:
        workplace.discard()


def content(target: Path) -> str:
    assert manifest.problems(target, manifest.read(target), deep=True) == []
    return (target / "optimizer.bin").read_text()


def test_a_new_folder_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "checkpoint"
    workplace = plan_workplace(target)
    workplace.open()
    fill(workplace, "new")
    assert not target.exists()
    workplace.publish()
    assert content(target) == "new"
    assert os.listdir(target.parent) == ["checkpoint"]


def test_an_older_one_is_replaced_and_what_the_user_keeps_in_it_stays(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    save(target, "old", "scheduler.bin")
    (target / "notes" / "deep").mkdir(parents=True)
    (target / "notes" / "deep" / "mine.txt").write_text("mine")
    save(target, "new")
    assert content(target) == "new"
    assert (target / "notes" / "deep" / "mine.txt").read_text() == "mine"
    assert not (target / "scheduler.bin").exists()
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_files_of_a_folder_without_manifest_are_known_by_name(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    target.mkdir()
    (target / "model.safetensors").write_text("stale")
    (target / "readme.md").write_text("mine")
    save(target, "new")
    assert sorted(os.listdir(target)) == ["manifest.json", "optimizer.bin", "readme.md"]


def test_the_working_folder_is_filled_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "work"
    save(target, "old", "scheduler.bin")
    (target / "mine.txt").write_text("mine")
    monkeypatch.chdir(target)
    save(Path("."), "new")
    assert content(target) == "new"
    assert sorted(os.listdir(target)) == ["manifest.json", "mine.txt", "optimizer.bin"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/checkpoint cannot be written: .*Choose a folder"):
        plan_workplace(tmp_path / "file" / "checkpoint").open()


class Faults:
    """Fails the n-th of the calls that change the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, crash: type[BaseException]) -> None:
        self.left = 10**9
        self.crash = crash
        for owner, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (os, "mkdir"), (Path, "unlink")):
            monkeypatch.setattr(owner, name, self.counting(getattr(owner, name)))

    def counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise self.crash(5, "Input/output error")
            return call(*args, **kwargs)

        return counted


class Crash(BaseException):
    """The process ends here: nothing after it is done."""


@pytest.fixture(params=[OSError, Crash], ids=["error", "crash"])
def faults(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch, request.param)


def calls_of_a_save(faults: Faults, target: Path) -> int:
    save(target, "first")
    before = faults.left
    save(target, "old")
    return before - faults.left


def attempt(faults: Faults, target: Path) -> str:
    """Replace a checkpoint; after a crash nothing is cleared up. Some calls do not matter."""
    try:
        if faults.crash is not Crash:
            save(target, "new")
        else:
            workplace = plan_workplace(target)
            workplace.open()
            fill(workplace, "new")
            workplace.publish()
    except (OSError, Crash, CheckpointError):
        return "failed"
    return "saved"


def test_every_fault_leaves_the_old_or_the_new_one(faults: Faults, tmp_path: Path) -> None:
    calls = calls_of_a_save(faults, tmp_path / "count")
    assert calls >= 7
    for n in range(1, calls + 1):
        target = tmp_path / f"checkpoint{n}"
        save(target, "old")
        faults.left = n
        outcome = attempt(faults, target)
        faults.left = 10**9
        hidden._needed.clear()  # the process that crashed needs nothing
        recover(target)
        assert content(target) in ("old", "new"), f"call {n}"
        assert outcome == "failed" or content(target) == "new", f"call {n}"
        save(target, "newer")
        assert content(target) == "newer"


@pytest.mark.parametrize("crash", [OSError, Crash])
def test_every_fault_leaves_the_old_or_the_new_one_in_a_folder_that_must_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: type[BaseException]
) -> None:
    faults = Faults(monkeypatch, crash)
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    calls = calls_of_a_save(faults, tmp_path / "count")
    assert calls >= 10
    for n in range(1, calls + 1):
        target = tmp_path / f"checkpoint{n}"
        save(target, "old")
        (target / "mine.txt").write_text("mine")
        number = target.stat().st_ino
        faults.left = n
        outcome = attempt(faults, target)
        faults.left = 10**9
        hidden._needed.clear()  # the process that crashed needs nothing
        recover(target)
        assert content(target) in ("old", "new"), f"call {n}"
        assert outcome == "failed" or content(target) == "new", f"call {n}"
        save(target, "newer")
        assert content(target) == "newer"
        assert target.stat().st_ino == number
        assert sorted(os.listdir(target)) == ["manifest.json", "mine.txt", "optimizer.bin"]


@pytest.mark.parametrize(
    "name", ["run[1]", "a*b?", "-x", "with space", "new\nline", "ünï", "x" * 180, ".dot"]
)
def test_odd_names(tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    save(target, "old")
    save(target, "new")
    os.rename(target, tmp_path / f".{name}.{hidden.OLD}-elsewhere-1-0x0")
    recover(target)
    assert content(target) == "new"
    assert os.listdir(tmp_path) == [name]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    target = tmp_path / "checkpoint"
    target.symlink_to(tmp_path / "disk" / "real")
    save(target, "first")
    save(target, "second")
    assert target.is_symlink()
    assert content(tmp_path / "disk" / "real") == "second"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "disk"]
    remove(target)
    assert os.listdir(tmp_path) == ["disk"]


def test_folders_links_and_namesakes_of_the_user_stay(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    save(target, "old")
    (target / "plots").mkdir()
    (target / "link").symlink_to("nowhere")
    (target / "optimizer.bin.notes").write_text("mine")
    save(target, "new")
    assert (target / "plots").is_dir()
    assert (target / "link").is_symlink()
    assert sorted(os.listdir(target)) == [
        "link",
        "manifest.json",
        "optimizer.bin",
        "optimizer.bin.notes",
        "plots",
    ]


def test_a_folder_with_a_mount_in_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "checkpoint"
    save(target, "old")
    (target / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "disk")
    number = (target / "disk").stat().st_ino, target.stat().st_ino
    save(target, "new")
    assert content(target) == "new"
    assert ((target / "disk").stat().st_ino, target.stat().st_ino) == number


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("mine")
    with pytest.raises(CheckpointError, match="it is a file"):
        save(tmp_path / "checkpoint", "new")
    assert (tmp_path / "checkpoint").read_text() == "mine"
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_saved_checkpoint_is_not_called_lost_when_the_old_one_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "checkpoint"
    save(target, "old")

    def fail(*args: Any) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(hidden, "dispose", fail)
    save(target, "new")
    monkeypatch.undo()
    assert content(target) == "new"
    assert "Permission denied" in caplog.text
    save(target, "newer")
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_folder_is_gone_before_its_files_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "checkpoint"
    save(target, "old")

    def crash(path: Path, ignore_errors: bool) -> None:
        raise Crash

    monkeypatch.setattr(hidden.shutil, "rmtree", crash)
    with pytest.raises(Crash):
        remove(target)
    assert not target.exists()
