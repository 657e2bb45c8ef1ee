"""Numbered checkpoints: which is the newest, which are deleted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from accelerate.checkpointing import Manifest, manifest, retention


def make(parent: Path, *numbers: int, complete: bool = True) -> None:
    for number in numbers:
        path = parent / retention.name_of(number)
        path.mkdir()
        if complete:
            Manifest({}, world_size=1, iteration=number).write(path)


def numbers(parent: Path) -> list[int]:
    return [each.number for each in retention.survey(parent)]


def test_the_newest_comes_first_by_number_and_not_by_text(tmp_path: Path) -> None:
    make(tmp_path, 2, 10, 9)
    (tmp_path / "checkpoint_old").mkdir()
    (tmp_path / "checkpoint_11").write_text("a file")
    assert numbers(tmp_path) == [10, 9, 2]


def test_a_folder_that_is_not_there_holds_none(tmp_path: Path) -> None:
    assert retention.survey(tmp_path / "nothing") == []


def test_incomplete_ones_say_why(tmp_path: Path) -> None:
    make(tmp_path, 1)
    make(tmp_path, 2, complete=False)
    newest, older = retention.survey(tmp_path)
    assert newest.manifest is None
    assert "there is no manifest.json" in newest.fault
    assert older.manifest is not None
    assert older.fault == ""


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (3, [5, 4, 3]), (9, [5, 4, 3, 2, 1])])
def test_the_oldest_go(tmp_path: Path, keep: int, left: list[int]) -> None:
    make(tmp_path, 1, 2, 3, 4, 5)
    gone = retention.prune(tmp_path, keep)
    assert numbers(tmp_path) == left
    assert [path.name for path in gone] == [f"checkpoint_{n}" for n in range(1, 6) if n not in left]


def test_the_newest_complete_one_always_stays(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    make(tmp_path, 3, 4, complete=False)
    retention.prune(tmp_path, 1)
    assert numbers(tmp_path) == [4, 2]


def test_numbers_that_other_processes_write_are_taken(tmp_path: Path) -> None:
    make(tmp_path, 1)
    (tmp_path / ".checkpoint_4.saving-elsewhere-1-0x0").mkdir()
    (tmp_path / ".checkpoint_5.saving-elsewhere-1-0x0").mkdir()
    os.utime(tmp_path / ".checkpoint_5.saving-elsewhere-1-0x0", (0, 0))
    assert retention.taken_numbers(tmp_path) == {1, 4}


def test_one_that_is_replaced_while_it_is_compared_is_compared_again(
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
    read, fault = retention.look_at(tmp_path / "checkpoint_1", deep=True)
    assert fault == ""
    assert read is not None
    assert read.world_size == 2


def test_a_replacement_that_was_interrupted_is_undone_first(tmp_path: Path) -> None:
    make(tmp_path, 7)
    (tmp_path / "checkpoint_7").rename(tmp_path / ".checkpoint_7.old-elsewhere-1-0")
    assert numbers(tmp_path) == [7]
    assert (tmp_path / "checkpoint_7" / manifest.NAME).is_file()
