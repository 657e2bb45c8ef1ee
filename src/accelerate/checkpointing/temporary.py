"""Hidden folders beside a checkpoint, which is being written, was moved aside, or is being deleted.

Their names contain the host, pid and start time of the process that created them. So a save can remove the
folders of an ended process and keep those of a running one. `folder.py` creates, renames and recovers them.
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

SAVING, OLD, DELETING = "saving", "old", "deleting"
SECONDS_TO_KEEP_OF_OTHER_NODES = 3600.0  # after the last change
SECONDS_OF_A_RUNNING_SAVE = 60.0  # after the last change by another node, for which its save is running
MAX_NAME_BYTES = 96  # longer names are shortened, since file systems allow 255 bytes for all parts
SHORTENED_NAME_BYTES = 60
_SHORTENED = re.compile(r".+~[0-9a-f]{16}", re.DOTALL)
_PATTERN = re.compile(rf"\.(.+)\.({SAVING}|{OLD}|{DELETING})-(.+)-([0-9]{{1,9}})-(\w+)", re.DOTALL)


class _FoldersInUse(set[str]):
    """Names of the hidden folders that this process uses."""


@dataclass(frozen=True)
class HiddenFolder:
    """Facts in the name of a hidden folder."""

    path: Path
    name: str  # of the checkpoint folder, encoded by `encode_name`
    kind: str
    host: str
    pid: int
    start_time: str  # of the process, which differs from that of another process with the same pid
    since: int  # time of creation in seconds since 1970, or 0 if the name does not contain it

    @property
    def has_whole_name(self) -> bool:
        """True if `name` is the full name of the checkpoint folder, and not shortened."""
        return not _SHORTENED.fullmatch(self.name)

    def belongs_to(self, name: str) -> bool:
        """Returns whether it belongs to the checkpoint folder of a name."""
        return self.name in (name, encode_name(name))

    @property
    def is_needed(self) -> bool:
        """True if the process that created it may still use it."""
        if self.host != socket.gethostname():
            return _seconds_unchanged(self.path) < SECONDS_TO_KEEP_OF_OTHER_NODES
        if self.pid == os.getpid():
            return self.path.name in services.of_process(_FoldersInUse)
        # A zombie has ended.
        runs = psutil.pid_exists(self.pid) and _facts_of(self.pid)[:1] not in (["Z"], ["X"])
        return runs and start_time_of(self.pid) in (self.start_time, "")

    @property
    def is_in_use(self) -> bool:
        """True if the process that created it is working in it, as far as this node can detect."""
        if self.host != socket.gethostname():
            return _seconds_unchanged(self.path) < SECONDS_OF_A_RUNNING_SAVE
        return self.is_needed

    @property
    def is_own(self) -> bool:
        return self.host == socket.gethostname() and self.pid == os.getpid()


def claim(name: str, parent: Path, kind: str) -> Path:
    """Returns the path of a new folder, which is not created and counts as used until `release`."""
    mark = f"{start_time_of(os.getpid())}x{services.next_number('hidden folders')}x{int(time.time())}"
    path = parent / f".{encode_name(name)}.{kind}-{socket.gethostname()}-{os.getpid()}-{mark}"
    services.of_process(_FoldersInUse).add(path.name)
    return path


def encode_name(name: str) -> str:
    """Encodes the name of a checkpoint folder for the name of a hidden folder.

    A long name is shortened, characters that are not printable are replaced, and a checksum is added then.
    """
    whole = os.fsencode(name)
    if len(whole) <= MAX_NAME_BYTES and name.isprintable():
        return name
    start = "".join(letter if letter.isprintable() else "_" for letter in name[:SHORTENED_NAME_BYTES])
    while len(os.fsencode(start)) > SHORTENED_NAME_BYTES:
        start = start[:-1]
    return f"{start}~{checksum_of(whole)}"


def release(path: Path) -> None:
    """Ends the use of a path, so that any process may remove the folder."""
    services.of_process(_FoldersInUse).discard(path.name)


def is_hidden(name: str) -> bool:
    """Returns whether a name is that of a hidden folder of a save."""
    return bool(_PATTERN.fullmatch(name))


def find(parent: Path, *kinds: str) -> list[HiddenFolder]:
    """Returns the hidden folders of some kinds in a folder, sorted by name."""
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
    start_time, _, rest = match[5].partition("x")
    since = rest.rpartition("x")[2] if "x" in rest else ""
    seconds = int(since) if since.isascii() and since.isdigit() and len(since) < 12 else 0
    return HiddenFolder(path, match[1], match[2], match[3], int(match[4]), start_time, seconds)


def sweep(parent: Path) -> None:
    """Removes the folders that interrupted saves have left."""
    for left in find(parent, SAVING, DELETING):
        if not left.is_needed:
            shutil.rmtree(left.path, ignore_errors=True)


def dispose(folder: Path, name: str) -> None:
    """Removes a folder, or a link without its target, or leaves the rest to the next save."""
    if folder.is_symlink():
        folder.unlink()
        return
    trash = claim(name, folder.parent, DELETING)
    try:
        os.rename(folder, trash)
        shutil.rmtree(trash, ignore_errors=True)
    finally:
        release(trash)


def start_time_of(pid: int) -> str:
    """Returns the start time of a process in ticks since boot, or without /proc in ms since 1970."""
    facts = _facts_of(pid)
    if len(facts) > 19:
        return facts[19]
    try:
        return str(round(psutil.Process(pid).create_time() * 1000))
    except psutil.Error:
        return ""


def _facts_of(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name, of which the first is the state."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def _seconds_unchanged(folder: Path) -> float:
    try:
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:  # a file was just removed, or is not readable
        return 0.0
