"""View of a run that is drawn from its records, during the run and after its end.

`accelerate monitor` draws it in a terminal of its own, and `launch/printed_views.py` prints it during
`accelerate launch --monitor`. Both read new lines of the records only, so a view costs the same at any step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import psutil

from accelerate.base import convert_bytes
from accelerate.monitoring.records import (
    PHASES,
    Checkpoint,
    Conclusion,
    End,
    RankTimes,
    Record,
    Start,
    Window,
    decode,
    format_flops,
    machine_digest,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

STYLES = ("red", "magenta", "green", "blue", "yellow", "cyan", "bright_red", "bright_black")
"""Colors of the phases in their order."""
BAR_WIDTH = 72
MAX_ROWS = 8
"""Rows of the table of ranks. Of more ranks only the remarkable ones are shown."""
LATE_SECONDS, LATE_WINDOWS = 10.0, 3
"""Seconds, and lengths of the last window, without a record after which the view says so."""
RUNNING = "running"


@dataclass
class RankView:
    """Records of one rank since its last start."""

    rank: int
    path: Path
    start: Start | None = None
    window: Window | None = None
    epoch: Window | None = None  # first window of this epoch
    end: End | None = None
    checkpoint: Checkpoint | None = None  # last one that was committed
    comparison: RankTimes | None = None
    values: dict[str, float] = field(default_factory=dict)
    conclusions: dict[str, str] = field(default_factory=dict)  # text by name
    time: float = 0.0  # of the last record
    _offset: int = 0

    def read(self) -> None:
        """Reads the complete lines that were appended since the last call."""
        try:
            with open(self.path, "rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:  # another run has replaced the file
                    self._offset = 0
                file.seek(self._offset)
                lines, _, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        self._offset += len(lines) + 1 if lines else 0
        for line in lines.splitlines():
            try:
                record = decode(line)
            except (ValueError, TypeError):  # a damaged line, which `accelerate report` counts
                continue
            if record is not None:
                self._add(record)

    def _add(self, record: Record) -> None:
        self.time = record.time
        if isinstance(record, Start):
            vars(self).update(
                vars(RankView(self.rank, self.path, record, time=record.time, _offset=self._offset))
            )
        elif isinstance(record, Window):
            if self.epoch is None or record.batch < self.epoch.batch:
                self.epoch = record
            self.window = record
            self.values |= record.values
        elif isinstance(record, End):
            self.end = record if self.end is None or self.end.how != "failed" else self.end
        elif isinstance(record, Checkpoint) and record.event == "committed":
            self.checkpoint = record
        elif isinstance(record, RankTimes):
            self.comparison = record
        elif isinstance(record, Conclusion):
            self.conclusions[record.name] = record.text

    @property
    def attempt(self) -> int:
        return self.start.attempt if self.start is not None else 0

    @property
    def shares(self) -> dict[str, float]:
        """Part of the time of the last window that each phase takes."""
        if self.window is None or not self.window.seconds:
            return {}
        return {name: seconds / self.window.seconds for name, seconds in self.window.seconds_by.items()}

    def per_second(self, count: float) -> float:
        return count / self.window.seconds if self.window is not None and self.window.seconds else 0.0

    def seconds_left(self) -> float:
        """Returns the seconds until the end of the epoch at its mean rate, or 0 if they are not known."""
        first, last = self.epoch, self.window
        if first is None or last is None or last.batch <= first.batch:
            return 0.0
        return (last.num_batches - last.batch) * (last.time - first.time) / (last.batch - first.batch)


class RunReader:
    """Reader of the records of all ranks of a run.

    Args:
        find_paths: Function that returns the paths of the records by rank, which may appear during the run.
        num_ranks: Number of ranks, or None for the world size of the last start.
    """

    def __init__(
        self, title: str, find_paths: Callable[[], Iterable[tuple[int, Path]]], num_ranks: int | None = None
    ) -> None:
        self._title, self._find_paths, self._num_ranks = title, find_paths, num_ranks
        self._ranks: dict[Path, RankView] = {}

    def read(self) -> RunView:
        """Returns the view of the run now."""
        self._ranks = {
            path: self._ranks.get(path) or RankView(rank, path) for rank, path in self._find_paths()
        }
        for view in self._ranks.values():
            view.read()
        ranks = sorted((rank for rank in self._ranks.values() if rank.start), key=lambda rank: rank.rank)
        last = max((rank.start for rank in ranks if rank.start), key=lambda start: start.time, default=None)
        world_size = last.world_size if last is not None else 0
        current = [rank for rank in ranks if rank.rank < world_size]
        return RunView(self._title, current, self._num_ranks or world_size, time.time())


def is_running(start: Start) -> bool:
    """Returns False if a process of this node has ended, and True for processes of other nodes."""
    return start.machine != machine_digest() or psutil.pid_exists(start.pid)


@dataclass(frozen=True)
class RunView:
    """State of a run at one time."""

    title: str  # name of the run or its script
    ranks: Sequence[RankView]  # ranks that have started, in their order
    num_ranks: int  # number of ranks that are expected
    now: float  # seconds since the epoch
    # Function that returns whether the process of a rank may still run.
    is_running: Callable[[Start], bool] = is_running

    @property
    def restarts(self) -> int:
        return max((rank.attempt for rank in self.ranks), default=0)

    @property
    def has_ended(self) -> bool:
        """True if no rank runs."""
        return len(self.ranks) >= self.num_ranks > 0 and all(
            self.state(rank) in ("finished", "stopped", "failed", "ended") for rank in self.ranks
        )

    def state(self, rank: RankView) -> str:
        """Returns the state of a rank in a few words."""
        if rank.start is None or rank.attempt < self.restarts:
            return "starting"
        if rank.end is not None:
            return rank.end.how
        if not self.is_running(rank.start):
            return "ended"
        if rank.window is None:
            return "before the first step"
        late = self.now - rank.time
        is_late = late > max(LATE_SECONDS, LATE_WINDOWS * rank.window.seconds)
        return f"no report for {format_seconds(late)}" if is_late else RUNNING

    def seconds(self) -> float:
        """Returns the seconds since the start, until now or the last record of a run that has ended."""
        starts = [rank.start.time for rank in self.ranks if rank.start is not None]
        end = max(rank.time for rank in self.ranks) if self.has_ended else self.now
        return end - min(starts, default=end)


def format_seconds(seconds: float) -> str:
    """Formats a time as seconds, or as hours, minutes and seconds."""
    return f"{seconds:.0f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def render(run: RunView) -> RenderableType:
    """Returns the view of a run for a console of rich."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    parts: list[RenderableType] = [Text(line, overflow="ellipsis", no_wrap=True) for line in format_head(run)]
    shares = mean_shares(run.ranks)
    if any(shares):
        parts += [_bar(shares), _legend(shares)]
    if run.ranks:
        parts.append(_table(run))
    parts += [Text(line, overflow="ellipsis", no_wrap=True) for line in format_facts(run)]
    parts += [Text(text, style="bold yellow") for text in find_conclusions(run.ranks)]
    return Panel(Group(*parts), title=Text(run.title), title_align="left", border_style="bright_black")


def format_head(run: RunView) -> list[str]:
    """Returns lines with the progress and speed of a run, and the values of its last step."""
    if not run.ranks:
        count = (
            f"{run.num_ranks} of {run.num_ranks} ranks are starting" if run.num_ranks else "no records yet"
        )
        return [count]
    parts = [format_seconds(run.seconds())]
    if run.restarts:
        parts.append(f"{run.restarts} restart{'s' if run.restarts > 1 else ''}")
    if len(run.ranks) < run.num_ranks:
        parts.append(f"{run.num_ranks - len(run.ranks)} of {run.num_ranks} ranks are starting")
    timed = [(rank, rank.window) for rank in run.ranks if rank.window is not None]
    if not timed:
        return [" · ".join(parts)]
    parts.append(f"step {max(window.last for _, window in timed):,}")
    rate = min(rank.per_second(window.last - window.first + 1) for rank, window in timed)
    parts.append(f"{rate:.4g} steps/s")
    if samples := fmean(rank.per_second(window.samples) for rank, window in timed):
        parts.append(f"{samples:.4g} samples/s on each rank")
    lines = [" · ".join(parts), *format_work(timed)]
    first, window = timed[0]
    if window.num_batches and window.batch:
        seconds = first.seconds_left()
        left = f", {format_seconds(seconds)} left" if seconds else ""
        lines.append(f"epoch: batch {window.batch:,} of {window.num_batches:,}{left}")
    if first.values:
        lines.append(" · ".join(f"{name} {value:.4g}" for name, value in first.values.items()))
    return lines


def format_work(timed: Sequence[tuple[RankView, Window]]) -> list[str]:
    """Returns a line with the items per second and the FLOPs, or none if they are not counted."""
    items = fmean(rank.per_second(window.items) for rank, window in timed)  # each rank has the total
    parts = [f"{items:.4g} items/s"] if items else []
    flops, mfu = (
        fmean(values) for values in zip(*((w.flops_per_second, w.mfu) for _, w in timed), strict=True)
    )
    parts += format_flops(flops, mfu)
    return [" · ".join(parts)] if parts else []


def mean_shares(ranks: Sequence[RankView]) -> list[float]:
    """Returns the part of the time of each phase as the mean of the ranks."""
    shares = [rank.shares for rank in ranks if rank.shares]
    return [fmean(each.get(name, 0.0) for each in shares) if shares else 0.0 for name in PHASES]


def _bar(shares: Sequence[float]) -> Text:
    from rich.text import Text

    bar, end, drawn = Text(), 0.0, 0
    for fraction, style in zip(shares, STYLES, strict=True):
        end += fraction
        bar.append("█" * (round(end * BAR_WIDTH) - drawn), style)
        drawn = round(end * BAR_WIDTH)
    return bar


def _legend(shares: Sequence[float]) -> Text:
    from rich.text import Text

    legend = Text()
    for name, fraction, style in zip(PHASES, shares, STYLES, strict=True):
        if round(fraction, 2):
            legend.append("■ ", style).append(f"{name} {fraction:.0%}  ")
    return legend


def _table(run: RunView) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("rank", "step", "data", "collectives", "memory", "peak", "state"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for rank in choose_ranks(run):
        state, window, shares = run.state(rank), rank.window, rank.shares
        cells = [str(rank.rank), f"{window.last:,}" if window is not None else "0"]
        cells += [f"{shares.get(name, 0.0):.0%}" for name in ("data", "collectives")]
        sizes = (0, 0) if window is None else (window.memory, window.peak_memory)
        cells += [convert_bytes(size) for size in sizes]
        table.add_row(*cells, state, style="" if state in (RUNNING, "finished") else "yellow")
    return table


def choose_ranks(run: RunView) -> list[RankView]:
    """Returns the slowest rank, the one with most memory, those that do not run, and the first ones."""
    comparison = _last_comparison(run.ranks)
    slowest = -1 if comparison is None else comparison.slowest
    most = _rank_with_most_memory(run.ranks).rank

    def priority(rank: RankView) -> tuple[bool, bool, int]:
        return rank.rank not in (slowest, most), run.state(rank) == RUNNING, rank.rank

    return sorted(sorted(run.ranks, key=priority)[:MAX_ROWS], key=lambda rank: rank.rank)


def _peak(rank: RankView) -> int:
    return rank.window.peak_memory if rank.window is not None else 0


def _rank_with_most_memory(ranks: Sequence[RankView]) -> RankView:
    return max(ranks, key=_peak)


def _last_comparison(ranks: Sequence[RankView]) -> RankTimes | None:
    return next((rank.comparison for rank in ranks if rank.comparison is not None), None)


def format_facts(run: RunView) -> list[str]:
    """Returns lines with the slowest rank, the one with most memory and the last checkpoint."""
    ranks, lines = run.ranks, []
    if hidden := max(len(ranks) - MAX_ROWS, 0):
        lines.append(f"and {hidden} other ranks")
    comparison = _last_comparison(ranks)
    if comparison is not None and (size := ranks[0].start.world_size if ranks[0].start else 0) > 1:
        most, mean = comparison.compute.get("most", 0.0), comparison.compute.get("mean", 0.0)
        others = (mean * size - most) / (size - 1)
        excess = most / others - 1 if others > 0 else 0.0
        by = f"{excess:.0%} slower in its own work than the mean of the others"
        lines.append(f"slowest of {size} ranks: rank {comparison.slowest}, {by}")
    if len(ranks) > 1 and _peak(most_memory := _rank_with_most_memory(ranks)):
        lines.append(f"most memory: rank {most_memory.rank}, {convert_bytes(_peak(most_memory))} at its peak")
    saves = [rank.checkpoint for rank in ranks if rank.checkpoint is not None]
    if saves:
        save = max(saves, key=lambda each: each.time)
        lines.append(f"last checkpoint: {save.path}, {format_seconds(max(run.now - save.time, 0.0))} ago")
    return lines


def find_conclusions(ranks: Sequence[RankView]) -> list[str]:
    """Returns the conclusions that hold, where each name has the text of the lowest rank."""
    texts: dict[str, str] = {}
    for rank in ranks:
        names = rank.window.conclusions if rank.window is not None else []
        texts = {name: rank.conclusions[name] for name in names if name in rank.conclusions} | texts
    return list(texts.values())
