"""Hidden folders beside a checkpoint: what is being written, was moved aside, or is being deleted.

Their names tell which process made them, so that what a dead one has left is told from what a living one
needs.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)  # also used where no run is set up

SAVING, OLD, DOOMED = "saving", "old", "deleting"
SECONDS_TO_KEEP_STRANGERS = 3600.0  # since another machine wrote to one
LETTERS_SHOWN = 40  # of a long name; only what is brought back needs all of them
_PATTERN = re.compile(rf"\.(.+)\.({SAVING}|{OLD}|{DOOMED})-(.+)-(\d+)-(\w+)", re.DOTALL)
_count = itertools.count()
_needed: set[str] = set()


@dataclass(frozen=True)
class Hidden:
    """One hidden folder.

    Attributes:
        path: the folder.
        name: of the folder that it shall be, or was.
        kind: what it is for.
        host: machine of the process that made it.
        pid: that process.
        birth: when that process began, so that another one of the same number is told from it.
    """

    path: Path
    name: str
    kind: str
    host: str
    pid: int
    birth: str

    @property
    def is_needed(self) -> bool:
        """Whether the process that made it may still need it."""
        if self.host != socket.gethostname():
            return _seconds_unchanged(self.path) < SECONDS_TO_KEEP_STRANGERS
        if self.pid == os.getpid():
            return self.path.name in _needed
        return psutil.pid_exists(self.pid) and birth_of(self.pid) in (self.birth, "")


def claim(name: str, parent: Path, kind: str) -> Path:
    """Choose a path that no other folder has, and need it until `release`; nothing is made.

    Args:
        name: of the folder that it shall be, or was.
        parent: where it lies.
        kind: what it is for.
    """
    shown = name if kind == OLD else name[:LETTERS_SHOWN]
    mark = f"{birth_of(os.getpid())}x{next(_count)}"
    path = parent / f".{shown}.{kind}-{socket.gethostname()}-{os.getpid()}-{mark}"
    _needed.add(path.name)
    return path


def release(path: Path) -> None:
    """Need a folder no longer: what is left of it is anybody's to remove."""
    _needed.discard(path.name)


def find(parent: Path, *kinds: str) -> list[Hidden]:
    """Return the hidden folders of some kinds, sorted by name; a parent that cannot be read has none."""
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return []
    found = ((parent / name, _PATTERN.fullmatch(name)) for name in names)
    every = [
        Hidden(path, match[1], match[2], match[3], int(match[4]), match[5].partition("x")[0])
        for path, match in found
        if match and path.is_dir()
    ]
    return [each for each in every if each.kind in kinds]


def sweep(parent: Path) -> None:
    """Remove what interrupted saves have left in a folder."""
    for left in find(parent, SAVING, DOOMED):
        if not left.is_needed:
            shutil.rmtree(left.path, ignore_errors=True)


def dispose(folder: Path, name: str) -> None:
    """Remove a folder: it is gone at once, and what of it cannot be deleted now the next save deletes.

    Args:
        folder: what is removed; of a link, the link alone.
        name: what it was called.

    Raises:
        OSError: it is still there.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    doomed = claim(name, folder.parent, DOOMED)
    try:
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    finally:
        release(doomed)


def birth_of(pid: int) -> str:
    """Return when a process began, in ticks since the machine did; empty where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def _seconds_unchanged(folder: Path) -> float:
    try:
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:  # something was just removed, or is not ours to look at
        return 0.0
