"""Temporary folder of a launch, and ends of the attempts of a run that restarts.

Processes record their failures in the folder, and the launcher prints and records the attempts. A launcher
holds a lock on a file in its folder. The next launch removes folders whose launcher was killed.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from accelerate.launch.children import say
from accelerate.launch.failures import (
    RESTART_CODE,
    Exits,
    Kind,
    NewestCheckpoint,
    Suspect,
    append_records,
    collect,
    find_first,
    last_recorded_step,
    shortened,
)

if TYPE_CHECKING:
    from accelerate.monitoring import Attempt


class Attempts:
    """Recorder of the attempts on this machine.

    A process that is killed in its first second leaves no record, and the folder of the records is known only
    when a process has opened it. Until then the attempts are kept.

    Args:
        folder: Folder in which the processes record their errors.
        is_elastic: Whether the number of machines may change.
    """

    def __init__(self, folder: Path, is_elastic: bool = False) -> None:
        self._folder, self._is_elastic = folder, is_elastic
        self._began = time.time()
        self._ended: list[Attempt] = []
        self._has_restarted = False

    def begin(self) -> None:
        """Begins an attempt, before its processes are started."""
        self._began = time.time()

    def end(self, exits: Exits, most_restarts: int) -> Suspect | None:
        """Ends an attempt after which the processes start again, prints why, and returns who ended it."""
        first, record, is_exact = self._add(exits, 1)
        cause, number = "Another machine was asked to end, has failed, or has joined", ""
        if record.rank >= 0:
            at = "" if record.step < 0 else f" after step {record.step}"
            at += "" if is_exact or not at else " or later"
            cause = f"rank {record.rank} {record.text}{at}"
            number = f" (restart {exits.attempt + 1} of {most_restarts})"
        newest = f". The newest checkpoint is {record.checkpoint} (step {record.checkpoint_step})"
        say(f"{cause}. All processes start again{number}{newest if record.checkpoint else ''}")
        self._has_restarted = True
        self._write()
        return first

    def finish(self, exits: Exits, code: int) -> None:
        """Ends the last attempt of a run that has restarted."""
        if self._has_restarted:
            self._add(exits, code)
            self._write()

    def _add(self, exits: Exits, code: int) -> tuple[Suspect | None, Attempt, bool]:
        """Adds the record of an attempt.

        Returns:
            The rank that ended first, the record, and whether its step is exact.
        """
        from accelerate.monitoring import Attempt  # a run that succeeds at once needs none of it

        outcome = collect(self._folder, code, exits)
        first = find_first(outcome) if code else None
        if first is not None and (
            first.kind == Kind.AFTER
            # It ended because another machine was asked to end.
            or (self._is_elastic and exits.codes.get(first.rank) == RESTART_CODE)
        ):
            first = None
        newest = NewestCheckpoint.read(self._folder) if 0 in exits.codes else None  # rank 0 commits
        checkpoint, checkpoint_step = newest or ("", 0)
        exact = max([failure.step for failure in outcome.failures], default=-1)
        record = Attempt(
            time=time.time(),
            number=exits.attempt,
            began=self._began,
            rank=-1 if first is None else first.rank,
            text="" if first is None else describe(first, exits),
            is_cause=first is not None and first.kind < Kind.OF_OTHERS,
            failed=min([failure.moment for failure in outcome.failures], default=exits.asked_at),
            step=exact if exact >= 0 or first is None else self._recorded_step(),
            checkpoint=checkpoint,
            checkpoint_step=checkpoint_step,
        )
        self._ended.append(record)
        return first, record, exact >= 0

    def _recorded_step(self) -> int:
        """Returns the last step of this attempt in the records, if no process has left its step."""
        try:
            return last_recorded_step(self._folder, self._began)
        except OSError:  # `_write` reports it
            return -1

    def _write(self) -> None:
        try:
            if append_records(self._folder, self._ended):
                self._ended = []
        except OSError as error:
            print(f"accelerate launch: attempts cannot be added to the records: {error}.", file=sys.stderr)


def describe(first: Suspect, exits: Exits) -> str:
    """Returns how a rank ended."""
    if first.kind == Kind.LOST:
        return "lost its connection to another rank"
    if first.failure is not None:
        return f"failed with {shortened(first.failure.headline.rstrip('.'), 200)}"
    code: Any = exits.codes.get(first.rank, 0)
    names = {-number: number.name for number in signal.Signals}
    return f"was ended by {names[code]}" if code in names else f"ended with exit code {code}"


PREFIX = "accelerate-launch-"
LOCK = "launcher.lock"


def open_folder() -> tuple[Path, AbstractContextManager[object]]:
    """Returns a new folder and its lock, which is held during the launch and does nothing on Windows."""
    root = Path(tempfile.gettempdir())
    for path in root.glob(f"{PREFIX}*/{LOCK}"):
        _remove_abandoned(path)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock: AbstractContextManager[object] = nullcontext()
    if sys.platform != "win32":
        path = folder / f"new-{LOCK}"
        lock = file = path.open("wb")
        _lock(file)
        path.rename(folder / LOCK)  # once it is locked, because other launchers look for unlocked files
    return folder, lock


def keep(folder: Path) -> None:
    """Keeps a folder after the launch."""
    (folder / LOCK).unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    """Removes the folder of a lock that no process holds."""
    try:
        with path.open("ab") as file:
            if _lock(file):
                shutil.rmtree(path.parent, ignore_errors=True)
    except OSError:  # that of another user, or removed meanwhile
        return


def _lock(file: IO[bytes]) -> bool:
    """Returns whether this process holds the lock of a file now, which it never does on Windows."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return sys.platform != "win32"
