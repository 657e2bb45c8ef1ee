"""Reader of the records of a run for a report, in memory that does not grow with the number of steps.

`accelerate report` and the tests call `read_run`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Generic, TypeVar

from accelerate.base import describe_position
from accelerate.monitoring import (
    PHASES,
    Attempt,
    Checkpoint,
    Conclusion,
    End,
    Event,
    RankTimes,
    Record,
    Start,
    Values,
    Window,
    find_records,
    name_of_run,
    no_records,
)
from accelerate.report.goodput import Goodput, Timeline, measure_goodput
from accelerate.report.series import PhaseSeconds, Series

MAX_NAMES = 200
"""Most names of values in a report. Values with further names are counted."""
MAX_ENTRIES = 300
"""Most entries of each list of a report, such as events, checkpoints, starts and conclusions."""
MAX_DRAWN_RANKS = 8
"""Number of first ranks with lines in charts. All ranks have a row in the table of ranks."""
THROUGHPUT, MEMORY = "samples per second", "memory"
STEPS_PER_SECOND = "steps per second"
ITEMS, TFLOPS, MFU = "items per second, of all ranks", "TFLOP/s", "model FLOPs utilization"
MAX_DIMENSIONS = 16
"""Most dimensions of a mesh."""
CONFIG = "config"
"""Name of the event with the config passed to `init_trackers`, as JSON."""
LATEST, LARGEST_NUMBER = 1e11, 1e18


@dataclass
class RankTotals:
    """Totals of the records of one rank over all its starts."""

    rank: int
    starts: int = 0
    start: Start | None = None  # last start
    ends: list[End] = field(default_factory=list)  # ends of the rank and of the launcher after the last start
    steps: int = 0
    seconds: float = 0.0
    seconds_by: dict[str, float] = field(default_factory=dict)
    peak_memory: int = 0
    samples: int = 0
    items: float = 0.0  # over all ranks
    flops: float = 0.0  # model FLOPs of the windows in which they are counted
    counted_seconds: float = 0.0  # duration of these windows
    peak_seconds: float = 0.0  # duration of those in which the peak of the device is known
    seconds_at_peak: float = 0.0  # seconds in which the device would execute the FLOPs of these at its peak
    last_step: int = 0
    last_time: float = 0.0
    damaged: int = 0

    @property
    def flops_per_second(self) -> float:
        """Model FLOPs per second, or 0 if they are not counted."""
        return self.flops / self.counted_seconds if self.counted_seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Part of the peak FLOPs from 0 to 1, or None if it is not known."""
        return self.seconds_at_peak / self.peak_seconds if self.peak_seconds else None

    @property
    def position(self) -> str:
        """Index of the rank along each dimension of the mesh, or an empty text without a mesh."""
        return describe_position(mesh_of(self.start), self.rank)


RecordT = TypeVar("RecordT", Event, Conclusion, Checkpoint)


@dataclass
class RecordGroup(Generic[RecordT]):
    """Event, conclusion or checkpoint that one or several ranks have recorded, possibly at several steps."""

    record: RecordT
    count: int = 1
    ranks: set[int] = field(default_factory=set)
    last_step: int = 0


@dataclass
class RecordGroups(Generic[RecordT]):
    """Groups of records with equal content, at most `MAX_ENTRIES`."""

    by_key: dict[tuple[Any, ...], RecordGroup[RecordT]] = field(default_factory=dict)
    left_out: int = 0

    def add(self, key: tuple[Any, ...], rank: int, record: RecordT) -> RecordGroup[RecordT] | None:
        """Adds a record, and returns its group or None if there are too many groups."""
        entry = self.by_key.get(key)
        if entry is None:
            if len(self.by_key) >= MAX_ENTRIES:
                self.left_out += 1
                return None
            entry = self.by_key[key] = RecordGroup(record, 0)
        entry.count += 1
        entry.ranks.add(rank)
        entry.last_step = max(entry.last_step, record.step)
        return entry

    def in_order(self) -> list[RecordGroup[RecordT]]:
        return sorted(self.by_key.values(), key=lambda entry: entry.record.time)


@dataclass
class Run:
    """Content of the records of a run."""

    folder: Path
    name: str
    chosen: int | None = None  # rank whose timeline is read, in place of the first one
    ranks: dict[int, RankTotals] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)  # starts of the first rank
    num_starts: int = 0
    has_replicas: bool = False  # replica groups, which continue without one that has ended
    logged: dict[str, dict[int, Series]] = field(
        default_factory=dict
    )  # name -> rank -> values passed to `log`
    observed: dict[str, dict[int, Series]] = field(default_factory=dict)  # loss and learning rate of windows
    measured: dict[str, dict[int, Series]] = field(default_factory=dict)  # throughput and memory of windows
    texts: dict[str, str] = field(default_factory=dict)  # name -> last text that was logged
    left_out: int = 0  # number of values with further names
    phase_seconds: PhaseSeconds = field(default_factory=PhaseSeconds)  # phase times of the first rank
    # "least", "mean" and "most" of all ranks -> seconds of own work per step
    compute: dict[str, Series] = field(default_factory=dict)
    slow: dict[int, float] = field(default_factory=dict)  # rank -> largest lag behind the mean
    events: RecordGroups[Event] = field(default_factory=RecordGroups)
    conclusions: RecordGroups[Conclusion] = field(default_factory=RecordGroups)
    checkpoints: RecordGroups[Checkpoint] = field(default_factory=RecordGroups)
    config: dict[str, str] = field(default_factory=dict)  # config passed to `init_trackers`
    timeline: Timeline = field(default_factory=Timeline)
    stored: list[tuple[str, ...]] = field(default_factory=list)  # rows of checkpoints found in the folder

    @property
    def values(self) -> dict[str, dict[int, Series]]:
        """Values by name and rank, only the logged ones for names that the program logs itself."""
        return {**self.observed, **self.logged}

    @property
    def first_rank(self) -> int:
        return min(self.ranks) if self.chosen is None else self.chosen

    @property
    def num_group_starts(self) -> int:
        """Number of recorded times that ranks of replica groups were started again."""
        return sum(max(summary.starts - 1, 0) for summary in self.ranks.values()) if self.has_replicas else 0

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the dimensions of the mesh by name in the last start, empty without a mesh."""
        return mesh_of(self.starts[-1]) if self.starts else {}

    @property
    def last_time(self) -> float:
        return max(summary.last_time for summary in self.ranks.values())

    @property
    def num_attempts(self) -> int:
        """Number of attempts, also of those that ended before the first rank recorded its start."""
        return max(self.num_starts, len(self.timeline.merged_attempts()))

    def goodput(self) -> Goodput | None:
        """Returns the division of the wall time, or None if no start was recorded."""
        return measure_goodput(self.timeline, self.last_time)

    def current(self) -> list[RankTotals]:
        """Returns the ranks of the last start, or all ranks if no start was recorded."""
        size = self.starts[-1].world_size if self.starts else 0
        return [summary for rank, summary in sorted(self.ranks.items()) if not size or rank < size]

    def ends(self) -> list[End]:
        """Returns the ends of the ranks after the last start, failures first."""
        ends = [end for summary in self.current() for end in summary.ends]
        return sorted(ends, key=lambda end: (end.how != "failed", end.time))

    def outcome(self) -> tuple[str, str]:
        """Returns the state of the run in one or two words, and a sentence about it."""
        ends, current = self.ends(), self.current()
        if ends and ends[0].how == "failed":
            return "failed", "A rank failed."
        missing = [summary.rank for summary in current if not summary.ends]
        if missing and self.has_replicas and any(end.how == "finished" for end in ends):
            number = f"{len(current) - len(missing)} of {len(current)} ranks"
            return "finished", f"{number} finished. The others had no step after they were started again."
        if missing:
            ranks = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} of {len(current)} ranks"
            return "no end", f"No end is recorded for {ranks}: still running, or killed."
        if any(end.how == "stopped" for end in ends):
            return "stopped", "The run was stopped by request."
        return "finished", "All ranks finished."


def mesh_of(start: Start | None) -> dict[str, int]:
    """Returns the sizes of the dimensions of the mesh in a record, or none for sizes that make no mesh."""
    if start is None or not start.mesh or not 0 <= start.rank < start.world_size:
        return {}
    sizes = list(start.mesh.values())
    are_sizes = all(type(size) is int and 0 < size <= start.world_size for size in sizes)
    if not are_sizes or len(sizes) > MAX_DIMENSIONS or prod(sizes) != start.world_size:
        return {}
    return {name: size for name, size in start.mesh.items() if size > 1}


def read_run(folder: Path, name: str = "") -> Run:
    """Returns the content of all records of a run.

    Args:
        folder: Folder of the records, or `project_dir` of the `Accelerator` of a run of this user.
        name: Name of the run in the report. The default is the name of the folder.

    Raises:
        ConfigurationError: There are no records in the folder or of the project.
    """
    run = _read_run(folder, name, None)
    most = max(run.ranks.values(), key=lambda summary: (summary.steps, -summary.rank))
    # A replica group that was killed has no records of the steps that the others took without it.
    return _read_run(folder, name, most.rank) if run.has_replicas and most.rank != run.first_rank else run


def _read_run(folder: Path, name: str, chosen: int | None) -> Run:
    run = Run(folder, name or name_of_run(folder), chosen)
    for records in find_records(folder):
        summary = run.ranks.setdefault(records.rank, RankTotals(records.rank))
        for record in records:
            if _is_plausible(record):
                summary.last_time = max(summary.last_time, record.time)
                _READERS[type(record)](run, summary, record)
            else:
                summary.damaged += 1
        summary.damaged += records.damaged
    if not run.ranks:
        raise no_records(folder)
    return run


def _is_plausible(record: Record) -> bool:
    """Returns whether the numbers of a record can be displayed.

    The numbers in a damaged file may be of any size.
    """
    numbers = [value for value in vars(record).values() if isinstance(value, (int, float))]
    return 0 <= record.time < LATEST and all(abs(number) < LARGEST_NUMBER for number in numbers)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values that are numbers as floats, with infinity for integers that overflow."""
    return {name: _as_float(value) for name, value in values.items() if isinstance(value, (int, float))}


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _read_start(run: Run, summary: RankTotals, record: Start) -> None:
    summary.starts += 1
    summary.start = record
    summary.ends = []
    run.has_replicas |= any(row.name == "replicas" and row.value != "1" for row in record.settings)
    if summary.rank != run.first_rank:
        return
    run.num_starts += 1
    run.timeline.add_start(record)
    if len(run.starts) == MAX_ENTRIES:
        del run.starts[1]
    run.starts.append(record)


def _read_end(run: Run, summary: RankTotals, record: End) -> None:
    summary.ends = [*summary.ends[-3:], record]


def _read_window(run: Run, summary: RankTotals, record: Window) -> None:
    steps = max(record.last - record.first + 1, 1)
    summary.steps += steps
    summary.seconds += record.seconds
    summary.samples += record.samples
    summary.items += record.items
    if record.flops_per_second:
        summary.flops += record.flops_per_second * record.seconds
        summary.counted_seconds += record.seconds
    if record.mfu:
        summary.peak_seconds += record.seconds
        summary.seconds_at_peak += record.mfu * record.seconds
    summary.last_step = record.last
    summary.peak_memory = max(summary.peak_memory, record.peak_memory, record.memory)
    seconds_by = _numbers(record.seconds_by)
    for name in PHASES:
        summary.seconds_by[name] = summary.seconds_by.get(name, 0.0) + seconds_by.get(name, 0.0)
    if summary.rank == run.first_rank:
        run.phase_seconds.add(record.last, {name: seconds_by.get(name, 0.0) for name in PHASES})
        run.timeline.add_window(record, seconds_by, _numbers(record.recovery))
    if summary.rank < run.first_rank:  # of a replica group that was killed
        return
    _read_numbers(run, run.observed, summary.rank, record.last, _numbers(record.values))
    measured: dict[str, float] = {}
    if record.memory:
        measured[MEMORY] = record.memory
    if record.seconds > 0:
        measured[STEPS_PER_SECOND] = steps / record.seconds
        if record.samples:
            measured[THROUGHPUT] = record.samples / record.seconds
        if record.items:
            measured[ITEMS] = record.items / record.seconds
    if record.flops_per_second:
        measured[TFLOPS] = record.flops_per_second / 1e12
    if record.mfu:
        measured[MFU] = record.mfu
    _read_numbers(run, run.measured, summary.rank, record.last, measured)


def _read_values(run: Run, summary: RankTotals, record: Values) -> None:
    for name, value in record.values.items():
        is_text = not isinstance(value, (int, float))
        if is_text and (name in run.texts or len(run.texts) < MAX_NAMES):
            run.texts[name] = str(value)
    if record.step is not None:
        summary.last_step = record.step
    _read_numbers(run, run.logged, summary.rank, record.step, _numbers(record.values))


def _read_numbers(
    run: Run, series: dict[str, dict[int, Series]], rank: int, step: int | None, numbers: Mapping[str, float]
) -> None:
    if rank >= run.first_rank + MAX_DRAWN_RANKS:
        return
    for name, value in numbers.items():
        by_rank = series.get(name)
        if by_rank is None:
            if len(series) >= MAX_NAMES:
                run.left_out += 1
                continue
            by_rank = series[name] = {}
        if rank not in by_rank:
            by_rank[rank] = Series()
        by_rank[rank].add(step, value)


def _read_checkpoint(run: Run, summary: RankTotals, record: Checkpoint) -> None:
    """Stores the checkpoints of the first rank, and the errors of all ranks."""
    if summary.rank == run.first_rank:
        run.timeline.add_checkpoint(record)
    if summary.rank == run.first_rank or record.event == "failed":
        run.checkpoints.add((record.event, record.path, record.step, record.text), summary.rank, record)


def _read_event(run: Run, summary: RankTotals, record: Event) -> None:
    if record.name == CONFIG:
        summary.ends = []  # trackers start before the first step, and the start is recorded at the first step
        _read_config(run, summary, record.text)
        return
    run.events.add((record.name, record.text), summary.rank, record)


def _read_config(run: Run, summary: RankTotals, text: str) -> None:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        summary.damaged += 1
        return
    for name, value in values.items():
        if name in run.config or len(run.config) < MAX_ENTRIES:
            run.config[name] = str(value)


def _read_conclusion(run: Run, summary: RankTotals, record: Conclusion) -> None:
    """Stores the last text of each name, which is computed from the most steps."""
    entry = run.conclusions.add((record.name,), summary.rank, record)
    if entry is not None:
        entry.record = record


def _read_rank_times(run: Run, summary: RankTotals, record: RankTimes) -> None:
    compute = _numbers(record.compute)
    for name in compute.keys() & {"least", "mean", "most"}:
        run.compute.setdefault(name, Series()).add(record.last, compute[name])
    for rank, lag in _numbers(record.slow).items():
        if rank.isdecimal() and len(rank) < 10 and (int(rank) in run.slow or len(run.slow) < MAX_ENTRIES):
            run.slow[int(rank)] = max(run.slow.get(int(rank), 0.0), lag)


_READERS: Mapping[type[Record], Any] = {
    Start: _read_start,
    End: _read_end,
    Window: _read_window,
    Values: _read_values,
    Checkpoint: _read_checkpoint,
    Event: _read_event,
    Conclusion: _read_conclusion,
    RankTimes: _read_rank_times,
    Attempt: lambda run, summary, record: run.timeline.attempts.append(record),
}
