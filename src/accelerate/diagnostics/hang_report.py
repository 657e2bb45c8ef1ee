"""The report about ranks that wait for each other: what each of them does, the text, and where it goes."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from accelerate.base import spell_ranks
from accelerate.launch import FOLDER_VARIABLE, HANG, HANG_KIND, Failure, count_of
from accelerate.state import note_event

MOST_STACKS = 3
EXIT_CODE = 1

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_NOTICE_A_DEATH = 1.5

BACKWARD = "backward"
DEVICE = "unfinished collectives of its device"
_LONG = {BACKWARD, DEVICE}  # what may take long on all ranks, without a deadlock


class Doing:
    """What a rank may do; in this order reports name it."""

    STARTING = "starting"  # waiting for the others to open the process group
    COLLECTIVE = "collective"  # an operation of this package
    TORCH = "torch"  # an operation that the script or torch calls itself
    DATA = "data"  # waiting for a batch
    OTHER_CODE = "other code"  # none of these
    SILENT = "silent"  # its process runs and does not answer, or may run where it cannot be seen
    ENDED = "ended"


@dataclass(frozen=True)
class RankState:
    """What one rank does."""

    rank: int
    doing: str  # one of `Doing`
    operation: str = ""  # its name, or that of the library function that the user's line called
    sequence: int = 0  # number of the operation; 0 where they are not counted
    facts: str = ""  # what the operation was called with
    file: str = ""  # the user's file
    line: int = 0
    seconds: float = 0.0  # how long it has been there; 0 where that is not known
    ending: str = ""  # how it ended, after "has"; for `SILENT` what is known of it
    stack: str = ""  # of the thread that trains
    host: str = ""
    pid: int = 0
    recorded: str = ""  # what torch's flight recorder says of it
    details: str = ""  # lines about what it waits for, such as the workers of its loader

    @property
    def waits(self) -> bool:
        """Whether it is in an operation that needs other ranks."""
        return self.doing in (Doing.COLLECTIVE, Doing.TORCH, Doing.STARTING)


@dataclass(frozen=True)
class Limits:
    """For how many seconds a rank may wait before it is reported, and whether all ranks end then."""

    seconds: float
    ends: bool

    @property
    def pause(self) -> float:
        """Seconds between two looks."""
        return min(SECONDS_BETWEEN_LOOKS, self.seconds / 10)

    @property
    def death(self) -> float:
        """Seconds of waiting after which a rank looks whether the others still run."""
        return min(SECONDS_TO_NOTICE_A_DEATH, self.seconds)


@dataclass(frozen=True)
class Report:
    """The result of an inquiry."""

    text: str  # the report itself; empty where there is nothing to report
    printer: int  # rank that prints it
    ends: bool  # all ranks end now
    num_answered: int  # ranks that answered
    ended: list[int]  # ranks that have ended
    moment: float = field(default_factory=time.time)  # seconds since the epoch


def is_hang(states: Sequence[RankState]) -> bool:
    """Whether ranks wait for others in a deadlock; a step that takes long on all ranks is none."""
    waiting = [state for state in states if state.waits]
    operations = {state.operation for state in waiting}
    is_long_step = len(waiting) == len(states) and len(operations) == 1 and operations <= _LONG
    return bool(waiting) and not is_long_step


def compose(states: Sequence[RankState], folder: str) -> str:
    """Write the report: one sentence, then the stacks of the ranks for which the others wait.

    Where ranks only wait for batches, and no rank for another, it says so. Paths of files below `folder` are
    written without it.
    """
    groups = fold(states, folder)
    sentence = "; ".join(f"{spell_ranks([s.rank for s in group])} {text}" for text, group in groups)
    is_slow = not is_hang(states) and any(state.doing == Doing.DATA for state in states)
    lines = [f"accelerate: {'waiting for data' if is_slow else 'hang'}: {sentence}."]
    # Of ranks that do the same one stack is enough; what each of them waits for differs.
    odd = odd_groups([group for _, group in groups])
    shown = [state for group in odd for state in (group if group[0].details else group[:1])]
    for state in shown[:MOST_STACKS]:
        who = f"rank {state.rank} (process {state.pid} on {state.host})"
        lines += [f"{who} is at:", state.stack.rstrip()] if state.stack else []
        lines += [f"{who} {state.details.rstrip()}"] if state.details else []
    # How far the collectives of torch have come on the ranks, where that differs.
    records = group_ranks((state.recorded, state.rank) for state in states if state.recorded)
    if len(records) > 1 and any(state.doing == Doing.TORCH for state in states):
        lines += [f"torch recorded on {spell_ranks(ranks)}: {text}." for text, ranks in records.items()]
    return "\n".join(lines)


def fold(states: Sequence[RankState], folder: str) -> list[tuple[str, list[RankState]]]:
    """Ranks that do the same, with their description: those that wait first, those that ended last."""
    order = list(vars(Doing).values())
    groups: dict[tuple[object, ...], list[RankState]] = {}
    for state in sorted(states, key=lambda state: order.index(state.doing)):
        own = () if state.doing == Doing.OTHER_CODE else (state.sequence, state.ending)
        same = (state.doing, state.operation, state.file, state.line, *own)
        groups.setdefault(same, []).append(state)
    return [(_describe(group, folder), group) for group in groups.values()]


def odd_groups(groups: Sequence[list[RankState]]) -> list[list[RankState]]:
    """The groups that do something else than most: those that are not waiting, or wait for something else."""
    waiting = [group for group in groups if group[0].waits]
    most = max((len(group) for group in waiting), default=0)
    leaders = [group for group in waiting if len(group) == most]
    common = leaders[0] if len(leaders) == 1 else None
    return sorted((group for group in groups if group is not common), key=lambda group: group[0].waits)


def group_ranks(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """The ranks of which the same text is given, by that text."""
    groups: dict[str, list[int]] = {}
    for text, rank in pairs:
        groups.setdefault(text, []).append(rank)
    return groups


def _describe(group: Sequence[RankState], folder: str) -> str:
    state, plural = group[0], len(group) > 1
    if state.doing in (Doing.SILENT, Doing.ENDED):
        return f"{'have' if plural else 'has'} {state.ending}" if state.doing == Doing.ENDED else state.ending
    file = state.file.removeprefix(f"{folder}{os.sep}")
    line = f"{file}:{state.line}" if file else "an unknown line"
    if state.doing == Doing.OTHER_CODE:
        where = f"at {line}" if state.operation.startswith("<") else f"in {state.operation}, {line}"
        return f"{'are' if plural else 'is'} {where} (not in a collective)"
    reason = {
        Doing.COLLECTIVE: f"in {state.operation} #{state.sequence}",
        Doing.TORCH: f"in {state.operation} (not through accelerate)",
        Doing.STARTING: f"in {state.operation}",
        Doing.DATA: f"for {state.operation or 'a batch'}",
    }[state.doing]
    seconds = max(member.seconds for member in group)
    return f"{'wait' if plural else 'waits'} {reason}, {line}, since {seconds:.0f} s"


class Outlet:
    """Where the reports of one rank go: standard error, the folder of the launcher, the end of the process.

    The variables in `environ` name the folder in which the launcher collects failures, and count restarts.
    """

    def __init__(self, rank: int, size: int, environ: Mapping[str, str]) -> None:
        self._rank, self._size = rank, size
        self._attempt = count_of(environ, "TORCHELASTIC_RESTART_COUNT", 0)
        folder = environ.get(FOLDER_VARIABLE)
        self._folder = Path(folder) if folder else None

    def publish(self, report: Report) -> None:
        """Print a report, and keep it for the launcher."""
        self._print(report.text)
        note_event("hang", report.text)
        if self._folder is not None and self._folder.is_dir():
            kept = {"text": report.text, "moment": report.moment, "attempt": self._attempt}
            (self._folder / HANG).write_text(json.dumps(kept), encoding="utf-8")

    def withdraw(self, text: str) -> None:
        """Print that a report no longer holds, and keep none."""
        self._print(text)
        if self._folder is not None:
            (self._folder / HANG).unlink(missing_ok=True)

    def prepare_end(self, report: Report) -> None:
        """Write for the launcher that this process ends because of a report."""
        if self._folder is None:
            return
        Failure(
            rank=self._rank,
            world_size=self._size,
            attempt=self._attempt,
            host=socket.gethostname(),
            pid=os.getpid(),
            moment=report.moment,
            kind=(HANG_KIND,),
            headline=report.text.splitlines()[0].removeprefix("accelerate: "),
            trace=report.text,
            place="",
        ).write(self._folder)

    def end(self) -> None:
        """End this process at once: its main thread is blocked where no exception reaches it.

        Its daemons, such as the workers of a loader, end with it, as they do when Python ends by itself.
        """
        own = {process.pid for process in psutil.Process().children()}
        for child in multiprocessing.active_children():  # of a fork: those of its parent too
            if child.daemon and child.pid in own:
                child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)

    @staticmethod
    def _print(text: str) -> None:
        # Parts of it come from other processes: nothing in it may control the terminal.
        text = "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
        print(text, file=sys.stderr, flush=True)
