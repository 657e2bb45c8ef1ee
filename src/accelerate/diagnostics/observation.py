"""What this rank does at this moment: in which operation it is, since when, and on which line."""

from __future__ import annotations

import time
from typing import Any

from accelerate.diagnostics import flight, loading, stacks
from accelerate.diagnostics.hang_report import COLLECTIVE, DATA, DEVICE, ELSEWHERE, TORCH, RankState
from accelerate.ops import Entry, Ring

MOST_WORK = 0.5
"""Part of the time that a process which only waits may spend on its processors, for all of its threads."""
STILL = 2.0
"""Seconds on one line after which the device is asked what it waits for."""


class Observation:
    """Follows the thread that trains, seen from another one.

    Args:
        ring: where the thread notes its operations.
        rank: of this process.
        host: machine of this process.
        pid: its number there.
    """

    def __init__(self, ring: Ring, rank: int, host: str, pid: int) -> None:
        self._ring = ring
        self._who: dict[str, Any] = {"rank": rank, "host": host, "pid": pid}
        self._still: tuple[object, int] | None = None
        self._since = 0.0
        self._used = 0.0

    def waited(self) -> tuple[object, float]:
        """What the thread waits in, and for how many seconds; `(None, 0.0)` when it does not wait.

        The first value differs between two waits. An operation that was not begun through this package has
        begun at the latest when this method saw the thread in it first and ever since. A backward that keeps
        the processors busy computes, and waits for nobody.
        """
        entry = self._ring.running()
        if entry is not None:
            self._still = None
            return entry.sequence, time.monotonic() - entry.started
        frame = stacks.innermost(self._ring.owner or 0)
        if frame is None:
            self._still = None
            return None, 0.0
        data = loading.find_wait(frame)
        if data is not None:
            return (DATA, data.token), self._seconds_in(data.token, 0)
        seconds = self._seconds_in(frame, frame.f_lasti)
        if not stacks.may_wait(frame):
            seconds = min(seconds, flight.seconds_on_device()) if seconds > STILL else 0.0
            return (("device", self._since), seconds) if seconds else (None, 0.0)
        if stacks.may_compute(frame) and time.process_time() - self._used > MOST_WORK * seconds:
            return None, 0.0
        return ("torch", self._since), seconds

    def _seconds_in(self, what: object, instruction: int) -> float:
        """For how long the thread has been seen on the same instruction, or in the same wait for a batch."""
        # The frame itself is kept until the next look: a number of it may come again in the next round.
        if self._still != (what, instruction):
            self._still = (what, instruction)
            self._since, self._used = time.monotonic(), time.process_time()
        return time.monotonic() - self._since

    def state(self) -> RankState:
        """Describe the thread."""
        entry = self._ring.running()
        frame = stacks.innermost(self._ring.owner or 0)
        if frame is None:
            return RankState(doing=ELSEWHERE, operation="no code: its training thread has ended", **self._who)
        position = stacks.read_position(frame)
        if entry is not None:
            return self._in_operation(entry, position)
        token, seconds = self.waited()
        data = loading.find_wait(frame)
        if data is not None:
            return self._for_data(data, position, seconds)
        waits_in = "" if token is None else position.waits_in or DEVICE
        return RankState(
            doing=TORCH if waits_in else ELSEWHERE,
            operation=waits_in or position.waits_in or position.function,
            file=position.file,
            line=position.line,
            seconds=seconds,
            stack=position.stack,
            recorded=flight.describe_recorded(),
            **self._who,
        )

    def _in_operation(self, entry: Entry, position: stacks.Position) -> RankState:
        return RankState(
            doing=COLLECTIVE,
            operation=entry.operation,
            sequence=entry.sequence,
            facts=entry.facts,
            file=entry.file or position.file,
            line=entry.line or position.line,
            seconds=time.monotonic() - entry.started,
            stack=position.stack,
            **self._who,
        )

    def _for_data(self, data: loading.BatchWait, position: stacks.Position, seconds: float) -> RankState:
        return RankState(
            doing=DATA,
            operation="batch",
            file=position.file,
            line=position.line,
            seconds=seconds,
            details=loading.describe(data),
            **self._who,
        )

    def release(self) -> None:
        """Let go of the frame that is kept."""
        self._still = None
