"""Files that lie safely on the disk, each with its size and checksum."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ALGORITHM = "xxh3_64"
_UNKNOWN = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # what file systems answer that have no such thing
_STRIDE = 1 << 22  # bytes hashed at a time, without holding the interpreter


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        name: path inside the folder, with `/`.
        size: in bytes.
        checksum: xxh3 of the content, 64 bits, in hexadecimal.
        rank: process that wrote it.
    """

    name: str
    size: int
    checksum: str
    rank: int = 0


def seal(folder: Path, name: str, rank: int = 0) -> FileRecord:
    """Bring a written file to the disk and describe it.

    Args:
        folder: the checkpoint.
        name: path of the file in it.
        rank: process that wrote it.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(folder / name, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    size, checksum = measure(folder / name)
    return FileRecord(name, size, checksum, rank)


def measure(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the checksum of a file."""
    import xxhash

    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size:
            with (
                mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped,
                memoryview(mapped) as view,
            ):
                for start in range(0, size, _STRIDE):
                    with view[start : start + _STRIDE] as part:
                        digest.update(part)
    return size, digest.hexdigest()


def checksum_of(data: bytes) -> str:
    """Return the checksum of bytes in memory."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(data)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, as far as its file system knows how to.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small file and bring it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def files_under(folder: Path) -> Iterator[str]:
    """Yield the paths of all files in a folder and the folders in it, sorted, relative and with `/`."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix()
