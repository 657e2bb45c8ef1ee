"""Temporary files of ended processes are removed; those of running processes stay."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from accelerate.checkpointing import DELETING, OLD, SAVING, claim, dispose, find, release, sweep, temporary


def abandoned(parent: Path, kind: str, pid: int, birth: str = "1", host: str = socket.gethostname()) -> Path:
    path = parent / f".checkpoint.{kind}-{host}-{pid}-{birth}xleft"
    path.mkdir()
    (path / "part").write_text("")
    return path


def test_temporary_folders_of_ended_processes_are_removed(tmp_path: Path) -> None:
    dead = abandoned(tmp_path, SAVING, 2**22 - 1)
    doomed = abandoned(tmp_path, DELETING, 2**22 - 1)
    successor = abandoned(tmp_path, SAVING, os.getppid())  # another process of that number
    own = abandoned(tmp_path, SAVING, os.getpid(), temporary.start_time_of(os.getpid()))
    alive = abandoned(tmp_path, SAVING, os.getppid(), temporary.start_time_of(os.getppid()))
    old = abandoned(tmp_path, OLD, 2**22 - 1)
    sweep(tmp_path)
    assert not any(path.exists() for path in (dead, doomed, successor, own))
    assert alive.exists()
    assert old.exists()


def test_a_claimed_folder_stays_until_it_is_released(tmp_path: Path) -> None:
    path = claim("checkpoint", tmp_path, SAVING)
    path.mkdir()
    sweep(tmp_path)
    assert path.exists()
    release(path)
    sweep(tmp_path)
    assert not path.exists()


def test_temporary_folders_of_other_machines_stay_while_written(tmp_path: Path) -> None:
    foreign = abandoned(tmp_path, SAVING, 7, host="other-host")
    sweep(tmp_path)
    os.utime(foreign, (0, 0))
    sweep(tmp_path)
    assert foreign.exists()
    os.utime(foreign / "part", (0, 0))
    sweep(tmp_path)
    assert not foreign.exists()


@pytest.mark.parametrize(
    "name", [".mine.saving-box", ".x.saving-host-1", ".saving-host-1-0x0", "x.old-host-1-0x0"]
)
def test_folders_of_the_user_are_not_temporary(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert find(tmp_path, SAVING, OLD, DELETING) == []
    sweep(tmp_path)
    assert os.listdir(tmp_path) == [name]


def test_a_link_is_removed_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    dispose(tmp_path / "link", "link")
    dispose(tmp_path / "real", "real")
    assert os.listdir(tmp_path) == []


def test_a_zombie_process_counts_as_ended(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    while temporary._facts_of(pid)[0] != "Z":
        pass
    left = abandoned(tmp_path, SAVING, pid, temporary.start_time_of(pid))
    sweep(tmp_path)
    assert not left.exists()
    os.waitpid(pid, 0)


@pytest.mark.parametrize("letter", ["x", "ü", "漢"])
def test_names_of_any_length_fit(tmp_path: Path, letter: str) -> None:
    name = letter * (240 // len(letter.encode()))
    for kind in (SAVING, OLD, DELETING):
        path = claim(name, tmp_path, kind)
        path.mkdir()
        (found,) = find(tmp_path, kind)
        release(path)
        assert found.belongs_to(name)
        assert not found.belongs_to(name[:-1] + "y")
        assert not found.has_whole_name
        assert abs(found.since - time.time()) < 60


def test_a_link_with_a_hidden_name_is_not_temporary(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / ".x.old-otherhost-1-0x0").symlink_to("mine")
    (tmp_path / ".x.saving-otherhost-1-0x0").symlink_to("mine")
    assert find(tmp_path, OLD, SAVING) == []


def test_a_temporary_folder_of_another_machine_is_in_use_while_written(tmp_path: Path) -> None:
    foreign = abandoned(tmp_path, SAVING, 7, host="other-host")
    assert find(tmp_path, SAVING)[0].is_in_use
    for path in (foreign, foreign / "part"):
        os.utime(path, (time.time() - 61, time.time() - 61))
    (found,) = find(tmp_path, SAVING)
    assert not found.is_in_use
    assert found.is_needed


def test_without_proc_a_reused_pid_is_recognised_by_its_start_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temporary, "_facts_of", lambda pid: [])
    alive = abandoned(tmp_path, SAVING, os.getppid(), temporary.start_time_of(os.getppid()))
    reused = abandoned(tmp_path, SAVING, os.getppid(), "1")
    temporary.sweep(tmp_path)
    assert alive.exists()
    assert not reused.exists()
