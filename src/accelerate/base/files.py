"""Replace files as a whole: a reader sees the old content or the new one, also after a crash."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What file systems answer that cannot sync a folder."""


@contextmanager
def replace_files(paths: Sequence[Path], *, sync: bool = True) -> Iterator[list[Path]]:
    """Write to temporary files in the block; each takes the name of its file when the block ends.

    If the block fails, the temporary files are removed and the files stay as they were.

    Args:
        paths: the files, in the order in which they are replaced; their folders exist.
        sync: whether the content is on the disk before a file takes its name. Only a file that is worth
            nothing after a crash does without.

    Yields:
        The temporary files, hidden and in the same folders.

    Raises:
        OSError: a file cannot be written or replaced.
    """
    temporary = [path.with_name(f".{path.name}.{os.getpid()}") for path in paths]
    try:
        yield temporary
        for path in temporary if sync else ():
            sync_file(path)
        for new, path in zip(temporary, paths, strict=True):
            os.replace(new, path)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Bring the content of a written file to the disk.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where its file system can.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
