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

PATTERN = re.compile(r"checkpoint_(\d+)")
ATTEMPTS = 5  # to look at a checkpoint that saves replace at the same time
LINKED = "checkpoints"
"""A folder of this name is also searched where it is a link, for instance to another disk."""
_START = re.compile(rb'\s*(\{\s*("files"|$)|$)')
"""The first bytes of a manifest; other software has files of the same name. One that is empty is damaged."""
_BYTES_OF_A_START = 64


@dataclass(frozen=True)
class NumberedCheckpoint:
    """One numbered folder.

    Attributes:
        manifest: what it holds; None when it is not complete.
        fault: why it is not complete; empty when it is.
    """

    number: int
    path: Path
    manifest: manifest.Manifest | None
    fault: str = ""


def name_of(number: int) -> str:
    """Return the name of a numbered checkpoint."""
    return f"checkpoint_{number}"


def survey(parent: Path, *, deep: bool = False) -> list[NumberedCheckpoint]:
    """Describe the numbered checkpoints of a folder, the newest first.

    Args:
        parent: the folder; one that does not exist holds none.
        deep: compare checksums too, and not only sizes.
    """
    if not parent.is_dir():
        return []
    folder.recover_all(parent)
    numbered = ((PATTERN.fullmatch(path.name), path) for path in parent.iterdir() if path.is_dir())
    checkpoints = [_look_at(int(match[1]), path, deep) for match, path in numbered if match]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.number, reverse=True)


def look_at(path: Path, *, deep: bool) -> tuple[manifest.Manifest | None, str]:
    """Read a checkpoint's manifest and compare its files.

    Returns:
        The manifest, None where there is no usable one, and what is wrong, empty for a complete checkpoint.
    """
    for _ in range(ATTEMPTS):
        stamp = manifest.stamp(path)
        result = _read_and_compare(path, deep)
        if not result[1] or stamp == manifest.stamp(path):
            break
    return result


def _read_and_compare(path: Path, deep: bool) -> tuple[manifest.Manifest | None, str]:
    try:
        read = manifest.read(path)
        expect(read.size if deep else 0)
    except CheckpointError as error:
        return None, str(error)
    return read, "; ".join(manifest.problems(path, read, deep=deep))


def taken_numbers(parent: Path) -> set[int]:
    """Return the numbers of the checkpoints that are in a folder, or that other processes write to it."""
    writing = [
        hidden.name
        for hidden in temporary.find(parent, temporary.SAVING)
        if hidden.is_in_use and not hidden.is_own
    ]
    numbers = (PATTERN.fullmatch(name) for name in writing)
    return {
        *(checkpoint.number for checkpoint in survey(parent)),
        *(int(match[1]) for match in numbers if match),
    }


def prune(parent: Path, keep: int) -> list[Path]:
    """Delete the oldest numbered checkpoints but the newest complete one; return them, the oldest first."""
    checkpoints = survey(parent)
    newest = next((checkpoint for checkpoint in checkpoints if not checkpoint.fault), None)
    surplus = [checkpoint for checkpoint in checkpoints[keep:] if checkpoint is not newest]
    for checkpoint in reversed(surplus):
        folder.remove(checkpoint.path)
    return [checkpoint.path for checkpoint in reversed(surplus)]


def _look_at(number: int, path: Path, deep: bool) -> NumberedCheckpoint:
    read, fault = look_at(path, deep=deep)
    return NumberedCheckpoint(number, path, None if fault else read, fault)


def checkpoints_below(top: Path) -> list[Path]:
    """Return all folders with a manifest, and numbered checkpoints without one.

    The folders in a checkpoint are not searched, nor are links, except numbered checkpoints and folders of
    checkpoints. Of the files only the first bytes of manifests are read. What interrupted saves had moved
    aside is brought back.

    Returns:
        Their paths, sorted by folder; in each folder the numbered ones first, the newest before the others,
        then the rest by name.
    """
    return sorted(_search(top), key=_order)


def _search(top: Path) -> Iterator[Path]:
    waiting, seen = [top], set()
    while waiting:
        parent = waiting.pop()
        try:
            facts = os.stat(parent)
            files, folders = _content(parent)
        except OSError as error:
            logger.warning(f"{parent} cannot be read, and checkpoints below it are not shown: {error}")
            continue
        if (facts.st_dev, facts.st_ino) in seen:
            continue
        seen.add((facts.st_dev, facts.st_ino))
        if manifest.NAME in files and _is_manifest(parent / manifest.NAME):
            yield parent
            continue
        if _is_numbered(parent):
            yield parent
        waiting.extend(parent / name for name in folders)


def _content(parent: Path) -> tuple[set[str], list[str]]:
    """Return the names of the files, and of the folders to search."""
    with os.scandir(parent) as entries:
        known = list(entries)
    if any(temporary.is_hidden(entry.name) for entry in known):
        _recover(parent)
        with os.scandir(parent) as entries:
            known = list(entries)
    folders = [entry.name for entry in known if _is_searched(entry)]
    return {entry.name for entry in known}.difference(folders), folders


def _recover(parent: Path) -> None:
    """Bring back the folders in a folder; what belongs to the folder itself waits until it is loaded."""
    for aside in temporary.find(parent, temporary.OLD):
        if aside.has_whole_name and not aside.belongs_to(parent.name):
            folder.recover(parent / aside.name)


def _is_searched(entry: os.DirEntry[str]) -> bool:
    if temporary.is_hidden(entry.name):
        return False
    follows = entry.name == LINKED or bool(PATTERN.fullmatch(entry.name))
    return entry.is_dir(follow_symlinks=follows)


def _is_manifest(path: Path) -> bool:
    """Whether a file was written as a manifest, even where it is damaged or of a numbered checkpoint."""
    if _is_numbered(path.parent):
        return True
    with path.open("rb") as file:
        return bool(_START.match(file.read(_BYTES_OF_A_START)))


def _is_numbered(path: Path) -> bool:
    return bool(PATTERN.fullmatch(path.name))


def _order(path: Path) -> tuple[Path, bool, int, str]:
    number = PATTERN.fullmatch(path.name)
    return path.parent, not number, -int(number[1]) if number else 0, path.name
