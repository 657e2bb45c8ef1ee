"""Records of a run, which are lines of JSON in one file per rank.

`record_thread.py` writes them, and `accelerate report` and `accelerate monitor` read them. They have no
arguments of the script and no host names. Later starts of the run in the same folder append to the files. A
process that is killed leaves at most its last line incomplete, and a reader skips lines that it cannot
decode. Readers ignore unknown kinds and fields, so a newer version may add some.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import re
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from accelerate.base import ConfigurationError, environ, wrong_value
from accelerate.monitoring.run_folders import find_runs

FOLDER = "run_records"
"""Name of the folder of records in a project folder of earlier versions."""

TAIL_BYTES = 1 << 18
"""Bytes at the end of a file of records in which the last step is searched."""
PATH_SUFFIX = ".path"
"""Suffix of the file in which a rank writes the path of its records for the launcher."""

PHASES = ("data", "moving", "forward", "backward", "collectives", "optimizer", "saving", "rest")
"""Names of the phases of a step, whose seconds add up to its wall time."""

_FILE = re.compile(r"rank-(\d+)\.jsonl")


def machine_digest() -> str:
    """Returns a digest of the host name, which is the same in all processes of this machine."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def without_host(text: str) -> str:
    """Returns a text for records, without the name of this machine in phrases such as "rank 1 on NAME"."""
    return re.sub(rf" on {re.escape(socket.gethostname())}(?![\w-])", "", text)


def recorded_rank(rank: int, size: int) -> int:
    """Returns the rank of a process in records, which is that among the processes of all replica groups.

    Args:
        rank: Rank within its replica group.
        size: World size of its replica group.
    """
    return int(environ.current().get(environ.REPLICA, "0")) * size + rank


@dataclass(frozen=True, kw_only=True)
class Record:
    """Base class of all records."""

    kind: ClassVar[str]
    time: float  # seconds since the epoch


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Value of the configuration of a run with its source.

    A value is a number, yes or no, or a word from a fixed list. Of other texts only the name is recorded.
    """

    name: str
    value: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Start(Record):
    """First record of a process."""

    kind: ClassVar[str] = "start"
    rank: int
    world_size: int
    pid: int
    machine: str = (
        ""  # digest of the host name, by which a reader on the same machine knows that it can see the pid
    )
    node: int = 0
    num_nodes: int = 1
    attempt: int = 0  # how often the launcher had restarted the processes
    device: str = "cpu"
    device_name: str = ""
    script: str = ""  # name of its file, without folders and arguments
    versions: dict[str, str] = field(default_factory=dict)  # of Python and of packages, by name
    settings: list[Setting] = field(default_factory=list)  # of rank 0 only, of each replica group
    mesh: dict[str, int] = field(default_factory=dict)  # dimension -> size, the outermost first


@dataclass(frozen=True, kw_only=True)
class Window(Record):
    """Consecutive steps of the optimizer, which ended at `time`."""

    kind: ClassVar[str] = "steps"
    first: int  # numbers of the first and the last step, from 1, over all starts of a run
    last: int
    seconds: float
    seconds_by: dict[str, float]  # by name of the phase
    recovery: dict[str, float] = field(default_factory=dict)
    """Parts of these seconds in a run with replica groups, which are "members" for the time of waiting for
    the members of steps, and "lost" for steps that were not committed."""
    memory: int = 0  # bytes allocated on the device, or resident in memory for the CPU
    peak_memory: int = 0  # bytes, since the process started
    samples: int = 0  # number that this rank has read, or 0 if it is not known
    items: float = 0.0  # number that the loop has counted, over all ranks, or 0 if it counts none
    flops_per_second: float = 0.0  # model FLOPs per second on this rank, or 0 if they are not counted
    mfu: float = 0.0  # their part of the peak of the device, or 0 if it is not known
    batch: int = 0  # number of batches of this pass over the first prepared loader
    num_batches: int = 0  # of the whole pass, or 0 if the loader has no length
    conclusions: list[str] = field(default_factory=list)  # names of those that hold
    values: dict[str, float] = field(
        default_factory=dict
    )  # at the last step: loss, learning_rate, gradient_norm


@dataclass(frozen=True, kw_only=True)
class Values(Record):
    """Values of one call of `Accelerator.log`."""

    kind: ClassVar[str] = "values"
    step: int | None
    values: dict[str, Any]  # numbers and text by name


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Record):
    """Checkpoint that was committed, verified or loaded, or whose save failed."""

    kind: ClassVar[str] = "checkpoint"
    event: str  # "committed", "failed", "verified" or "loaded"
    path: str
    step: int
    seconds: float = 0.0  # from the call to the commit
    blocked: float = 0.0  # seconds for which training waited
    size: int = 0  # bytes
    text: str = ""  # the error of one that failed


@dataclass(frozen=True, kw_only=True)
class Event(Record):
    """Single event, such as a hang, a stop, a warning, a recompilation or a config."""

    kind: ClassVar[str] = "event"
    name: str
    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class RankTimes(Record):
    """Comparison of the ranks over consecutive steps, which rank 0 writes."""

    kind: ClassVar[str] = "ranks"
    first: int
    last: int
    compute: dict[str, float]  # seconds of own work per step: "least", "mean" and "most" of all ranks
    slowest: int  # the rank with the most
    slow: dict[str, float] = field(
        default_factory=dict
    )  # rank -> how much slower than the mean, 0.25 for 25 %

    def shifted(self, first: int) -> RankTimes:
        """Returns the comparison with the ranks among those of all replica groups.

        Args:
            first: Rank there of rank 0 of the replica group that is compared.
        """
        slow = {str(first + int(rank)): slowdown for rank, slowdown in self.slow.items()}
        return replace(self, slowest=first + self.slowest, slow=slow)


@dataclass(frozen=True, kw_only=True)
class Conclusion(Record):
    """Conclusion about the speed of a run, with its figures."""

    kind: ClassVar[str] = "conclusion"
    name: str
    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Attempt(Record):
    """Attempt of a run that restarts, which the launcher of a machine records after its end."""

    kind: ClassVar[str] = "attempt"
    number: int  # how often the processes had been restarted
    began: float  # seconds since the epoch, before the processes were started
    rank: int = -1  # the rank that ended first, or -1 if the attempt did not fail
    text: str = ""  # how it ended
    is_cause: bool = False  # whether it did not only lose another rank
    failed: float = 0.0  # when a rank recorded an error, or the launcher asked the others to end, or 0
    step: int = -1  # least number of steps that it had taken, or -1 if that is not known
    checkpoint: str = ""  # the newest checkpoint at that time
    checkpoint_step: int = 0


@dataclass(frozen=True, kw_only=True)
class End(Record):
    """End of a process that was not killed."""

    kind: ClassVar[str] = "end"
    how: str  # "finished", "failed" or "stopped"
    error: str = ""  # the traceback of one that failed
    digest: str = ""  # what the launcher printed about the failure


def format_flops(flops_per_second: float, mfu: float | None) -> list[str]:
    """Formats model FLOPs per second on a rank and their part of the peak, or nothing if they are unknown."""
    flops = [f"{flops_per_second / 1e12:.4g} TFLOP/s on each rank"] if flops_per_second else []
    return flops + ([f"MFU {mfu:.1%}"] if mfu else [])


class RecordQueue(deque[Record]):
    """Records of this process that are not written yet, without the oldest ones if there are too many."""

    def __init__(self) -> None:
        super().__init__(maxlen=1000)


KINDS: dict[str, type[Record]] = {
    kind.kind: kind
    for kind in (Start, Window, Values, Checkpoint, Event, RankTimes, Conclusion, Attempt, End)
}


class RecordWriter:
    """Writer that appends the records of one rank to its file before `write` returns.

    Args:
        folder: Folder of the records, which is created if it does not exist.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = (folder / f"rank-{rank:05}.jsonl").absolute()
        self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115 (open until `close`)
        try:
            if self._file.seek(0, os.SEEK_END):
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")
        except OSError:  # a pipe
            self._file.close()
            raise
        if launch := environ.current().get(environ.FAILURE_FOLDER):
            with suppress(OSError):  # the launcher has ended, and its folder is gone
                Path(launch, self.path.stem + PATH_SUFFIX).write_text(str(self.path), encoding="utf-8")

    def write(self, *records: Record) -> None:
        """Appends records.

        Raises:
            OSError: The file has been removed or replaced, or the disk is full.
        """
        if not os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno())):
            raise FileNotFoundError(errno.ENOENT, "another file replaced the records", str(self.path))
        content = b"".join(encode(record) for record in records)
        if self._file.write(content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        self._file.close()


def recorded_paths(folder: Path) -> list[tuple[int, Path]]:
    """Returns the rank and the file of records of each process of a launch, by its folder."""
    paths = [Path(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"rank-*{PATH_SUFFIX}"))]
    return [(int(match[1]), path) for path in paths if (match := _FILE.fullmatch(path.name))]


def last_step(path: Path, since: float) -> int:
    """Returns the number of the last step in a file of records after a time, or -1 without one.

    Only the end of the file is read.
    """
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            record = decode(line)
        except (ValueError, TypeError):  # damaged, or cut by the position in the file
            continue
        if isinstance(record, Window):
            return record.last if record.time > since else -1
    return -1


def encode(record: Record) -> bytes:
    """Returns a record as one line."""
    values = {"kind": record.kind, **asdict(record)}
    return json.dumps(values, default=str).encode() + b"\n"


def decode(line: bytes) -> Record | None:
    """Returns the record of a line, or None for an unknown kind.

    Raises:
        ValueError: The line is damaged.
    """
    try:
        values = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"a record is one line of JSON: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
        raise ValueError("a record is a JSON dictionary with a kind")
    kind = KINDS.get(values["kind"])
    if kind is None:
        return None
    known: dict[str, Any] = {}
    for name, kinds, is_required in _fields(kind):  # type: ignore[arg-type]
        if name in values:
            if not isinstance(values[name], kinds):
                raise ValueError(f"{name} of a record is {values[name]!r}, and should be one of {kinds}")
            known[name] = values[name]
        elif is_required:
            raise ValueError(f"a record of the kind {kind.kind!r} has {name!r}, which is missing")
    if kind is Start:
        known["settings"] = [Setting(**setting) for setting in known.get("settings", ())]
    return kind(**known)


@functools.cache
def _fields(kind: type[Record]) -> list[tuple[str, tuple[type, ...], bool]]:
    """Returns the name of each field, the outer types of its values, and whether it has no default."""
    hints = get_type_hints(kind)
    return [
        (entry.name, _types(hints[entry.name]), entry.default is MISSING and entry.default_factory is MISSING)
        for entry in fields(kind)
    ]


def _types(hint: object) -> tuple[type, ...]:
    """Returns the outer types of a hint, which include integers for floats."""
    if hint is float:
        return (int, float)
    if hasattr(hint, "__origin__"):
        return (hint.__origin__,)
    return tuple(getattr(hint, "__args__", (hint,)))


@dataclass
class RankRecords:
    """Iterable over the records in the file of one rank."""

    rank: int
    path: Path
    damaged: int = 0  # lines that could not be read, after the iteration

    def __iter__(self) -> Iterator[Record]:
        self.damaged = 0
        with open(self.path, "rb") as file:
            for line in file:
                try:
                    record = decode(line)
                except (ValueError, TypeError):
                    self.damaged += 1
                else:
                    if record is not None:
                        yield record


def find_records(folder: Path) -> list[RankRecords]:
    """Returns the files of records by rank.

    Args:
        folder: Folder of the records, or of a project, whose newest run is in the state folder.
    """
    entries = _list_records([folder / FOLDER, folder])
    for run in find_runs(folder)[:1]:
        recorded = _list_records([run])
        entries = max(entries, recorded, key=_last_change)
    return sorted(entries, key=lambda item: item.rank)


def no_records(folder: Path) -> ConfigurationError:
    """Returns the error about a folder without records."""
    reason = "it has no records, and no run of this user on this machine has it as its project"
    fix = "Pass project_dir to Accelerator and name it here, or name the folder of ACCELERATE_RUN_RECORDS"
    return wrong_value("DIR", str(folder), reason, fix)


def _list_records(folders: Sequence[Path]) -> list[RankRecords]:
    paths = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    found = [(match, path) for path in paths if (match := _FILE.fullmatch(path.name)) and path.is_file()]
    return [RankRecords(int(match[1]), path) for match, path in found]


def _last_change(entries: Sequence[RankRecords]) -> float:
    return max((entry.path.stat().st_mtime for entry in entries), default=0.0)
