"""Hang report about ranks that wait for each other, with its text and its destinations.

`watching` and `arrivals` build it from the states of the ranks. It goes to standard error, to the event
records and to a file for the launcher.
"""

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

from accelerate.base import describe_position, spell_ranks
from accelerate.launch import FOLDER_VARIABLE, HANG, HANG_KIND, Failure, count_of, starts_again
from accelerate.monitoring import without_host
from accelerate.state import AcceleratorState, mesh_sizes, record_event

MAX_STACKS = 3
MAX_RANKS = 16  # whose positions in the mesh are listed
EXIT_CODE = 1  # of a process that ends after a report

CHECK_INTERVAL = 1.0  # seconds
LIVENESS_TIMEOUT = 1.5  # seconds

BACKWARD = "backward"
DEVICE = "unfinished collectives of its device"
_LONG_OPERATIONS = {BACKWARD, DEVICE}  # may take long on all ranks without a deadlock


class Activity:
    """Activities of a rank, in the order in which reports list them."""

    STARTING = "starting"  # waits for other ranks in `init_process_group`
    COLLECTIVE = "collective"  # in an operation of this package
    TORCH = "torch"  # in an operation that the script or torch calls itself
    DATA = "data"  # waits for a batch
    OTHER_CODE = "other code"  # none of these
    SILENT = "silent"  # does not answer, although its process runs or may run on another node
    ENDED = "ended"


@dataclass(frozen=True)
class RankState:
    """State of one rank, with its activity, line and stack."""

    rank: int
    activity: str  # a constant of `Activity`
    operation: str = ""  # name of the operation, or of the library function that the user's line called
    sequence: int = 0  # sequence number of the operation; 0 if operations are not counted
    arguments: str = ""  # description of the arguments of the operation
    file: str = ""  # the user's file
    line: int = 0
    seconds: float = 0.0  # time at this line; 0 if unknown
    ending: str = ""  # how it ended, as text after "has"; for `SILENT` a description of its process
    stack: str = ""  # of the training thread
    host: str = ""
    pid: int = 0
    recorded: str = ""  # progress of collectives in torch's flight recorder
    details: str = ""  # lines about the wait, such as the states of the workers of its loader

    @property
    def waits(self) -> bool:
        """Returns whether the rank is in an operation that needs other ranks."""
        return self.activity in (Activity.COLLECTIVE, Activity.TORCH, Activity.STARTING)


@dataclass(frozen=True)
class Limits:
    """Timeout of waits before they are reported, and whether the report aborts the run."""

    timeout: float  # seconds
    aborts: bool  # all ranks end after the report

    @property
    def interval(self) -> float:
        """Seconds between two checks."""
        return min(CHECK_INTERVAL, self.timeout / 10)

    @property
    def liveness_timeout(self) -> float:
        """Seconds of waiting after which a rank checks whether the other ranks still run."""
        return min(LIVENESS_TIMEOUT, self.timeout)


@dataclass(frozen=True)
class Report:
    """Result of an inquiry over the store about the states of all ranks."""

    text: str  # text of the report; empty if there is nothing to report
    printer: int  # rank that prints the text
    aborts: bool  # all ranks end after the report
    num_answered: int  # number of ranks that answered
    ended: list[int]  # ranks that have ended
    moment: float = field(default_factory=time.time)  # seconds since the epoch


def is_hang(states: Sequence[RankState]) -> bool:
    """Returns whether ranks wait for others in a deadlock.

    A backward or an operation of the device that takes long on all ranks is not a deadlock.
    """
    waiting = [state for state in states if state.waits]
    operations = {state.operation for state in waiting}
    is_long_step = len(waiting) == len(states) and len(operations) == 1 and operations <= _LONG_OPERATIONS
    return bool(waiting) and not is_long_step


def format_report(states: Sequence[RankState], folder: str) -> str:
    """Returns the report, which is a sentence followed by the stacks of the ranks for which others wait.

    If ranks only wait for batches, and no rank waits for another, the report begins with "waiting for data".
    Paths of files in `folder` are relative to it.
    """
    groups = group_states(states, folder)
    sentence = "; ".join(f"{spell_ranks([s.rank for s in group])} {text}" for text, group in groups)
    is_slow = not is_hang(states) and any(state.activity == Activity.DATA for state in states)
    lines = [f"accelerate: {'waiting for data' if is_slow else 'hang'}: {sentence}."]
    # One stack is enough for ranks with the same activity, but the details of their waits differ.
    odd = odd_groups([group for _, group in groups])
    shown = [state for group in odd for state in (group if group[0].details else group[:1])]
    for state in shown[:MAX_STACKS]:
        name = f"rank {state.rank} (process {state.pid} on {state.host})"
        lines += [f"{name} is at:", state.stack.rstrip()] if state.stack else []
        lines += [f"{name} {state.details.rstrip()}"] if state.details else []
    if places := _positions([state.rank for state in (states if len(states) <= MAX_RANKS else shown)]):
        lines.append(f"In the mesh {places}.")
    # The progress of the collectives of torch on the ranks, if it differs.
    records = group_ranks((state.recorded, state.rank) for state in states if state.recorded)
    if len(records) > 1 and any(state.activity == Activity.TORCH for state in states):
        lines += [f"torch recorded on {spell_ranks(ranks)}: {text}." for text, ranks in records.items()]
    return "\n".join(lines)


def _positions(ranks: Iterable[int]) -> str:
    """Returns the positions of ranks in the mesh of the run, or nothing without a mesh."""
    mesh = AcceleratorState._shared_state.get("device_mesh")
    if mesh is None or mesh.ndim < 2:
        return ""
    sizes = mesh_sizes(mesh)
    return "; ".join(f"rank {rank} = {describe_position(sizes, rank)}" for rank in sorted(ranks))


def group_states(states: Sequence[RankState], folder: str) -> list[tuple[str, list[RankState]]]:
    """Returns groups of ranks with the same activity and line, each with a description.

    Waiting ranks are first, ended ranks last.
    """
    order = list(vars(Activity).values())
    groups: dict[tuple[object, ...], list[RankState]] = {}
    for state in sorted(states, key=lambda state: order.index(state.activity)):
        details = () if state.activity == Activity.OTHER_CODE else (state.sequence, state.ending)
        key = (state.activity, state.operation, state.file, state.line, *details)
        groups.setdefault(key, []).append(state)
    return [(_describe(group, folder), group) for group in groups.values()]


def odd_groups(groups: Sequence[list[RankState]]) -> list[list[RankState]]:
    """Returns the groups that do not wait, and those that wait in another operation than most ranks."""
    waiting = [group for group in groups if group[0].waits]
    max_size = max((len(group) for group in waiting), default=0)
    largest = [group for group in waiting if len(group) == max_size]
    common = largest[0] if len(largest) == 1 else None
    return sorted((group for group in groups if group is not common), key=lambda group: group[0].waits)


def group_ranks(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Returns the ranks that have the same text, by text."""
    groups: dict[str, list[int]] = {}
    for text, rank in pairs:
        groups.setdefault(text, []).append(rank)
    return groups


def _describe(group: Sequence[RankState], folder: str) -> str:
    state, plural = group[0], len(group) > 1
    if state.activity in (Activity.SILENT, Activity.ENDED):
        return (
            f"{'have' if plural else 'has'} {state.ending}"
            if state.activity == Activity.ENDED
            else state.ending
        )
    file = state.file.removeprefix(f"{folder}{os.sep}")
    line = f"{file}:{state.line}" if file else "an unknown line"
    if state.activity == Activity.OTHER_CODE:
        where = f"at {line}" if state.operation.startswith("<") else f"in {state.operation}, {line}"
        return f"{'are' if plural else 'is'} {where} (not in a collective)"
    # A backward pass of `Accelerator.backward` waits in torch's collectives, too.
    outside = "" if state.operation == "backward" else " (not through accelerate)"
    reason = {
        Activity.COLLECTIVE: f"in {state.operation} #{state.sequence}",
        Activity.TORCH: f"in {state.operation}{outside}",
        Activity.STARTING: f"in {state.operation}",
        Activity.DATA: f"for {state.operation or 'a batch'}",
    }[state.activity]
    seconds = max(member.seconds for member in group)
    return f"{'wait' if plural else 'waits'} {reason}, {line}, since {seconds:.0f} s"


class HangReporter:
    """Reporter that prints the hang reports of one rank, stores them for the launcher and ends the process.

    The variables in `environ` have the folder in which the launcher collects failures, and the restart count.
    """

    def __init__(self, rank: int, size: int, environ: Mapping[str, str]) -> None:
        self._rank, self._size = rank, size
        self._attempt = count_of(environ, "TORCHELASTIC_RESTART_COUNT", 0)
        self._starts_again = starts_again(environ)
        folder = environ.get(FOLDER_VARIABLE)
        self._folder = Path(folder) if folder else None

    def publish(self, report: Report) -> None:
        """Prints a report, and stores it as an event and in a file for the launcher.

        A report only about ranks that have ended is not printed if the launcher restarts all of them.
        """
        if not (report.ended and self._starts_again):
            self._print(report.text)
        record_event("hang", without_host(report.text))
        if self._folder is not None and self._folder.is_dir():
            content = {"text": report.text, "moment": report.moment, "attempt": self._attempt}
            (self._folder / HANG).write_text(json.dumps(content), encoding="utf-8")

    def withdraw(self, text: str) -> None:
        """Prints a message that the hang is over, and deletes the file for the launcher."""
        self._print(text)
        if self._folder is not None:
            (self._folder / HANG).unlink(missing_ok=True)

    def prepare_end(self, report: Report) -> None:
        """Writes a failure record, so that the launcher knows that this process ends after a report."""
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
        """Ends this process at once, because its main thread is blocked and receives no exception.

        Its daemonic child processes, such as the workers of a loader, are killed, as at a regular exit of
        Python.
        """
        children = {process.pid for process in psutil.Process().children()}
        for child in multiprocessing.active_children():  # in a fork this includes the children of its parent
            if child.daemon and child.pid in children:
                child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)

    @staticmethod
    def _print(text: str) -> None:
        # Parts of the text come from other processes, and must not contain control sequences of the terminal.
        text = "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
        print(text, file=sys.stderr, flush=True)
