"""The live view of a run: what ranks wrote about themselves, drawn for a terminal by rich."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean
from typing import TYPE_CHECKING

import psutil

from accelerate.base import convert_bytes
from accelerate.monitoring.records import PHASES
from accelerate.monitoring.status import RankStatus

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

STYLES = ("red", "magenta", "green", "blue", "yellow", "cyan", "bright_red", "bright_black")
"""Colours of the phases, in their order."""
BAR = 72
MOST_RANKS = 8
"""Rows of the table of ranks; of more ranks only those are shown that differ."""
LATE = 10.0
"""Seconds without a report after which the view says so."""
RUNNING = "running"


@dataclass(frozen=True)
class RunView:
    """What is known of a run when it is drawn.

    Attributes:
        title: Name of the script.
        statuses: States of the ranks of this machine that have written one.
        num_ranks: Processes of this machine.
        began: When the launcher started them, in seconds since the epoch.
        now: Seconds since the epoch.
        is_running: Whether the process of this number runs.
    """

    title: str
    statuses: Sequence[RankStatus]
    num_ranks: int
    began: float
    now: float
    is_running: Callable[[int], bool] = psutil.pid_exists

    def state(self, status: RankStatus) -> str:
        """What a rank does, in words."""
        restarts = max(each.attempt for each in self.statuses)
        late = self.now - status.time
        if status.attempt < restarts:
            return "starting"
        if status.ended:
            return status.ended
        if not self.is_running(status.pid):
            return "ended"
        if not status.step:
            return "before the first step"
        return f"no report for {spell_seconds(late)}" if late > LATE else RUNNING


def spell_seconds(seconds: float) -> str:
    """Write a time: 12 s, or 1:02:03."""
    return f"{seconds:.0f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def render(run: RunView) -> RenderableType:
    """Return the live view of a run."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    parts: list[RenderableType] = [Text(line, overflow="ellipsis", no_wrap=True) for line in headlines(run)]
    shares = mean_shares(run.statuses)
    if any(shares):
        parts += [_bar(shares), _legend(shares)]
    if run.statuses:
        parts.append(_table(run))
    parts += [Text(line, overflow="ellipsis", no_wrap=True) for line in facts(run)]
    parts += [Text(text, style="bold yellow") for text in conclusions(run.statuses)]
    return Panel(Group(*parts), title=Text(run.title), title_align="left", border_style="bright_black")


def headlines(run: RunView) -> list[str]:
    """Return how far and how fast the run is, and the values of its last step."""
    restarts = max((status.attempt for status in run.statuses), default=0)
    parts = [spell_seconds(run.now - run.began)]
    if restarts:
        parts.append(f"{restarts} restart{'s' if restarts > 1 else ''}")
    if len(run.statuses) < run.num_ranks:
        parts.append(f"{run.num_ranks - len(run.statuses)} of {run.num_ranks} ranks are starting")
    if not run.statuses:
        return [" · ".join(parts)]
    first = run.statuses[0]
    parts.append(f"step {max(status.step for status in run.statuses):,}")
    parts.append(f"{min(status.steps_per_second for status in run.statuses):.4g} steps/s")
    if samples := fmean(status.samples_per_second for status in run.statuses):
        parts.append(f"{samples:.4g} samples/s on each rank")
    lines = [" · ".join(parts)]
    if first.num_batches and first.batch:
        left = f", {spell_seconds(first.seconds_left)} left" if first.seconds_left else ""
        lines.append(f"epoch: batch {first.batch:,} of {first.num_batches:,}{left}")
    if first.values:
        lines.append(" · ".join(f"{name} {value:.4g}" for name, value in first.values.items()))
    return lines


def mean_shares(statuses: Sequence[RankStatus]) -> list[float]:
    """Return the part of the time of each phase, as the mean of the ranks."""
    timed = [status for status in statuses if status.seconds]
    if not timed:
        return [0.0] * len(PHASES)
    return [fmean(status.seconds_by.get(name, 0.0) / status.seconds for status in timed) for name in PHASES]


def _bar(shares: Sequence[float]) -> Text:
    from rich.text import Text

    bar, end, drawn = Text(), 0.0, 0
    for share, style in zip(shares, STYLES, strict=True):
        end += share
        bar.append("█" * (round(end * BAR) - drawn), style)
        drawn = round(end * BAR)
    return bar


def _legend(shares: Sequence[float]) -> Text:
    from rich.text import Text

    legend = Text()
    for name, share, style in zip(PHASES, shares, STYLES, strict=True):
        if round(share, 2):
            legend.append("■ ", style).append(f"{name} {share:.0%}  ")
    return legend


def _table(run: RunView) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("rank", "step", "data", "collectives", "memory", "peak", "state"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for status in choose_ranks(run):
        state = run.state(status)
        shares = {name: seconds / status.seconds for name, seconds in status.seconds_by.items() if seconds}
        cells = [
            str(status.rank),
            f"{status.step:,}",
            *(f"{shares.get(n, 0.0):.0%}" for n in ("data", "collectives")),
        ]
        memory = [convert_bytes(size) for size in (status.memory, status.peak_memory)]
        table.add_row(*cells, *memory, state, style="" if state in (RUNNING, "finished") else "yellow")
    return table


def choose_ranks(run: RunView) -> list[RankStatus]:
    """Return the ranks to show: the slowest, the one with most memory, those that do not run, the first."""
    most = _largest(run.statuses)

    def weight(status: RankStatus) -> tuple[bool, bool, int]:
        is_extreme = status.rank in (run.statuses[0].slowest, most.rank)
        return not is_extreme, run.state(status) == RUNNING, status.rank

    return sorted(sorted(run.statuses, key=weight)[:MOST_RANKS], key=lambda status: status.rank)


def _largest(statuses: Sequence[RankStatus]) -> RankStatus:
    return max(statuses, key=lambda status: status.peak_memory)


def facts(run: RunView) -> list[str]:
    """Return what is said of all ranks: the slowest, the one with most memory, and the last checkpoint."""
    statuses, lines = run.statuses, []
    if hidden := max(len(statuses) - MOST_RANKS, 0):
        lines.append(f"and {hidden} other ranks of this machine")
    compared = next((status for status in statuses if status.slowest >= 0), None)
    if compared is not None:
        by = f"{compared.slowest_by:.0%} slower in its own work than the mean of the others"
        lines.append(f"slowest of {compared.world_size} ranks: rank {compared.slowest}, {by}")
    if len(statuses) > 1:
        most = _largest(statuses)
        lines.append(f"most memory: rank {most.rank}, {convert_bytes(most.peak_memory)} at its peak")
    saved = max(statuses, key=lambda status: status.last_checkpoint_time, default=None)
    if saved is not None and saved.last_checkpoint:
        age = spell_seconds(max(run.now - saved.last_checkpoint_time, 0.0))
        lines.append(f"last checkpoint: {saved.last_checkpoint}, {age} ago")
    return lines


def conclusions(statuses: Sequence[RankStatus]) -> list[str]:
    """Return the conclusions of the ranks, each name once: that of the lowest rank."""
    texts: dict[str, str] = {}
    for status in statuses:
        texts = status.conclusions | texts
    return list(texts.values())
