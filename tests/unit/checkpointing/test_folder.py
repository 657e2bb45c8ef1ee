"""A folder is there as a whole or not at all, whatever fails in between."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from accelerate.base import CheckpointError
from accelerate.checkpointing import (
    Manifest,
    StagingFolder,
    folder,
    manifest,
    plan_staging_folder,
    recover,
    remove,
    seal,
    temporary,
)
from accelerate.state import services


def fill(staging: StagingFolder, text: str, name: str = "optimizer.bin") -> None:
    """Write a complete checkpoint into an open staging."""
    (staging.folder / name).write_text(text)
    record = seal(staging.folder, name)
    Manifest({name: record}, world_size=1).write(staging.folder)


def save(target: Path, text: str, name: str = "optimizer.bin") -> None:
    staging = plan_staging_folder(target)
    staging.open()
    try:
        fill(staging, text, name)
        staging.publish()
    finally:
        staging.discard()


def content(target: Path) -> str:
    assert manifest.problems(target, manifest.read(target), deep=True) == []
    return (target / "optimizer.bin").read_text()


def test_a_new_folder_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "checkpoint"
    staging = plan_staging_folder(target)
    staging.open()
    fill(staging, "new")
    assert not target.exists()
    staging.publish()
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
        plan_staging_folder(tmp_path / "file" / "checkpoint").open()


def unable_to_swap(*paths: Path) -> None:
    raise OSError(22, "Invalid argument")


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
            staging = plan_staging_folder(target)
            staging.open()
            fill(staging, "new")
            staging.publish()
    except (OSError, Crash, CheckpointError):
        return "failed"
    return "saved"


@pytest.mark.parametrize("swaps", [True, False])
def test_every_fault_leaves_the_old_or_the_new_one(
    faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    if not swaps:
        monkeypatch.setattr(folder, "swap", unable_to_swap)
    calls = calls_of_a_save(faults, tmp_path / "count")
    assert calls >= 7
    for n in range(1, calls + 1):
        target = tmp_path / f"checkpoint{n}"
        save(target, "old")
        faults.left = n
        outcome = attempt(faults, target)
        faults.left = 10**9
        services.of_process(temporary._FoldersInUse).clear()  # the process that crashed needs nothing
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
        services.of_process(temporary._FoldersInUse).clear()  # the process that crashed needs nothing
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
def test_unusual_names_of_checkpoints(tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    save(target, "old")
    save(target, "new")
    os.rename(target, tmp_path / f".{name}.{temporary.OLD}-otherhost-1-0x0")
    recover(target)
    assert content(target) == "new"
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("letter", ["x", "ü", "漢"])
@pytest.mark.parametrize("inside", [True, False])
def test_long_names_can_be_saved_to_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letter: str, inside: bool
) -> None:
    name = letter * (240 // len(letter.encode()))
    monkeypatch.setattr(folder, "_has_mount_point", lambda path: inside)
    for text in ("first", "second", "third"):
        save(tmp_path / name, text)
    assert content(tmp_path / name) == "third"
    assert os.listdir(tmp_path) == [name]


def test_a_checkpoint_with_a_long_name_is_recovered_after_a_crash(tmp_path: Path) -> None:
    target = tmp_path / ("x" * 240)
    save(target, "old")
    os.rename(target, temporary.claim(target.name, tmp_path, temporary.OLD))
    services.of_process(temporary._FoldersInUse).clear()
    folder.recover_all(tmp_path)  # the name is not known here
    assert not target.exists()
    recover(target)
    assert content(target) == "old"


def test_a_complete_checkpoint_exists_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, seen = tmp_path / "checkpoint", []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def look(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            seen.append(content(target))
            return result

        return look

    save(target, "old")
    for owner, name in ((os, "rename"), (folder, "swap")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    save(target, "new")
    assert seen[0] == "old"
    assert seen[-1] == "new"
    assert len(seen) == 3


def test_folders_left_aside_by_a_swap_are_removed_and_not_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "checkpoint"
    save(target, "old")
    (target / "mine.txt").write_text("mine")

    def crash(*args: Any) -> None:
        raise Crash

    monkeypatch.setattr(folder, "clear_aside", crash)
    with pytest.raises(Crash):
        save(target, "new")
    monkeypatch.undo()
    services.of_process(temporary._FoldersInUse).clear()
    assert len(os.listdir(tmp_path)) == 2
    recover(target)
    assert content(target) == "new"
    assert (target / "mine.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("swaps", [True, False])
def test_a_recovered_checkpoint_has_another_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    if not swaps:
        monkeypatch.setattr(folder, "swap", unable_to_swap)
    target = tmp_path / "checkpoint"
    save(target, "old")
    stamp, sync = manifest.stamp(target), folder.sync_folder

    def fail(path: Path) -> None:
        if path == tmp_path:
            raise OSError(5, "Input/output error")
        sync(path)

    monkeypatch.setattr(folder, "sync_folder", fail)
    with pytest.raises(OSError, match="Input/output error"):
        save(target, "new")
    assert content(target) == "old"
    assert manifest.stamp(target) != stamp


def test_a_file_of_the_user_does_not_overwrite_one_of_the_new_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    save(target, "old", "scheduler.bin")
    (target / "optimizer.bin").write_text("mine")  # the old checkpoint has no such file
    save(target, "new")
    assert content(target) == "new"


def test_recent_folders_of_another_machine_stay(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    save(target, "new")
    aside = tmp_path / f".checkpoint.{temporary.OLD}-other-host-7-1x0"
    aside.mkdir()
    recover(target)
    assert aside.exists()
    long_ago = time.time() - temporary.SECONDS_TO_KEEP_OF_OTHER_NODES - 1
    os.utime(aside, (long_ago, long_ago))
    recover(target)
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert content(target) == "new"


@pytest.mark.usefixtures("in_place")
def test_a_folder_that_has_a_manifest_has_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, replace, moved = tmp_path / "checkpoint", os.replace, []

    def look(old: Any, new: Any) -> None:
        replace(old, new)
        moved.append(Path(new).name)
        arrived = Path(new).parent
        if (arrived / manifest.NAME).exists():
            assert manifest.problems(arrived, manifest.read(arrived), deep=True) == []

    save(target, "old", "scheduler.bin")
    monkeypatch.setattr(os, "replace", look)
    save(target, "new", "zoo.bin")
    moves = [name for name in moved if name.endswith((".bin", manifest.NAME))]
    assert moves == ["zoo.bin", manifest.NAME] or moves[-4:] == [
        "scheduler.bin",
        manifest.NAME,
        "zoo.bin",
        manifest.NAME,
    ]


# Folders that cannot be renamed


def rename_but_not(folder: Path) -> Callable[..., None]:
    """Refuse to rename one folder, as overlayfs does where it comes from a lower layer."""
    rename = os.rename

    def refuse(old: Any, new: Any) -> None:
        if Path(old) == folder:
            raise OSError(18, "Invalid cross-device link", str(old))
        rename(old, new)

    return refuse


def test_a_folder_that_cannot_be_renamed_is_replaced_file_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "checkpoint"
    save(target, "old", "scheduler.bin")
    (target / "mine.txt").write_text("mine")
    monkeypatch.setattr(os, "rename", rename_but_not(target))
    monkeypatch.setattr(folder, "swap", unable_to_swap)
    for text in ("new", "newer"):
        save(target, text)
        assert content(target) == text
        assert sorted(os.listdir(target)) == ["manifest.json", "mine.txt", "optimizer.bin"]
    assert os.listdir(tmp_path) == ["checkpoint"]
    remove(target)
    assert os.listdir(tmp_path) == []


LAYERS = """
set -e
cd "$1"
mkdir layers merged
mount -t tmpfs none layers
mkdir layers/upper layers/work
mount -t overlay overlay -o lowerdir=lower,upperdir=layers/upper,workdir=layers/work merged
exec "$2" -c "$3"
"""
IN_LAYERS = """
from pathlib import Path
from accelerate.checkpointing import folder, manifest
from accelerate.checkpointing import Manifest, seal
import os, sys
target = Path("merged/checkpoint")
try:
    os.rename(target, "merged/other")
    sys.exit("overlayfs renames folders of its lower layer here")
except OSError as error:
    assert error.errno == 18, error
for text in ("new", "newer"):
    staging = folder.plan_staging_folder(target)
    staging.open()
    (staging.folder / "optimizer.bin").write_text(text)
    Manifest({"optimizer.bin": seal(staging.folder, "optimizer.bin")}, 1).write(staging.folder)
    staging.publish()
    staging.discard()
    assert manifest.problems(target, manifest.read(target), deep=True) == []
    assert (target / "optimizer.bin").read_text() == text
    assert sorted(os.listdir(target)) == ["manifest.json", "mine.txt", "optimizer.bin"]
folder.remove(target)
assert os.listdir("merged") == []
print("replaced")
"""


def can_mount() -> bool:
    unshare = shutil.which("unshare")
    words = [unshare, "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    return unshare is not None and subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="this process may not mount file systems")
def test_a_folder_of_a_lower_layer_of_overlayfs_is_replaced(tmp_path: Path) -> None:
    save(tmp_path / "lower" / "checkpoint", "old", "scheduler.bin")
    (tmp_path / "lower" / "checkpoint" / "mine.txt").write_text("mine")
    words = ["unshare", "-m", "bash", "-c", LAYERS, "bash", str(tmp_path), sys.executable, IN_LAYERS]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "replaced\n"), done.stderr
    assert content_of_old(tmp_path / "lower" / "checkpoint") == "old"


def content_of_old(target: Path) -> str:
    assert manifest.problems(target, manifest.read(target), deep=True) == []
    return (target / "scheduler.bin").read_text()


# Two processes


@contextmanager
def another_process(target: Path) -> Iterator[int]:
    """Let another process be in the middle of a save."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        plan_staging_folder(target).open()
        os.write(writer, b"x")
        while True:
            time.sleep(1)
    os.read(reader, 1)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("exists", [True, False])
def test_a_second_writer_raises_an_error_that_names_the_first(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "checkpoint"
    if exists:
        save(target, "old")
    with another_process(target) as pid:
        with pytest.raises(
            CheckpointError, match=rf"process {pid} on .*, since 20\d\d-.*use a separate folder"
        ) as error:
            save(target, "new")
        assert "is being written by another process" in str(error.value)
        assert len(os.listdir(tmp_path)) == 1 + exists
        save(tmp_path / "other", "new")
    save(target, "newer")  # that process was killed
    assert content(target) == "newer"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "other"]


def test_a_second_writer_to_a_mount_point_raises_an_error_that_names_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "checkpoint"
    save(target, "old")
    with monkeypatch.context() as patch:
        patch.setattr(folder, "_has_mount_point", lambda path: True)
        with another_process(target) as pid:
            patch.undo()  # to this process it is no mount
            with pytest.raises(CheckpointError, match=f"process {pid} on "):
                save(target, "new")
    save(target, "newer")
    assert sorted(os.listdir(target)) == ["manifest.json", "optimizer.bin"]


def test_a_writer_on_another_machine_blocks_a_save_while_it_writes(tmp_path: Path) -> None:
    left = tmp_path / ".checkpoint.saving-other-host-7-1x0"
    left.mkdir()
    with pytest.raises(CheckpointError, match="process 7 on other-host. Runs"):
        save(tmp_path / "checkpoint", "new")
    os.utime(left, (time.time() - 61, time.time() - 61))
    save(tmp_path / "checkpoint", "new")
    assert content(tmp_path / "checkpoint") == "new"


def test_saves_of_one_process_do_not_hinder_each_other(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    first, second = plan_staging_folder(target), plan_staging_folder(target)
    for each, text in ((first, "first"), (second, "second")):
        each.open()
        fill(each, text)
    for each in (second, first):
        each.publish()
        each.discard()
    assert content(target) == "first"
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_of_processes_that_start_a_save_together_one_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, rival = [], tmp_path / ".checkpoint.saving-other-host-7-1x0"
    writers = folder._writers

    def look(target: Path) -> list[temporary.HiddenFolder]:
        looks.append(target)
        if len(looks) == 2:  # both have looked, and now both have made their folders
            rival.mkdir()
        found = writers(target)
        if len(looks) == 2:  # and the other gives up
            rival.rmdir()
        return found

    monkeypatch.setattr(folder, "_writers", look)
    save(tmp_path / "checkpoint", "new")
    assert len(looks) == 4
    assert content(tmp_path / "checkpoint") == "new"


# Names that lead out of the folder


def outside(tmp_path: Path) -> Path:
    """A folder of the user with a file that a hostile checkpoint wants to have."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "weights.distcp").write_text("mine")
    return place


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_has_mount_point", lambda path: True)


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("name", ["../outside/weights.distcp", "/outside/weights.distcp"])
def test_a_malicious_manifest_moves_no_file_outside_the_checkpoint(tmp_path: Path, name: str) -> None:
    mine, target = outside(tmp_path), tmp_path / "checkpoint"
    save(target, "old")
    name = name.replace("/outside", str(mine)) if name.startswith("/") else name
    content_of = {
        **vars(manifest.read(target)),
        "files": {name: {"size": 4, "checksum": "0" * 16, "rank": 0}},
    }
    sealed = {**content_of, manifest._SEAL: manifest._seal_of(content_of)}
    (target / manifest.NAME).write_text(json.dumps(sealed))
    save(target, "new")
    assert content(target) == "new"
    assert (mine / "weights.distcp").read_text() == "mine"


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_link_out_of_a_checkpoint_moves_no_file_outside_it(tmp_path: Path, has_manifest: bool) -> None:
    mine, target = outside(tmp_path), tmp_path / "checkpoint"
    target.mkdir()
    (target / "pytorch_model_fsdp_0").symlink_to(mine)
    name = "pytorch_model_fsdp_0/weights.distcp"
    if has_manifest:
        Manifest({name: seal(target, name)}, world_size=1).write(target)
    save(target, "new")
    assert content(target) == "new"
    with pytest.raises(CheckpointError, match="leads out of .*Remove that link"):
        save_shards(target)
    assert content(target) == "new"
    assert (mine / "weights.distcp").read_text() == "mine"
    assert os.listdir(mine) == ["weights.distcp"]


def save_shards(target: Path) -> None:
    staging = plan_staging_folder(target)
    staging.open()
    try:
        (staging.folder / "pytorch_model_fsdp_0").mkdir()
        fill(staging, "new", "pytorch_model_fsdp_0/weights.distcp")
        staging.publish()
    finally:
        staging.discard()


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


def test_a_save_succeeds_when_the_old_checkpoint_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "checkpoint"
    save(target, "old")

    def fail(*args: Any) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(temporary, "dispose", fail)
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

    monkeypatch.setattr(temporary.shutil, "rmtree", crash)
    with pytest.raises(Crash):
        remove(target)
    assert not target.exists()


def test_a_swap_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError, match="'b'|/b'"):
        folder.swap(tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr(folder, "_renameat2", None)
    with pytest.raises(OSError, match="not implemented"):
        folder.swap(tmp_path / "a", tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
