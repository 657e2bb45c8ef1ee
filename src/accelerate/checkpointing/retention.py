"""Numbered checkpoints in one folder: the next one, the newest complete one, the ones to delete."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from accelerate.base import CheckpointError, expect
from accelerate.checkpointing import folder, manifest, temporary

PATTERN = re.compile(r"checkpoint_(\d+)")
ATTEMPTS = 5  # to look at a checkpoint that saves replace at the same time


@dataclass(frozen=True)
class Found:
    """One numbered folder.

    Attributes:
        number: from its name.
        path: the folder.
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


def survey(parent: Path, *, deep: bool = False) -> list[Found]:
    """Describe the numbered checkpoints of a folder, the newest first.

    Args:
        parent: the folder; one that does not exist holds none.
        deep: compare checksums too, and not only sizes.
    """
    if not parent.is_dir():
        return []
    folder.recover_all(parent)
    numbered = ((PATTERN.fullmatch(path.name), path) for path in parent.iterdir() if path.is_dir())
    found = [_look_at(int(match[1]), path, deep) for match, path in numbered if match]
    return sorted(found, key=lambda each: each.number, reverse=True)


def look_at(path: Path, *, deep: bool) -> tuple[manifest.Manifest | None, str]:
    """Read a checkpoint's manifest and compare its files.

    Args:
        path: the checkpoint.
        deep: compare checksums too, and not only sizes.

    Returns:
        The manifest, None where there is no usable one, and what is wrong, empty for a complete checkpoint.
    """
    for _ in range(ATTEMPTS):
        stamp = manifest.stamp(path)
        found = _read_and_compare(path, deep)
        if not found[1] or stamp == manifest.stamp(path):
            break
    return found


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
        each.name for each in temporary.find(parent, temporary.SAVING) if each.is_in_use and not each.is_own
    ]
    numbers = (PATTERN.fullmatch(name) for name in writing)
    return {*(each.number for each in survey(parent)), *(int(match[1]) for match in numbers if match)}


def prune(parent: Path, keep: int) -> list[Path]:
    """Delete the oldest numbered checkpoints; the newest complete one always stays.

    Args:
        parent: the folder.
        keep: how many stay.

    Returns:
        The deleted ones, the oldest first.
    """
    found = survey(parent)
    newest = next((each for each in found if not each.fault), None)
    surplus = [each for each in found[keep:] if each is not newest]
    for each in reversed(surplus):
        folder.remove(each.path)
    return [each.path for each in reversed(surplus)]


def _look_at(number: int, path: Path, deep: bool) -> Found:
    read, fault = look_at(path, deep=deep)
    return Found(number, path, None if fault else read, fault)
