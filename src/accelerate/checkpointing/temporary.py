"""Hidden folders beside a checkpoint: what is being written, was moved aside, or is being deleted.

Their names tell which process made them, so that what a dead process left is distinct from what a running one
needs.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from accelerate.checkpointing.manifest import checksum_of
from accelerate.state import services

logger = logging.getLogger(__name__)  # also used where no run is set up

SAVING, OLD, DOOMED = "saving", "old", "deleting"
SECONDS_TO_KEEP_FROM_OTHER_MACHINES = 3600.0  # after its last change
SECONDS_OF_A_RUNNING_SAVE = 60.0  # after the last change of another machine: its save counts as running
LONGEST_NAME = 96  # bytes of a name that is used whole: file systems take 255, and the rest needs its part
BYTES_OF_A_LONG_NAME = 60
_SHORTENED = re.compile(r".+~[0-9a-f]{16}", re.DOTALL)
_PATTERN = re.compile(rf"\.(.+)\.({SAVING}|{OLD}|{DOOMED})-(.+)-([0-9]{{1,9}})-(\w+)", re.DOTALL)


class _Needed(set[str]):
    """Names of the hidden folders that this process needs."""


@dataclass(frozen=True)
class HiddenFolder:
    path: Path
    name: str  # of the folder that it shall be, or was, as `spell` gives it
    kind: str
    host: str
    pid: int
    birth: str  # when that process began; another process of the same number has another one
    since: int  # when it was made, in seconds since 1970; 0 where the name does not contain it

    @property
    def has_whole_name(self) -> bool:
        """Whether `name` is that of the folder, and not the beginning of a long one."""
        return not _SHORTENED.fullmatch(self.name)

    def belongs_to(self, name: str) -> bool:
        """Whether it shall be, or was, the folder of a name."""
        return self.name in (name, spell(name))

    @property
    def is_needed(self) -> bool:
        """Whether the process that made it may still need it."""
        if self.host != socket.gethostname():
            return _seconds_unchanged(self.path) < SECONDS_TO_KEEP_FROM_OTHER_MACHINES
        if self.pid == os.getpid():
            return self.path.name in services.of_process(_Needed)
        # A process whose exit code the parent has not read yet has ended.
        runs = psutil.pid_exists(self.pid) and _facts_of(self.pid)[:1] not in (["Z"], ["X"])
        return runs and birth_of(self.pid) in (self.birth, "")

    @property
    def is_in_use(self) -> bool:
        """Whether the process that made it is at work with it, as far as can be seen."""
        if self.host != socket.gethostname():
            return _seconds_unchanged(self.path) < SECONDS_OF_A_RUNNING_SAVE
        return self.is_needed

    @property
    def is_own(self) -> bool:
        return self.host == socket.gethostname() and self.pid == os.getpid()


def claim(name: str, parent: Path, kind: str) -> Path:
    """Choose a path that no other folder has, and need it until `release`; nothing is made."""
    mark = f"{birth_of(os.getpid())}x{services.next_number('hidden folders')}x{int(time.time())}"
    path = parent / f".{spell(name)}.{kind}-{socket.gethostname()}-{os.getpid()}-{mark}"
    services.of_process(_Needed).add(path.name)
    return path


def spell(name: str) -> str:
    """Return a name as it is written in hidden names.

    Of one that is long or not printable: its beginning with other characters replaced, and a checksum.
    """
    whole = os.fsencode(name)
    if len(whole) <= LONGEST_NAME and name.isprintable():
        return name
    start = "".join(letter if letter.isprintable() else "_" for letter in name[:BYTES_OF_A_LONG_NAME])
    while len(os.fsencode(start)) > BYTES_OF_A_LONG_NAME:
        start = start[:-1]
    return f"{start}~{checksum_of(whole)}"


def release(path: Path) -> None:
    """Need a folder no longer: what is left of it is anybody's to remove."""
    services.of_process(_Needed).discard(path.name)


def is_hidden(name: str) -> bool:
    """Return whether a folder of this name is one that a save has made for itself."""
    return bool(_PATTERN.fullmatch(name))


def find(parent: Path, *kinds: str) -> list[HiddenFolder]:
    """Return the hidden folders of some kinds, sorted by name; a parent that cannot be read has none."""
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return []
    matches = ((parent / name, _PATTERN.fullmatch(name)) for name in names)
    return [
        _read_name(path, match)
        for path, match in matches
        if match and match[2] in kinds and path.is_dir() and not path.is_symlink()
    ]


def _read_name(path: Path, match: re.Match[str]) -> HiddenFolder:
    birth, _, rest = match[5].partition("x")
    since = rest.rpartition("x")[2] if "x" in rest else ""
    seconds = int(since) if since.isascii() and since.isdigit() and len(since) < 12 else 0
    return HiddenFolder(path, match[1], match[2], match[3], int(match[4]), birth, seconds)


def sweep(parent: Path) -> None:
    """Remove what interrupted saves have left in a folder."""
    for left in find(parent, SAVING, DOOMED):
        if not left.is_needed:
            shutil.rmtree(left.path, ignore_errors=True)


def dispose(folder: Path, name: str) -> None:
    """Remove a folder, or the link alone; the next save deletes what cannot be deleted now."""
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
    """Return when a process began: in ticks since the system did; without /proc, in ms since 1970."""
    facts = _facts_of(pid)
    if len(facts) > 19:
        return facts[19]
    try:
        return str(round(psutil.Process(pid).create_time() * 1000))
    except psutil.Error:
        return ""


def _facts_of(pid: int) -> list[str]:
    """Return what Linux tells of a process behind its name: first its state."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def _seconds_unchanged(folder: Path) -> float:
    try:
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:  # something was just removed, or is not ours to look at
        return 0.0
