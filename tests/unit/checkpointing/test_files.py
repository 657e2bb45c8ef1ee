"""Files that lie on the disk, with their sizes and checksums."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from accelerate.base import sync_folder
from accelerate.checkpointing import files_under, folder, manifest, measure, seal


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


def test_two_folders_swap_their_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"was {name}").touch()
    folder.swap(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "was b").exists()
    assert (tmp_path / "b" / "was a").exists()


def test_a_swap_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError, match="'b'|/b'"):
        folder.swap(tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr(folder, "_renameat2", None)
    with pytest.raises(OSError, match="not implemented"):
        folder.swap(tmp_path / "a", tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
