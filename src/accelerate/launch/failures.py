"""What ended the processes of a run: each writes it down, the launcher collects it and finds the cause."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path

from accelerate.base import AccelerateError, environ

FOLDER_VARIABLE = environ.FAILURE_FOLDER
VERBOSE_VARIABLE = "ACCELERATE_FAILURE_VERBOSE"
ENTRY = Path(__file__).with_name("entry.py")
MOST_DIGITS = 18
EXITS = "exits.json"
HANG = "hang.json"
HANG_KIND = "Hang"  # in place of an error's class: the process was ended because of a hang


@dataclass(frozen=True)
class Failure:
    """The error that ended one process, in Python or by its exit code."""

    rank: int
    world_size: int
    attempt: int  # how often the group had been restarted
    host: str
    pid: int
    moment: float  # seconds since the epoch
    kind: tuple[str, ...]  # class of the error, and those it derives from, by name
    headline: str  # class and message, one line
    trace: str
    place: str  # file and line of the last frame of the traceback

    @classmethod
    def of(cls, error: BaseException, environ: Mapping[str, str]) -> Failure:
        """Describe an error in this process, with its traceback; `environ` says which rank this is."""
        frames = traceback.extract_tb(error.__traceback__)
        (*_, headline) = traceback.format_exception_only(type(error), error)
        return cls(
            rank=count_of(environ, "RANK", 0),
            world_size=count_of(environ, "WORLD_SIZE", 1),
            attempt=count_of(environ, "TORCHELASTIC_RESTART_COUNT", 0),
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
        # Forked processes that meet over a file have no RANK: the pid keeps their files apart.
        target = folder / f"rank-{self.rank}.attempt-{self.attempt}.pid-{self.pid}.json"
        try:
            beside = target.with_suffix(".part")
            beside.write_text(json.dumps(asdict(self)), encoding="utf-8")
            beside.replace(target)
        except OSError:  # the folder is gone, or the disk is full: the error itself is printed instead
            return False
        return True


def count_of(environ: Mapping[str, str], name: str, usual: int) -> int:
    """Return a count that the launcher sets, for a report: a wrong value must not prevent the report."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else usual


@dataclass(frozen=True)
class Exits:
    """What the launcher saw of the processes of one attempt on its machine."""

    codes: Mapping[int, int]  # rank -> exit code, or minus the number of the signal that ended it
    attempt: int = 0
    asked: tuple[int, ...] = ()  # ranks that still ran when the launcher asked them to end
    asked_by: int = int(signal.SIGTERM)  # the signal
    asked_at: float = 0.0  # seconds since the epoch
    killed: tuple[int, ...] = ()  # ranks that did not end in time, which the launcher killed

    def write(self, folder: Path) -> None:
        (folder / EXITS).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Exits:
        """Read what was written; that of no processes where nothing was."""
        path = folder / EXITS
        if not path.exists():
            return cls({})
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["codes"] = {int(rank): code for rank, code in fields["codes"].items()}
        fields["asked"], fields["killed"] = tuple(fields["asked"]), tuple(fields["killed"])
        return cls(**fields)


@dataclass(frozen=True)
class Outcome:
    """How a failed run ended."""

    code: int
    failures: tuple[Failure, ...]  # of the last attempt, the earliest first
    seen: Exits = field(default_factory=lambda: Exits({}))
    hang: str = ""  # the last report about a hang

    @property
    def finished(self) -> list[int]:
        """The ranks that ended with code 0 before the launcher asked them to."""
        return [rank for rank, code in self.seen.codes.items() if not code and rank not in self.seen.asked]


def collect(folder: Path, code: int) -> Outcome:
    """Read what the processes of a run that ended with a code wrote into a folder."""
    entries = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.json")]
    failures = [Failure(**{**entry, "kind": tuple(entry["kind"])}) for entry in entries]
    seen = Exits.read(folder)
    last = max((seen.attempt, *(failure.attempt for failure in failures)))
    of_last = [failure for failure in failures if failure.attempt == last]
    of_last.sort(key=lambda failure: failure.moment)
    path, hang = folder / HANG, ""
    if path.exists() and (report := json.loads(path.read_text(encoding="utf-8")))["attempt"] >= last:
        hang = str(report["text"])
    return Outcome(code, tuple(of_last), seen, hang)


def record_digest(folder: Path, digest: str) -> None:
    """Append how a run failed to the records that its processes wrote, which they named in a folder.

    Raises:
        OSError: The records cannot be written any more.
    """
    from accelerate.monitoring import PATH_SUFFIX, End, RecordWriter  # a run that succeeds needs none of it

    first: dict[Path, int] = {}  # folder of records -> the first rank of this machine
    for note in sorted(folder.glob(f"rank-*{PATH_SUFFIX}")):
        path = Path(note.read_text(encoding="utf-8"))
        first.setdefault(path.parent, int(path.stem.removeprefix("rank-")))
    for records, rank in first.items():
        writer = RecordWriter(records, rank)
        writer.write(End(time=time.time(), how="failed", digest=digest))
        writer.close()


def shortened(text: str, width: int = 300) -> str:
    """Cut a long line, and say how many characters are missing."""
    return text if len(text) <= width else f"{text[:width]} ... ({len(text) - width} more characters)"


class Kind(IntEnum):
    """What a failure is, the most likely cause first."""

    OWN = 1  # an error of the script, or of a worker of its data loader
    SILENT = 2  # an exit code, or a signal that the launcher did not send, without a Python error
    LEFT = 3  # exit code 0 while others needed the rank
    HANG = 4  # ended as ranks waited for each other
    OF_OTHERS = 5  # an error that says what another rank did, or did not
    LOST = 6  # a connection to another rank broke, or an operation with it timed out
    AFTER = 7  # an error of a rank that the launcher had asked to end


@dataclass(frozen=True)
class Suspect:
    """One rank whose end may be the cause, with what it wrote; None where it wrote nothing."""

    kind: Kind
    rank: int
    failure: Failure | None = None


_CONNECTION = re.compile(
    r"gloo|NCCL|TCPStore|connectFullMesh|connection closed by peer|DistBackendError|DistNetworkError|"
    r"DistStoreError|DistQueue\w+Error",
    re.IGNORECASE,
)
_ANY_CONNECTION = re.compile(
    r"connection refused|connection reset|broken pipe|timed? ?out|timeout|socket", re.IGNORECASE
)
"""Said of connections of the script too, such as a download: it counts where torch.distributed raised it."""
_DISTRIBUTED = re.compile(r'File "[^"]*torch[/\\]distributed[/\\]')
_OF_OTHERS = re.compile(r"did not come within|did not end their attempt|on another process|does not answer")
_READ_BY_ANOTHER = re.compile(
    r"^RuntimeError: the loader failed on process \d+, which reads for all:$", re.MULTILINE
)
"""In the traceback of the others: they raise what the process raised that reads for them."""


def find_suspects(outcome: Outcome) -> list[Suspect]:
    """Return all that may have made the run fail, the most likely first."""
    seen, recorded = outcome.seen, {failure.rank for failure in outcome.failures}
    suspects = [Suspect(_kind(failure, outcome), failure.rank, failure) for failure in outcome.failures]
    if any(suspect.kind in (Kind.HANG, Kind.OF_OTHERS, Kind.LOST) for suspect in suspects):
        suspects += [Suspect(Kind.LEFT, rank) for rank in outcome.finished]
    by_launcher = {*seen.killed, *(rank for rank in seen.asked if seen.codes.get(rank) == -seen.asked_by)}
    silent = {
        rank: number
        for rank, number in seen.codes.items()
        if number and rank not in recorded and rank not in by_launcher
    }
    suspects += [Suspect(Kind.AFTER if rank in seen.asked else Kind.SILENT, rank) for rank in silent]

    def order(suspect: Suspect) -> tuple[int, float]:
        # Signals before exit codes: a script that loses another rank may end itself with a code.
        moment = suspect.failure.moment if suspect.failure else float(silent.get(suspect.rank, 0) > 0)
        return suspect.kind, moment

    return sorted(suspects, key=order)


def find_first(outcome: Outcome) -> Suspect | None:
    """Return what made the run fail; None where no rank did."""
    return next(iter(find_suspects(outcome)), None)


def _kind(failure: Failure, outcome: Outcome) -> Kind:
    if failure.rank in outcome.seen.asked and failure.moment > outcome.seen.asked_at:
        return Kind.AFTER
    if HANG_KIND in failure.kind:
        return Kind.HANG
    if _READ_BY_ANOTHER.search(failure.trace):
        return Kind.OF_OTHERS
    if AccelerateError.__name__ in failure.kind:
        return Kind.OF_OTHERS if _OF_OTHERS.search(failure.headline) else Kind.OWN
    text = f"{failure.kind[0]} {failure.headline}"
    lost = _ANY_CONNECTION.search(text) and _DISTRIBUTED.search(failure.trace)
    return Kind.LOST if lost or _CONNECTION.search(text) else Kind.OWN
