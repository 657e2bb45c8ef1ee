"""Old Linux kernels, what process numbers belong to, and files that are replaced as a whole."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.base import (
    check_os_kernel,
    expanded,
    is_file,
    populate_pages,
    process_home,
    replace_files,
    system,
)


@pytest.mark.parametrize(
    ("system", "release", "warns"),
    [
        ("Linux", "5.4.0-150-generic", True),
        ("Linux", "4.19", True),
        ("Linux", "5.5.0", False),
        ("Linux", "6.1.0-13-amd64", False),
        ("Linux", "strange", False),
        ("Darwin", "4.0", False),
    ],
)
def test_old_kernels_are_warned_about(system, release, warns, monkeypatch, caplog):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    check_os_kernel()
    assert [release in record.getMessage() for record in caplog.records] == [True] * warns


@pytest.mark.skipif(platform.system() != "Linux", reason="only Linux has the call")
def test_pages_of_a_file_are_mapped_in_one_call(tmp_path):
    size = 512 * mmap.PAGESIZE
    (tmp_path / "weights").write_bytes(bytes(size))
    with (tmp_path / "weights").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    view = (ctypes.c_char * size).from_buffer(mapped)
    address = ctypes.addressof(view)
    if not populate_pages(address + 100, size - 100):
        pytest.skip("this kernel is older than 5.14")
    areas = Path("/proc/self/smaps").read_text().split(f"{address:x}-{address + size:x} ")[1]
    assert next(line for line in areas.splitlines() if line.startswith("Rss:")).split()[1] == str(
        size // 1024
    )


def test_populate_pages_returns_false_without_the_call(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    system._madvise.cache_clear()
    assert not populate_pages(mmap.PAGESIZE, 100)
    system._madvise.cache_clear()


@pytest.mark.skipif(platform.system() != "Linux", reason="only Linux tells")
def test_processes_of_one_machine_have_the_same_process_home():
    script = "from accelerate.base.system import process_home; print(process_home())"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process_home() == other.stdout.strip() != ""


def test_process_home_is_none_without_a_machine_id(monkeypatch):
    def fail(path, encoding):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", fail)
    assert process_home() is None


def test_paths_with_unknown_users_are_not_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/x") == Path("/home/me/x")
    assert expanded("~no-such-user/x") == Path("~no-such-user/x")
    assert expanded("~a\0b/x") == Path("~a\0b/x")


def test_is_file_is_true_for_files_only(tmp_path):
    (tmp_path / "file").touch()
    assert is_file(tmp_path / "file")
    assert not is_file(tmp_path)
    assert not is_file(tmp_path / "file" / "below")
    assert not is_file("a\0b")
    with pytest.raises(OSError, match="too long"):
        is_file("a" * 400)


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
