"""What ended the processes of a run: written down by each of them, collected by the launcher."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER_VARIABLE = "ACCELERATE_FAILURE_DIR"
VERBOSE_VARIABLE = "ACCELERATE_FAILURE_VERBOSE"
ENTRY = Path(__file__).with_name("entry.py")
EXITS = "exits.json"
HANG = "hang.json"
HANG_KIND = "Hang"
"""In the place of an error's class: the process was ended as ranks waited for each other in vain."""


@dataclass(frozen=True)
class Failure:
    """The error that ended one process.

    Attributes:
        rank: of the process, among all.
        world_size: number of processes.
        attempt: how often the group had been restarted.
        host: machine it ran on.
        pid: its number there.
        moment: seconds since the epoch.
        kind: class of the error, and those it derives from, by name.
        headline: class and message, one line.
        trace: the traceback as Python prints it.
        place: file and line of its last frame.
    """

    rank: int
    world_size: int
    attempt: int
    host: str
    pid: int
    moment: float
    kind: tuple[str, ...]
    headline: str
    trace: str
    place: str

    @classmethod
    def of(cls, error: BaseException, environ: Mapping[str, str]) -> Failure:
        """Describe an error in this process.

        Args:
            error: with the traceback that shall be shown.
            environ: says which rank this is.
        """
        frames = traceback.extract_tb(error.__traceback__)
        (*_, headline) = traceback.format_exception_only(type(error), error)
        return cls(
            rank=int(environ.get("RANK", "0")),
            world_size=int(environ.get("WORLD_SIZE", "1")),
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            host=socket.gethostname(),
            pid=os.getpid(),
            moment=time.time(),
            kind=tuple(base.__name__ for base in type(error).__mro__),
            headline=" ".join(headline.split()),
            trace="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            place=f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
        )

    def write(self, folder: Path) -> bool:
        """Write it to a file of its own; whether that worked."""
        target = folder / f"rank-{self.rank}.attempt-{self.attempt}.json"
        try:
            beside = target.with_suffix(".part")
            beside.write_text(json.dumps(asdict(self)), encoding="utf-8")
            beside.replace(target)
        except OSError:  # the folder is gone, or the disk is full: the error itself is printed instead
            return False
        return True


@dataclass(frozen=True)
class Outcome:
    """How a run ended that failed.

    Attributes:
        code: exit code of the run.
        failures: errors that processes wrote down in the last attempt, the earliest first.
        exits: rank -> what the operating system said of its process: a code, or minus the number of a signal.
        hang: the last report about ranks that waited for each other in vain; empty without one.
    """

    code: int
    failures: tuple[Failure, ...]
    exits: Mapping[int, int]
    hang: str = ""


def collect(folder: Path, code: int) -> Outcome:
    """Read what the processes of a run left behind.

    Args:
        folder: where they wrote.
        code: exit code of the run.
    """
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.json")]
    failures = [Failure(**{**entry, "kind": tuple(entry["kind"])}) for entry in found]
    last = max((failure.attempt for failure in failures), default=0)
    exits = folder / EXITS
    seen = json.loads(exits.read_text(encoding="utf-8")) if exits.exists() else {}
    return Outcome(
        code,
        tuple(sorted((f for f in failures if f.attempt == last), key=lambda failure: failure.moment)),
        {int(rank): number for rank, number in seen.items()},
        _read_hang(folder / HANG, last),
    )


def _read_hang(path: Path, attempt: int) -> str:
    if not path.exists():
        return ""
    report = json.loads(path.read_text(encoding="utf-8"))
    return str(report["text"]) if report["attempt"] >= attempt else ""
