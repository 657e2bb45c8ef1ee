"""All checkpoints below a folder, whatever their names."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from accelerate.checkpointing import folder, manifest, retention, temporary

logger = logging.getLogger(__name__)  # also used where no run is set up

LINKED = "checkpoints"
"""A folder of this name is also searched where it is a link, for instance to another disk."""
_START = re.compile(rb'\s*(\{\s*("files"|$)|$)')
"""The first bytes of a manifest; other software has files of the same name. One that is empty is damaged."""
_BYTES_OF_A_START = 64


def checkpoints_below(top: Path) -> list[Path]:
    """Return all folders with a manifest, and numbered checkpoints without one.

    The folders in a checkpoint are not searched, nor are links, except numbered checkpoints and folders of
    checkpoints. Of the files only the first bytes of manifests are read. What interrupted saves had moved
    aside is brought back.

    Args:
        top: a folder; it may be a checkpoint itself.

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
    follows = entry.name == LINKED or bool(retention.PATTERN.fullmatch(entry.name))
    return entry.is_dir(follow_symlinks=follows)


def _is_manifest(path: Path) -> bool:
    """Whether a file was written as a manifest, even where it is damaged or of a numbered checkpoint."""
    if _is_numbered(path.parent):
        return True
    with path.open("rb") as file:
        return bool(_START.match(file.read(_BYTES_OF_A_START)))


def _is_numbered(path: Path) -> bool:
    return bool(retention.PATTERN.fullmatch(path.name))


def _order(path: Path) -> tuple[Path, bool, int, str]:
    number = retention.PATTERN.fullmatch(path.name)
    return path.parent, not number, -int(number[1]) if number else 0, path.name
