"""The folders of the records of runs: where they are, how they are found, and which are removed."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelerate.base import ConfigurationError, patch_environment
from accelerate.launch import new_run_id, run_id_of
from accelerate.monitoring import (
    RecordThread,
    RecordWriter,
    Values,
    find_records,
    find_runs,
    newest_run,
    records_folder,
    remove_old_runs,
    run_folders,
    state_folder,
)

DAY = 24 * 3600.0
NOW = 1_800_000_000.0


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """The folder of the runs of a user who has none yet."""
    with patch_environment(XDG_STATE_HOME=str(tmp_path / "state")):
        yield tmp_path / "state" / "accelerate" / "runs"


def write(folder: Path | None, size: int = 1, age: float = 0.0) -> Path:
    """Writes a run of a size in bytes, whose last record has an age in seconds."""
    assert folder is not None
    folder.mkdir(parents=True)
    path = folder / "rank-00000.jsonl"
    path.write_bytes(b"\n" * size)
    os.utime(path, (NOW - age, NOW - age))
    return folder


def run_name(number: int) -> str:
    return f"20260101-{number:06}-0123abcd"


def test_the_state_folder_of_each_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(tmp_path)
    expected = {
        ("Linux", "", ""): ".local/state",
        ("Linux", "relative", ""): ".local/state",
        ("Linux", f"{home}/own", ""): "own",
        ("Darwin", "", ""): "Library/Application Support",
        ("Darwin", f"{home}/own", ""): "own",
        ("Windows", "", ""): "AppData/Local",
        ("Windows", "", f"{home}/local"): "local",
    }
    wrong = {}
    for (system, state, local), below in expected.items():
        monkeypatch.setattr(platform, "system", lambda name=system: name)
        with patch_environment(HOME=home, USERPROFILE=home, XDG_STATE_HOME=state, LOCALAPPDATA=local):
            if (found := state_folder()) != tmp_path / below / "accelerate" / "runs":
                wrong[system, state, local] = found
    assert not wrong


def test_the_folder_of_records(runs: Path) -> None:
    run_id = new_run_id()
    project = runs / f"{run_id}-{run_folders._digest_of('run')}"
    expected = {
        (None, None): None,
        ("", None): None,
        (None, "run"): project,
        ("yes", "run"): project,
        ("YES", None): runs / run_id,
        ("other", "run"): Path("other"),
        ("other", None): Path("other"),
        ("no", "run"): None,
    }
    assert {key: records_folder(*key, run_id) for key in expected} == expected


def test_an_identifier_names_no_other_path() -> None:
    assert run_id_of({"ACCELERATE_RUN_ID": run_name(1)}) == run_name(1)
    for name in ("", "../x", f"{run_name(1)}/..", f"{run_name(1)}\n", "x"):
        assert run_id_of({"ACCELERATE_RUN_ID": name}) is None


def test_runs_are_found_by_their_project_and_the_newest_without_one(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no run is recorded in .*project_dir"):
        newest_run()
    first, second = tmp_path / "first", tmp_path / "second"
    written = [
        write(records_folder(None, project, run_name(number)))
        for number, project in enumerate([first, second, first, None], 1)
        if project is not None
    ]
    (runs / run_name(9)).mkdir()  # a run that has not written a record
    write(runs / "notes")
    assert newest_run() == written[-1]
    assert find_runs(first) == [written[2], written[0]]
    assert [records.path.parent for records in find_records(second)] == [written[1]]
    link = tmp_path / "link"
    link.symlink_to(second)
    assert find_runs(link) == [written[1]]


def test_the_records_in_a_folder_itself_are_used_unless_a_run_is_newer(runs: Path, tmp_path: Path) -> None:
    own = write(tmp_path / "project" / "run_records", age=50.0)
    recorded = write(records_folder(None, tmp_path / "project", run_name(1)), age=100.0)
    assert find_records(tmp_path / "project")[0].path.parent == own
    os.utime(recorded / "rank-00000.jsonl", (NOW, NOW))
    assert find_records(tmp_path / "project")[0].path.parent == recorded


def test_runs_of_the_same_second_have_different_folders() -> None:
    assert len({new_run_id() for _ in range(50)}) == 50


def test_the_oldest_runs_are_removed_by_number_and_bytes(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folders, "MAX_RUNS", 5)
    monkeypatch.setattr(run_folders, "MAX_BYTES", 100)
    for number in range(8):
        write(runs / run_name(number), age=2 * DAY)
    remove_old_runs(NOW)
    assert sorted(os.listdir(runs)) == [run_name(number) for number in range(3, 8)]
    write(runs / run_name(8), size=97)
    remove_old_runs(NOW)
    assert sorted(os.listdir(runs)) == [run_name(number) for number in range(5, 9)]


def test_active_runs_and_other_files_are_kept(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folders, "MAX_RUNS", 0)
    write(runs / run_name(1), age=DAY / 2)
    with_page = write(runs / run_name(2), age=2 * DAY)
    (with_page / "report.html").write_text("a page")
    write(runs / "notes", age=2 * DAY)
    remove_old_runs(NOW)
    assert sorted(os.listdir(runs)) == [run_name(1), run_name(2), "notes"]
    assert os.listdir(with_page) == ["report.html"]
    assert os.listdir(runs / "notes") == ["rank-00000.jsonl"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_only_the_user_can_read_the_folder_of_a_run(runs: Path) -> None:
    thread = RecordThread(runs / run_name(1), 0, in_state_folder=True, removes_old=True)
    thread.put(Values(time=1.0, step=1, values={}))
    thread.close()
    for folder in (runs.parent, runs / run_name(1)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(find_records(runs / run_name(1))) == 1


def test_a_named_folder_is_created_with_the_permissions_of_the_user(runs: Path, tmp_path: Path) -> None:
    RecordWriter(tmp_path / "named", 0).close()
    (tmp_path / "other").mkdir()
    assert (tmp_path / "named").stat().st_mode == (tmp_path / "other").stat().st_mode
