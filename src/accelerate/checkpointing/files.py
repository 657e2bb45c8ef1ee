"""Files that lie safely on the disk, each with its size and checksum."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from accelerate.base import advance, sync_file

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
    sync_file(folder / name)
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
                        advance(len(part))
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


def swap(first: Path, second: Path) -> None:
    """Let two folders or files have each other's names: at no moment is either name without one.

    Raises:
        OSError: nothing was changed; the system or the file system may not be able to.
    """
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(first))
    paths = os.fsencode(first), os.fsencode(second)
    if _renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(first), None, str(second))


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _find_renameat2() -> Callable[..., int] | None:
    """Return Linux's call of that name; None on other systems, and where the C library is too old."""
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return cast("Callable[..., int] | None", call)


_renameat2 = _find_renameat2()


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
