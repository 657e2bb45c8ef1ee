"""Search for checkpoints in a folder, and deletion of old numbered ones.

`Saver.commit` prunes, `load_state` searches for the newest complete checkpoint, and `accelerate checkpoint`
lists all.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from accelerate.base import CheckpointError, expect
from accelerate.checkpointing import folder, manifest, temporary
from accelerate.checkpointing.folder import number_of

logger = logging.getLogger(__name__)  # also used where no run is set up

ATTEMPTS = 5  # to inspect a checkpoint that saves replace at the same time
LINKED_NAME = "checkpoints"  # a link of this name, for example to another disk, is searched
# First bytes of a manifest. Other software has files of the same name. An empty file is damaged.
_START = re.compile(rb'\s*(\{\s*("files"|$)|$)')
_BYTES_OF_A_START = 64


@dataclass(frozen=True)
class NumberedCheckpoint:
    """Numbered folder, with the reason in `fault` if it is not a complete checkpoint."""

    number: int
    path: Path
    fault: str = ""


def survey(parent: Path) -> list[NumberedCheckpoint]:
    """Returns the numbered checkpoints of a folder, which need not exist, the newest first."""
    if not parent.is_dir():
        return []
    folder.recover_all(parent)
    numbered = [(number_of(path.name), path) for path in parent.iterdir() if path.is_dir()]
    checkpoints = [
        NumberedCheckpoint(number, path, inspect(path, deep=False)[1])
        for number, path in numbered
        if number is not None
    ]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.number, reverse=True)


def inspect(path: Path, *, deep: bool) -> tuple[manifest.Manifest | None, str]:
    """Returns the manifest of a checkpoint, or None, and the reason why it is not complete, or "".

    Args:
        deep: Whether checksums are compared, and not only sizes.
    """
    for _ in range(ATTEMPTS):
        stamp = manifest.stamp(path)
        read, fault = _read_and_compare(path, deep)
        if not fault or stamp == manifest.stamp(path):
            break
    return read, fault


def _read_and_compare(path: Path, deep: bool) -> tuple[manifest.Manifest | None, str]:
    try:
        read = manifest.read(path)
        expect(read.size if deep else 0)
    except CheckpointError as error:
        return None, str(error)
    return read, "; ".join(manifest.problems(path, read, deep=deep))


def highest_number(parent: Path) -> int:
    """Returns the highest number of a checkpoint with a manifest, or -1, without reading files."""
    paths = [path.parent for path in parent.glob(f"checkpoint_*/{manifest.NAME}")]
    return max((number for path in paths if (number := number_of(path.name)) is not None), default=-1)


def taken_numbers(parent: Path) -> set[int]:
    """Returns the numbers of the checkpoints in a folder, and of those that other processes write there."""
    writers = temporary.find(parent, temporary.SAVING)
    written = [number_of(writer.name) for writer in writers if writer.is_in_use and not writer.is_own]
    saved = [checkpoint.number for checkpoint in survey(parent)]
    return {number for number in [*saved, *written] if number is not None}


def prune(parent: Path, keep: int) -> list[Path]:
    """Deletes the oldest numbered checkpoints, except the newest complete one, and returns their paths."""
    checkpoints = survey(parent)
    newest = next((checkpoint for checkpoint in checkpoints if not checkpoint.fault), None)
    surplus = [checkpoint.path for checkpoint in checkpoints[keep:] if checkpoint is not newest][::-1]
    for path in surplus:
        folder.remove(path)
    return surplus


def checkpoints_below(top: Path) -> list[Path]:
    """Returns all folders with a manifest, and numbered checkpoints without one.

    They are sorted by folder, with the numbered ones first, the newest before the others. Folders in a
    checkpoint are not searched. Links are followed only to numbered checkpoints and folders called
    `checkpoints`. Only the first bytes of manifests are read. Checkpoints that interrupted saves have moved
    aside are restored.
    """

    def order(path: Path) -> tuple[Path, bool, int, str]:
        number = number_of(path.name)
        return path.parent, number is None, -(number or 0), path.name

    return sorted(_search(top), key=order)


def _search(top: Path) -> Iterator[Path]:
    waiting, seen = [top], set()
    while waiting:
        parent = waiting.pop()
        try:
            status = os.stat(parent)
            files, folders = _content(parent)
        except OSError as error:
            logger.warning(f"{parent} cannot be read, and checkpoints below it are not shown: {error}")
            continue
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        has_manifest = manifest.NAME in files and _is_manifest(parent / manifest.NAME)
        if has_manifest or number_of(parent.name) is not None:
            yield parent
        if not has_manifest:
            waiting.extend(parent / name for name in folders)


def _content(parent: Path) -> tuple[set[str], list[str]]:
    """Returns the names of the files, and of the folders to search."""
    entries = list(os.scandir(parent))
    if any(temporary.is_hidden(entry.name) for entry in entries):
        folder.recover_all(parent)
        entries = list(os.scandir(parent))
    folders = [
        entry.name
        for entry in entries
        if not temporary.is_hidden(entry.name)
        if entry.is_dir(follow_symlinks=entry.name == LINKED_NAME or number_of(entry.name) is not None)
    ]
    return {entry.name for entry in entries}.difference(folders), folders


def _is_manifest(path: Path) -> bool:
    """Returns whether a file was written as a manifest, even if it is damaged."""
    if number_of(path.parent.name) is not None:
        return True
    with path.open("rb") as file:
        return bool(_START.match(file.read(_BYTES_OF_A_START)))
