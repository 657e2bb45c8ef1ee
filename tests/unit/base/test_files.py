"""Files are replaced as a whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accelerate.base import replace_files


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "first", tmp_path / "second"]
    for path in found:
        path.write_text("old")
    return found


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_files_take_their_names_when_all_are_written(paths: list[Path], tmp_path: Path) -> None:
    with replace_files(paths) as temporary:
        for path in temporary:
            path.write_text("new")
            assert path.parent == tmp_path
            assert path.name.startswith(".")
        assert [path.read_text() for path in paths] == ["old", "old"]
    assert contents(tmp_path) == {"first": "new", "second": "new"}


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_files_and_no_others(
    paths: list[Path], tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), replace_files(paths) as temporary:
        temporary[0].write_text("new")
        raise error
    assert contents(tmp_path) == {"first": "old", "second": "old"}


@pytest.mark.parametrize("sync", [True, False])
def test_the_content_is_on_the_disk_before_the_name(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda old, new: (calls.append("replace"), replace(old, new)))
    with replace_files(paths, sync=sync) as temporary:
        for path in temporary:
            path.write_text("new")
    assert calls == [*(["fsync"] * 2 if sync else []), "replace", "replace"]
