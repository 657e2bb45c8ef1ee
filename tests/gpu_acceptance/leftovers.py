"""Files that a run left outside its folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")
NOT_LISTED = {
    ".git",
    ".venv",
    ".cache",
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
}
PATIENCE = 5.0  # seconds in which memory shared by processes that have ended goes away


def list_files(root: Path, out: Path) -> set[Path]:
    """Return the files of the repository, and the entries of places where programs leave files."""
    found = set()
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LISTED and Path(folder, name) != out]
        found.update(Path(folder, name) for name in files)
    home = Path.home()
    # Temporary files of parts are in a folder of their own, which is looked at after each part.
    for place in (home, home / ".cache", home / ".config", SHARED_MEMORY):
        found.update(place.iterdir() if place.is_dir() else ())
    return {path for path in found if out != path and out not in path.parents and path not in out.parents}


def judge(row: dict[str, Any], before: set[Path], root: Path, out: Path) -> dict[str, Any]:
    """Fail the last part when there are files that were not there before the run."""
    deadline = time.monotonic() + PATIENCE
    while (left := sorted(list_files(root, out) - before)) and time.monotonic() < deadline:
        time.sleep(0.2)
    own = [path for path in left if is_ours(path)]
    if own:
        reason = f"left files: {', '.join(map(str, own[:20]))}"
        row |= {"status": "failed", "reason": f"{row['reason']} {reason}".strip()}
    return row


def is_ours(path: Path) -> bool:
    """Whether a file may be this run's: it has the same owner, and no other process uses it as memory."""
    try:
        if path.stat().st_uid != os.getuid():
            return False
    except FileNotFoundError:
        return False
    return path.parent != SHARED_MEMORY or not is_mapped(path)


def is_mapped(path: Path) -> bool:
    """Whether a process that runs has mapped a file; after a run, all that do are others."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text(encoding="utf-8", errors="replace"):
                return True
        except OSError:  # it has ended, or belongs to another user
            continue
    return False
