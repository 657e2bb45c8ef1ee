"""Records of the errors that ended the processes of a run, which the launcher collects to find the cause."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

from accelerate.base import AccelerateError, environ

if TYPE_CHECKING:
    from accelerate.monitoring import Record

FOLDER_VARIABLE = environ.FAILURE_FOLDER
VERBOSE_VARIABLE = "ACCELERATE_FAILURE_VERBOSE"
ENTRY = Path(__file__).with_name("entry.py")
MOST_DIGITS = 18
SECONDS_TO_RECORD = 10.0
EXITS = "exits.json"
HANG = "hang.json"
NEWEST_CHECKPOINT = "checkpoint.json"
RESTART_CODE = 75
"""Exit code of a process that ends in order to be started again, EX_TEMPFAIL of sysexits.h."""
HANG_KIND = "Hang"  # used as the class of the error of a process that was ended because of a hang


@dataclass(frozen=True)
class Failure:
    """Error that ended one process, in Python or by its exit code."""

    rank: int
    world_size: int
    attempt: int  # number of restarts of the group
    host: str
    pid: int
    moment: float  # seconds since the epoch
    kind: tuple[str, ...]  # names of the class of the error and its base classes
    headline: str  # class and message, one line
    trace: str
    place: str  # file and line of the last frame of the traceback
    step: int = -1  # number of steps that the process had taken, or -1 if that is not known

    @classmethod
    def of(cls, error: BaseException, environ: Mapping[str, str], step: int = -1) -> Failure:
        """Describes an error in this process with its traceback, after a number of steps.

        `environ` contains the rank.
        """
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
            step=step,
        )

    def write(self, folder: Path) -> bool:
        """Writes the failure to a separate file, and returns whether that succeeded."""
        # Forked processes with a file store have no RANK, so the pid distinguishes their files.
        target = folder / f"rank-{self.rank}.attempt-{self.attempt}.pid-{self.pid}.json"
        try:
            partial = target.with_suffix(".part")
            partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
            partial.replace(target)
        except OSError:  # the folder is gone, or the disk is full, and the error itself is printed instead
            return False
        return True


def count_of(environ: Mapping[str, str], name: str, default: int) -> int:
    """Returns a count that the launcher sets, or a default where it is invalid.

    An invalid value must not prevent the report.
    """
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else default


def is_last_attempt(environ: Mapping[str, str]) -> bool:
    """Returns whether the launcher has no restart left."""
    attempt = count_of(environ, "TORCHELASTIC_RESTART_COUNT", 0)
    return attempt >= count_of(environ, "TORCHELASTIC_MAX_RESTARTS", 0)


def starts_again(environ: Mapping[str, str]) -> bool:
    """Returns whether the launcher restarts the processes after a failure, and then prints its cause."""
    return not is_last_attempt(environ) and FOLDER_VARIABLE in environ and VERBOSE_VARIABLE not in environ


class NewestCheckpoint(NamedTuple):
    """Checkpoint that a process of a run has committed or loaded last, for the launcher."""

    path: str
    step: int

    def write(self, folder: Path) -> None:
        """Writes it to the folder of the launcher."""
        partial = Path(folder, f"{NEWEST_CHECKPOINT}.{os.getpid()}")
        with suppress(OSError):  # the launcher has ended, and its folder is gone
            partial.write_text(json.dumps(self), encoding="utf-8")
            partial.replace(Path(folder, NEWEST_CHECKPOINT))

    @classmethod
    def read(cls, folder: Path) -> NewestCheckpoint | None:
        path = folder / NEWEST_CHECKPOINT
        return cls(*json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


@dataclass(frozen=True)
class CheckpointReports:
    """Observer of a launched run that writes its newest checkpoint to the folder of the launcher."""

    folder: Path

    def checkpointed(self, path: str, step: int) -> None:
        """Writes a checkpoint that was committed or loaded."""
        NewestCheckpoint(path, step).write(self.folder)


@dataclass(frozen=True)
class Exits:
    """Exit codes of the processes of one attempt on this node, as the launcher saw them."""

    codes: Mapping[int, int]  # rank -> exit code, or the negative number of the signal
    attempt: int = 0
    asked: tuple[int, ...] = ()  # ranks that still ran when the launcher asked them to end
    asked_by: int = int(signal.SIGTERM)  # the signal
    asked_at: float = 0.0  # seconds since the epoch
    killed: tuple[int, ...] = ()  # ranks that did not end in time, which the launcher killed

    def write(self, folder: Path) -> None:
        (folder / EXITS).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Exits:
        """Reads the file of a folder, or returns no exits without a file."""
        path = folder / EXITS
        if not path.exists():
            return cls({})
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["codes"] = {int(rank): code for rank, code in fields["codes"].items()}
        fields["asked"], fields["killed"] = tuple(fields["asked"]), tuple(fields["killed"])
        return cls(**fields)


@dataclass(frozen=True)
class Outcome:
    """Result of a failed run."""

    code: int
    failures: tuple[Failure, ...]  # of the last attempt, the earliest first
    seen: Exits = field(default_factory=lambda: Exits({}))
    hang: str = ""  # the last report about a hang

    @property
    def finished(self) -> list[int]:
        """Ranks that ended with code 0 before the launcher asked them to."""
        return [rank for rank, code in self.seen.codes.items() if not code and rank not in self.seen.asked]


def collect(folder: Path, code: int, seen: Exits | None = None) -> Outcome:
    """Reads the files that the processes of a run that ended with a code wrote into a folder.

    Args:
        seen: Exits of the last attempt. None reads those of the folder.
    """
    entries = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.json")]
    failures = [Failure(**{**entry, "kind": tuple(entry["kind"])}) for entry in entries]
    seen = Exits.read(folder) if seen is None else seen
    last = max((seen.attempt, *(failure.attempt for failure in failures)))
    latest = [failure for failure in failures if failure.attempt == last]
    latest.sort(key=lambda failure: failure.moment)
    path, hang = folder / HANG, ""
    if path.exists() and (report := json.loads(path.read_text(encoding="utf-8")))["attempt"] >= last:
        hang = str(report["text"])
    return Outcome(code, tuple(latest), seen, hang)


def record_digest(folder: Path, digest: str) -> None:
    """Appends the end of a failed run to the records of its ranks, whose paths are in a folder.

    Raises:
        OSError: The records cannot be written any more, or the file system does not respond.
    """
    from accelerate.monitoring import End, without_host  # a run that succeeds needs none of it

    append_records(folder, [End(time=time.time(), how="failed", digest=without_host(digest))])


def append_records(folder: Path, records: Sequence[Record]) -> bool:
    """Appends records to those of the first rank of this machine, whose paths are in a folder.

    Returns:
        Whether a rank has left a path.

    Raises:
        OSError: The records cannot be written any more, or the file system does not respond.
    """
    from accelerate.monitoring import recorded_paths

    paths = recorded_paths(folder)
    _run_in_time(partial(_append, paths, records))
    return bool(paths)


def last_recorded_step(folder: Path, since: float) -> int:
    """Returns the last step after a time that a rank of this machine has recorded, or -1 without one.

    Raises:
        OSError: The records cannot be read, or the file system does not respond.
    """
    from accelerate.monitoring import last_step, recorded_paths

    steps: list[int] = [-1]

    def read() -> None:
        steps.extend(last_step(path, since) for _, path in recorded_paths(folder))

    _run_in_time(read)
    return max(steps)


def _run_in_time(action: Callable[[], None]) -> None:
    """Runs an action on the file system, and raises its OSError, or a TimeoutError if it takes too long."""
    errors: list[OSError] = []

    def run() -> None:
        try:
            action()
        except OSError as error:
            errors.append(error)

    thread = Thread(target=run, name="records", daemon=True)
    thread.start()
    thread.join(SECONDS_TO_RECORD)
    if thread.is_alive():
        raise TimeoutError(f"the file system has not responded for {SECONDS_TO_RECORD:g} seconds")
    for error in errors:
        raise error


def _append(paths: Sequence[tuple[int, Path]], records: Sequence[Record]) -> None:
    from accelerate.monitoring import RecordWriter

    first_ranks: dict[Path, int] = {}  # folder of records -> the first rank of this node
    for rank, path in paths:
        first_ranks.setdefault(path.parent, rank)
    for folder, rank in first_ranks.items():
        writer = RecordWriter(folder, rank)
        writer.write(*records)
        writer.close()


def shortened(text: str, width: int = 300) -> str:
    """Truncates a long line, and appends the number of missing characters."""
    return text if len(text) <= width else f"{text[:width]} ... ({len(text) - width} more characters)"


class Kind(IntEnum):
    """Category of a failure, ordered by how likely it is the cause."""

    OWN = 1  # an error of the script, or of a worker of its data loader
    SILENT = 2  # an exit code, or a signal that the launcher did not send, without a Python error
    LEFT = 3  # exit code 0 while others needed the rank
    HANG = 4  # ended because ranks waited for each other
    OF_OTHERS = 5  # an error that reports what another rank did or did not do
    LOST = 6  # a connection to another rank broke, or an operation with it timed out
    AFTER = 7  # an error of a rank that the launcher had asked to end


@dataclass(frozen=True)
class Suspect:
    """Rank whose end may be the cause, with its failure, or None if it recorded none."""

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
"""Messages also of other connections, which count only if `torch.distributed` raised them."""
_DISTRIBUTED = re.compile(r'File "[^"]*torch[/\\]distributed[/\\]')
_OF_OTHERS = re.compile(r"did not arrive within|did not end their attempt|on another process|does not answer")
_READ_BY_ANOTHER = re.compile(
    r"^RuntimeError: the loader failed on rank \d+, which reads for all ranks:$", re.MULTILINE
)
"""Traceback of ranks that raise the error of the rank that reads for them."""


def find_suspects(outcome: Outcome) -> list[Suspect]:
    """Returns all ranks that may have made the run fail, the most likely first."""
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

    def sort_key(suspect: Suspect) -> tuple[int, float]:
        # Signals come before exit codes, because a script that loses another rank may exit with a code.
        moment = suspect.failure.moment if suspect.failure else float(silent.get(suspect.rank, 0) > 0)
        return suspect.kind, moment

    return sorted(suspects, key=sort_key)


def find_first(outcome: Outcome) -> Suspect | None:
    """Returns the rank that most likely made the run fail, or None."""
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
