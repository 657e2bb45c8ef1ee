"""The machine without its devices: kernel, process numbers, paths, and files that are replaced as a whole."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import platform
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

# Processes that use many threads were seen to hang on kernels older than this one.
MINIMUM_LINUX_KERNEL = (5, 5, 0)

UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What file systems answer that cannot sync a folder."""

_MADV_POPULATE_READ = 22  # of Linux 5.14; the module mmap has no such name

_logger = logging.getLogger(__name__)


def check_os_kernel() -> None:
    """Warn, in the log, when the Linux kernel is older than 5.5; say nothing on other systems.

    To be called on one process of a machine: each process would say the same.
    """
    if platform.system() != "Linux":
        return
    release = platform.release()
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release)
    if match is None:
        return
    version = tuple(int(part or 0) for part in match.groups())
    if version >= MINIMUM_LINUX_KERNEL:
        return
    wanted = ".".join(map(str, MINIMUM_LINUX_KERNEL))
    _logger.warning(
        f"Linux kernel {release} is older than {wanted}, the oldest that is recommended: processes may hang. "
        f"Upgrade the kernel to {wanted} or newer."
    )


def process_home() -> str | None:
    """Return the run of this kernel and the container that process numbers belong to; None where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux, or /proc is not mounted
        return None


def populate_pages(address: int, size: int) -> bool:
    """Map all pages of a part of memory in one call, reading those of a file.

    Other threads of Python run meanwhile; `mmap.madvise` would stop them.

    Returns:
        Whether it is done; False where the system cannot.
    """
    advise = _madvise()
    start = address - address % mmap.PAGESIZE
    return advise is not None and advise(start, address + size - start, _MADV_POPULATE_READ) == 0


@cache
def _madvise() -> Any:
    if platform.system() != "Linux":
        return None
    import ctypes  # most commands do not need it

    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


def expanded(text: str | os.PathLike[str]) -> Path:
    """Return a path with a leading `~` replaced; where that home is unknown, it stays as it is."""
    try:
        return Path(os.path.expanduser(text))
    except ValueError:  # characters that no name of a user has
        return Path(text)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a file at a path; raise OSError where this process may not look."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: characters that no path has
        return False


@contextmanager
def replace_files(paths: Sequence[Path], *, sync: bool = True) -> Iterator[list[Path]]:
    """Yield temporary files to write to in the block; each takes the name of its file when the block ends.

    They are hidden and in the same folders, which exist. If the block fails, they are removed. `sync` brings
    the content to the disk before; only files that are worth nothing after a crash do without.
    """
    temporary = [path.with_name(f".{path.name}.{os.getpid()}") for path in paths]
    try:
        yield temporary
        for path in temporary if sync else ():
            sync_file(path)
        for new, path in zip(temporary, paths, strict=True):
            _replace(new, path)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def _replace(new: Path, path: Path) -> None:
    try:
        os.replace(new, path)
    except PermissionError as error:
        if sys.platform == "win32":
            reason = "a file that is open or mapped, as by a model with weights on disk, cannot be replaced"
            error.strerror = f"{reason}: close it, or write to another folder"
        raise


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where its file system can."""
    if sys.platform != "win32":  # which opens no folder
        sync_file(folder, UNSUPPORTED)


def sync_file(path: Path, ignored: tuple[int, ...] = ()) -> None:
    """Bring the content of a written file to the disk; error numbers in `ignored` are no errors."""
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)  # it has to be writable
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in ignored:
            raise
    finally:
        os.close(descriptor)
