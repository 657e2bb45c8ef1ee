"""Find checkpoints: the numbered ones of a folder, of which old ones are deleted, and all below a folder."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from accelerate.base import CheckpointError, expect
from accelerate.checkpointing import folder, manifest, temporary

logger = logging.getLogger(__name__)  # also used where no run is set up

ATTEMPTS = 5  # to look at a checkpoint that saves replace at the same time
LINKED = "checkpoints"  # a folder of this name is also searched where it is a link, as to another disk
_PATTERN = re.compile(r"checkpoint_(\d+)")
# The first bytes of a manifest; other software has files of the same name. One that is empty is damaged.
_START = re.compile(rb'\s*(\{\s*("files"|$)|$)')
_BYTES_OF_A_START = 64


@dataclass(frozen=True)
class NumberedCheckpoint:
    """One numbered folder; `fault` says why it is not complete, and is empty when it is."""

    number: int
    path: Path
    fault: str = ""


def name_of(number: int) -> str:
    return f"checkpoint_{number}"


def number_of(name: str) -> int | None:
    """Return the number of a checkpoint; None where it has another name."""
    match = _PATTERN.fullmatch(name)
    return int(match[1]) if match else None


def survey(parent: Path) -> list[NumberedCheckpoint]:
    """Describe the numbered checkpoints of a folder, which need not exist, the newest first."""
    if not parent.is_dir():
        return []
    folder.recover_all(parent)
    numbered = [(number_of(path.name), path) for path in parent.iterdir() if path.is_dir()]
    checkpoints = [
        NumberedCheckpoint(number, path, look_at(path, deep=False)[1])
        for number, path in numbered
        if number is not None
    ]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.number, reverse=True)


def look_at(path: Path, *, deep: bool) -> tuple[manifest.Manifest | None, str]:
    """Return a checkpoint's manifest, None where it has no usable one, and what is wrong, empty where it
    is complete; `deep` compares checksums, and not only sizes."""
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


def taken_numbers(parent: Path) -> set[int]:
    """Return the numbers of the checkpoints that are in a folder, or that other processes write to it."""
    writers = temporary.find(parent, temporary.SAVING)
    written = [number_of(writer.name) for writer in writers if writer.is_in_use and not writer.is_own]
    saved = [checkpoint.number for checkpoint in survey(parent)]
    return {number for number in [*saved, *written] if number is not None}


def prune(parent: Path, keep: int) -> list[Path]:
    """Delete the oldest numbered checkpoints but the newest complete one; return them, the oldest first."""
    checkpoints = survey(parent)
    newest = next((checkpoint for checkpoint in checkpoints if not checkpoint.fault), None)
    surplus = [checkpoint.path for checkpoint in checkpoints[keep:] if checkpoint is not newest][::-1]
    for path in surplus:
        folder.remove(path)
    return surplus


def checkpoints_below(top: Path) -> list[Path]:
    """Return all folders with a manifest, and numbered checkpoints without one.

    They are sorted by folder; in each folder the numbered ones come first, the newest before the others,
    then the rest by name. The folders in a checkpoint are not searched, nor are links, except numbered
    checkpoints and folders of checkpoints. Of the files only the first bytes of manifests are read. What
    interrupted saves had moved aside is brought back.
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
    """Return the names of the files, and of the folders to search."""
    entries = list(os.scandir(parent))
    if any(temporary.is_hidden(entry.name) for entry in entries):
        folder.recover_all(parent)
        entries = list(os.scandir(parent))
    folders = [
        entry.name
        for entry in entries
        if not temporary.is_hidden(entry.name)
        if entry.is_dir(follow_symlinks=entry.name == LINKED or number_of(entry.name) is not None)
    ]
    return {entry.name for entry in entries}.difference(folders), folders


def _is_manifest(path: Path) -> bool:
    """Whether a file was written as a manifest, even where it is damaged or of a numbered checkpoint."""
    if number_of(path.parent.name) is not None:
        return True
    with path.open("rb") as file:
        return bool(_START.match(file.read(_BYTES_OF_A_START)))
