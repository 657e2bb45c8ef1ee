"""Operating system functions for the kernel, process ids, paths, and atomic replacement of files."""

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

from accelerate.base.errors import wrong_value

# Processes with many threads can hang on older kernels.
MINIMUM_LINUX_KERNEL = (5, 5, 0)

LONGEST_NAME = 255
"""Bytes of the name of a file or folder, at most."""

UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""Error numbers of file systems that cannot sync a folder."""

_MADV_POPULATE_READ = 22  # added in Linux 5.14, missing in the module `mmap`

_logger = logging.getLogger(__name__)


def check_os_kernel() -> None:
    """Logs a warning when the Linux kernel is older than 5.5.

    Called on one process of each node, because each process would log the same.
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
    oldest = ".".join(map(str, MINIMUM_LINUX_KERNEL))
    _logger.warning(
        f"Linux kernel {release} is older than {oldest}, the oldest that is recommended: processes may hang. "
        f"Upgrade the kernel to {oldest} or newer."
    )


def process_home() -> str | None:
    """Returns the boot id and PID namespace that process ids belong to, or None where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux, or /proc is not mounted
        return None


def populate_pages(address: int, size: int) -> bool:
    """Maps all pages of a memory range in one call, and reads those of a file.

    Other Python threads run meanwhile, which they do not during `mmap.madvise`.

    Returns:
        Whether the pages are mapped. False where the system does not support it.
    """
    advise = _madvise()
    start = address - address % mmap.PAGESIZE
    return advise is not None and advise(start, address + size - start, _MADV_POPULATE_READ) == 0


@cache
def _madvise() -> Any:
    if platform.system() != "Linux":
        return None
    import ctypes  # slow to import, and most commands do not need it

    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


def expanded(text: str | os.PathLike[str]) -> Path:
    """Returns a path with a leading `~` expanded, or unchanged where the home folder is unknown."""
    try:
        return Path(os.path.expanduser(text))
    except ValueError:  # characters that no user name contains
        return Path(text)


def refuse_path(argument: str, path: str | os.PathLike[str]) -> None:
    """Raises an error for a path that no file system has.

    Raises:
        ConfigurationError: It is not a path, contains a NUL character or text without an encoding, or a part
            is too long.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise wrong_value(argument, path, "it is not a path", "Pass a string or a path", TypeError)
    text, fix = os.fsdecode(path), "choose another name"
    if "\0" in text:
        raise wrong_value(argument, text, "it contains a NUL character", fix)
    try:
        sizes = [len(os.fsencode(part)) for part in Path(text).parts]
    except UnicodeEncodeError as error:
        reason = f"it contains {text[error.start]!r}, which has no encoding"
        raise wrong_value(argument, text, reason, fix) from error
    if max(sizes, default=0) > LONGEST_NAME:
        reason = f"a part of it has {max(sizes)} bytes, and file systems take {LONGEST_NAME}"
        raise wrong_value(argument, text, reason, "choose a shorter name", OSError)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a file.

    Raises OSError where this process has no permission to check.
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # ValueError: characters that no path contains
        return False


@contextmanager
def replace_files(paths: Sequence[Path], *, sync: bool = True) -> Iterator[list[Path]]:
    """Yields temporary files that replace the given files when the block ends.

    They are hidden files in the same folders, which must exist. If the block fails, they are removed. `sync`
    flushes the content to disk first. Only files that are worthless after a crash do without.
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
    """Flushes the directory entries of a folder to disk, where the file system supports it."""
    if sys.platform != "win32":  # Windows cannot open a folder
        sync_file(folder, UNSUPPORTED)


def sync_file(path: Path, ignored: tuple[int, ...] = ()) -> None:
    """Flushes the content of a written file to disk.

    Error numbers in `ignored` are not raised.
    """
    # Windows requires write access
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in ignored:
            raise
    finally:
        os.close(descriptor)
