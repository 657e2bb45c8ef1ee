"""Temporary folder of a launch, in which processes record their failures.

A launcher holds a lock on a file in its folder. The next launch removes folders whose launcher was killed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import IO

PREFIX = "accelerate-launch-"
LOCK = "launcher.lock"


def open_folder() -> tuple[Path, IO[bytes]]:
    """Returns a new folder and its locked file, which stays open during the launch."""
    root = Path(tempfile.gettempdir())
    for path in root.glob(f"{PREFIX}*/{LOCK}"):
        _remove_abandoned(path)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    file = (folder / LOCK).open("wb")
    _lock(file)
    return folder, file


def keep(folder: Path) -> None:
    """Keeps a folder after the launch."""
    (folder / LOCK).unlink()


def _remove_abandoned(path: Path) -> None:
    """Removes the folder of a lock that no process holds."""
    try:
        with path.open("ab") as file:
            if _lock(file):
                shutil.rmtree(path.parent, ignore_errors=True)
    except OSError:  # that of another user, or removed meanwhile
        return


def _lock(file: IO[bytes]) -> bool:
    """Returns whether this process holds the lock of a file now, which it never does on Windows."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return sys.platform != "win32"
