"""Folders of the records of runs, which are in the state folder of the user unless a folder is named.

A run writes nothing to its project folder. The name of a run folder has the time of the start, a random part,
and a digest of the path of the project, by which `accelerate report` and `accelerate monitor` find it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from accelerate.base import environ, expanded, wrong_value

RECORDS_VARIABLE = "ACCELERATE_RUN_RECORDS"
"""Variable with the folder of records, "yes" for the state folder, or "no" for no records."""

MAX_RUNS, MAX_BYTES = 100, 1 << 30
"""Number of runs in the state folder, and their bytes, above which the oldest ones are removed."""
SECONDS_TO_KEEP = 24 * 3600.0
"""Time since its last record in which a run is not removed, because it may still run."""

_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}(?:-([0-9a-f]{12}))?")
_RECORDS = "rank-*.jsonl"


def state_folder() -> Path | None:
    """Returns the folder of all runs of the user, or None if the user has no home folder."""
    variables = environ.current()
    chosen = variables.get("XDG_STATE_HOME", "")
    system = platform.system()
    if os.path.isabs(chosen):  # the specification tells programs to ignore relative paths
        base = Path(chosen)
    elif system == "Windows":
        base = expanded(variables.get("LOCALAPPDATA") or "~/AppData/Local")
    else:
        base = expanded("~/Library/Application Support" if system == "Darwin" else "~/.local/state")
    return base / "accelerate" / "runs" if base.is_absolute() else None


def records_folder(chosen: str | None, project: str | os.PathLike[str] | None, run_id: str) -> Path | None:
    """Returns the folder of the records of a run, or None if there are none.

    Args:
        chosen: Value of the variable, or None if it is not set.
        project: Folder of the project, or None if there is none.
        run_id: Identifier of the run, the same on all ranks.
    """
    if chosen and not uses_state_folder(chosen, project):
        return None if chosen.lower() in environ.FALSE_WORDS else expanded(chosen)
    runs = state_folder() if uses_state_folder(chosen, project) else None
    if runs is None:
        return None
    return runs / (run_id if project is None else f"{run_id}-{_digest_of(project)}")


def uses_state_folder(chosen: str | None, project: object) -> bool:
    """Returns whether the records of a run are in the state folder of the user."""
    return chosen.lower() in environ.TRUE_WORDS if chosen else project is not None


def _digest_of(project: str | os.PathLike[str]) -> str:
    path = os.path.realpath(expanded(project))
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


def find_runs(project: Path | None = None) -> list[Path]:
    """Returns the folders in the state folder with records, of a project or of all, the newest first."""
    digest = None if project is None else _digest_of(project)
    named = [(match[1], path) for match, path in _run_folders() if match[1] == digest or digest is None]
    return [path for _, path in named if any(path.glob(_RECORDS))]


def newest_run() -> Path:
    """Returns the folder of the newest run.

    Raises:
        ConfigurationError: No run is recorded.
    """
    found = find_runs()
    if not found:
        fix = f"Pass project_dir to Accelerator or set {RECORDS_VARIABLE}=yes, or name the folder of a run"
        raise wrong_value("DIR", None, f"no run is recorded in {state_folder()}", fix)
    return found[0]


def name_of_run(folder: Path) -> str:
    """Returns the name of a folder of a run, also for paths such as ".." or a root."""
    return Path(os.path.abspath(folder)).name or str(folder)


def _run_folders() -> Iterator[tuple[re.Match[str], Path]]:
    """Yields the folders of runs in the state folder, the newest first."""
    runs = state_folder()
    with suppress(OSError):  # there is none, or it cannot be read
        for name in sorted(os.listdir(runs) if runs is not None else (), reverse=True):
            match = _NAME.fullmatch(name)
            if match is not None and runs is not None:
                yield match, runs / name


def create_run_folder(folder: Path) -> None:
    """Creates the folder of a run in the state folder, which only the user can read.

    Raises:
        OSError: It cannot be created.
    """
    folder.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def remove_old_runs(now: float | None = None) -> None:
    """Removes the records of the oldest runs above `MAX_RUNS` and `MAX_BYTES`.

    Other files in their folders are kept. Several processes may do it at the same time.

    Args:
        now: Time in seconds since the epoch. None uses the current time.
    """
    now = time.time() if now is None else now
    size = 0
    for number, (_, folder) in enumerate(_run_folders()):
        with suppress(OSError):  # another process removes it
            files = [(path, path.stat()) for path in folder.glob(_RECORDS)]
            size += sum(status.st_size for _, status in files)
            is_old = all(status.st_mtime < now - SECONDS_TO_KEEP for _, status in files)
            if is_old and (number >= MAX_RUNS or size > MAX_BYTES):
                for path, _ in files:
                    path.unlink()
                folder.rmdir()
