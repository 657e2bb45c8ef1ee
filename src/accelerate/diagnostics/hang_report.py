"""What is said about ranks that wait for each other: from what each of them does to a text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from accelerate.base import spell_ranks

MOST_STACKS = 3

COLLECTIVE = "collective"
TORCH = "torch"
STARTING = "starting"
DATA = "data"
ELSEWHERE = "elsewhere"
SILENT = "silent"
ENDED = "ended"

BACKWARD = "backward"
DEVICE = "unfinished collectives of its device"
_LONG = {BACKWARD, DEVICE}  # what may take long on all ranks, without a deadlock


@dataclass(frozen=True)
class RankState:
    """What one rank does.

    Attributes:
        rank: of the process.
        doing: `COLLECTIVE`, an operation of this package; `TORCH`, one that the script or torch calls
            itself; `STARTING`, it waits for the others to open the process group; `DATA`, it waits for a
            batch; `ELSEWHERE`, none; `SILENT`, the process lives and does not answer, or may live where it
            cannot be seen; `ENDED`.
        operation: name of the operation, or of the library function that the user's line called.
        sequence: number of the operation; 0 where they are not counted.
        facts: what the operation was called with.
        file: the user's file.
        line: the user's line.
        seconds: how long it has been there; 0 where that is not known.
        ending: how it ended, after "has"; for `SILENT` what is known of it.
        stack: of the thread that trains.
        host: machine of the process.
        pid: its number there.
        recorded: what torch's flight recorder says of it.
        details: lines about what it waits for, such as the workers of its loader.
    """

    rank: int
    doing: str
    operation: str = ""
    sequence: int = 0
    facts: str = ""
    file: str = ""
    line: int = 0
    seconds: float = 0.0
    ending: str = ""
    stack: str = ""
    host: str = ""
    pid: int = 0
    recorded: str = ""
    details: str = ""

    @property
    def waits(self) -> bool:
        """Whether it is in an operation that needs other ranks."""
        return self.doing in (COLLECTIVE, TORCH, STARTING)


def awaits_data(states: Sequence[RankState], seconds: float) -> bool:
    """Whether a rank has waited for a batch this long.

    Args:
        states: of all ranks.
        seconds: how long.
    """
    return any(state.doing == DATA and state.seconds >= seconds for state in states)


def is_hang(states: Sequence[RankState]) -> bool:
    """Whether ranks wait for others in a deadlock; a step that takes long on all ranks is no hang.

    Args:
        states: of all ranks.
    """
    waiting = [state for state in states if state.waits]
    if not waiting:
        return False
    operations = {state.operation for state in waiting}
    is_long_step = len(waiting) == len(states) and len(operations) == 1 and operations <= _LONG
    return not is_long_step


def compose(states: Sequence[RankState], folder: str) -> str:
    """Write the report: one sentence, then the stacks of the ranks that keep the others waiting.

    Ranks that wait for batches only, while no rank waits for another, are told of as such.

    Args:
        states: of all ranks, in their order.
        folder: paths of files below it are written without it.
    """
    groups = fold(states, folder)
    sentence = "; ".join(f"{spell_ranks([s.rank for s in group])} {text}" for text, group in groups)
    is_slow = not is_hang(states) and any(state.doing == DATA for state in states)
    lines = [f"accelerate: {'waiting for data' if is_slow else 'hang'}: {sentence}."]
    odd = odd_groups([group for _, group in groups])
    # Ranks that do the same stand alike, but what they wait for is of each its own.
    shown = [state for group in odd for state in (group if group[0].details else group[:1])]
    for state in shown[:MOST_STACKS]:
        who = f"rank {state.rank} (process {state.pid} on {state.host})"
        lines += [f"{who} stands at:", state.stack.rstrip()] if state.stack else []
        lines += [f"{who} {state.details.rstrip()}"] if state.details else []
    if any(state.doing == TORCH for state in states):
        lines += _compare_records(states)
    return "\n".join(lines)


def fold(states: Sequence[RankState], folder: str) -> list[tuple[str, list[RankState]]]:
    """Ranks that do the same, with what is said of them: those that wait first, those that ended last.

    Args:
        states: of all ranks.
        folder: see `compose`.
    """
    order = (STARTING, COLLECTIVE, TORCH, DATA, ELSEWHERE, SILENT, ENDED)
    groups: dict[tuple[object, ...], list[RankState]] = {}
    for state in sorted(states, key=lambda state: order.index(state.doing)):
        groups.setdefault(_likeness(state), []).append(state)
    return [(_describe(group, folder), group) for group in groups.values()]


def odd_groups(groups: Sequence[list[RankState]]) -> list[list[RankState]]:
    """The groups that do something else than most: those that are not waiting, or wait for something else.

    Args:
        groups: of ranks that do the same.
    """
    waiting = [group for group in groups if group[0].waits]
    most = max((len(group) for group in waiting), default=0)
    leaders = [group for group in waiting if len(group) == most]
    common = leaders[0] if len(leaders) == 1 else None
    return sorted((group for group in groups if group is not common), key=lambda group: group[0].waits)


def _compare_records(states: Sequence[RankState]) -> list[str]:
    """How far the collectives of torch have come on the ranks, where that differs."""
    groups: dict[str, list[int]] = {}
    for state in states:
        if state.recorded:
            groups.setdefault(state.recorded, []).append(state.rank)
    if len(groups) < 2:
        return []
    return [f"torch recorded on {spell_ranks(ranks)}: {text}." for text, ranks in groups.items()]


def _likeness(state: RankState) -> tuple[object, ...]:
    if state.doing == ELSEWHERE:
        return (state.doing, state.operation, state.file, state.line)
    return (state.doing, state.operation, state.sequence, state.file, state.line, state.ending)


def _describe(group: Sequence[RankState], folder: str) -> str:
    state, plural = group[0], len(group) > 1
    place = f"{_short(state.file, folder)}:{state.line}" if state.file else "an unknown line"
    since = max(member.seconds for member in group)
    if state.doing == COLLECTIVE:
        verb = "wait" if plural else "waits"
        return f"{verb} in {state.operation} #{state.sequence}, {place}, since {since:.0f} s"
    if state.doing == TORCH:
        verb = "wait" if plural else "waits"
        return f"{verb} in {state.operation} (not through accelerate), {place}, since {since:.0f} s"
    if state.doing == STARTING:
        return f"{'wait' if plural else 'waits'} in {state.operation}, {place}, since {since:.0f} s"
    if state.doing == DATA:
        return f"{'wait' if plural else 'waits'} for a batch, {place}, since {since:.0f} s"
    if state.doing == ELSEWHERE:
        where = f"at {place}" if state.operation.startswith("<") else f"in {state.operation}, {place}"
        return f"{'are' if plural else 'is'} {where} (not in a collective)"
    return f"{'have' if plural else 'has'} {state.ending}" if state.doing == ENDED else state.ending


def _short(file: str, folder: str) -> str:
    return file[len(folder) + 1 :] if file.startswith(f"{folder}{os.sep}") else file
