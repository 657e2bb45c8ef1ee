"""What this rank does at this moment: in which operation it is, since when, and on which line."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable
from typing import Any

from accelerate import torch_private
from accelerate.diagnostics import loader_watch, stacks
from accelerate.diagnostics.hang_report import COLLECTIVE, DATA, DEVICE, ELSEWHERE, TORCH, RankState
from accelerate.ops import Ring

MOST_WORK = 0.5
"""Part of the time that a process which only waits may spend on its processors, for all of its threads."""
STILL = 2.0
"""Seconds on one line after which the device is asked what it waits for."""

_ON_DEVICE = "dump_nccl_trace"
_DUMPS = ("dump_fr_trace", _ON_DEVICE)
"""Names of torch's flight recorders; a build of torch has those of its communication libraries."""


class Observation:
    """Follows the thread that trains, from another one.

    Args:
        ring: the flight record of the thread.
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
        the processors busy computes, and waits for no other process.
        """
        entry = self._ring.running()
        if entry is not None:
            self._still = None
            return entry.sequence, time.monotonic() - entry.started
        frame = stacks.innermost(self._ring.owner or 0)
        if frame is None:
            self._still = None
            return None, 0.0
        batch = loader_watch.find_wait(frame)
        if batch is not None:
            return (DATA, batch.token), self._seconds_in(batch.token, 0)
        seconds = self._seconds_in(frame, frame.f_lasti)
        if not stacks.may_wait(frame):
            seconds = min(seconds, seconds_on_device()) if seconds > STILL else 0.0
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
        facts: dict[str, Any] = {"file": position.file, "line": position.line, **self._who}
        if entry is not None:
            called = {"file": entry.file or position.file, "line": entry.line or position.line}
            return RankState(
                doing=COLLECTIVE,
                operation=entry.operation,
                sequence=entry.sequence,
                facts=entry.facts,
                seconds=time.monotonic() - entry.started,
                stack=position.stack,
                **{**facts, **called},
            )
        token, seconds = self.waited()
        batch = loader_watch.find_wait(frame)
        if batch is not None:
            details = loader_watch.describe(batch)
            return RankState(doing=DATA, operation="batch", seconds=seconds, details=details, **facts)
        waits_in = "" if token is None else position.waits_in or DEVICE
        return RankState(
            doing=TORCH if waits_in else ELSEWHERE,
            operation=waits_in or position.waits_in or position.function,
            seconds=seconds,
            stack=position.stack,
            recorded=describe_recorded(),
            **facts,
        )

    def release(self) -> None:
        """Drop the frame that is kept."""
        self._still = None


def describe_recorded() -> str:
    """Say for each process group how far torch's collectives have come; empty where nothing was recorded."""
    return "; ".join(text for name in _DUMPS for text in _describe_groups(_read(name)))


def seconds_on_device() -> float:
    """For how long the oldest collective of an accelerator has been running; 0.0 where none is.

    The thread that trains only enqueues these, and waits for them where it needs a result.
    """
    entries = _entries(_read(_ON_DEVICE))
    begun = [entry["time_created_ns"] for entry in entries if entry["state"] != "completed"]
    return max(time.time() - min(begun) / 1e9, 0.0) if begun else 0.0


def _read(name: str) -> dict[str, Any]:
    dump = getattr(torch_private, name)
    if dump is None:
        return {}
    trace: dict[str, Any] = pickle.loads(dump(includeStackTraces=False))
    return trace


def _entries(trace: dict[str, Any]) -> Iterable[dict[str, Any]]:
    return (entry for entry in trace.get("entries", ()) if not entry["is_p2p"])


def _describe_groups(trace: dict[str, Any]) -> list[str]:
    last = {entry["process_group"]: entry for entry in _entries(trace)}
    status = trace.get("pg_status", {})
    return [
        f"{description or number}: {_progress(status.get(number, {}))}the last one is {_spell(entry)}"
        for (number, description), entry in last.items()
    ]


def _progress(status: dict[str, int]) -> str:
    enqueued, completed = (status.get(f"last_{kind}_collective", -1) for kind in ("enqueued", "completed"))
    return f"{max(completed, 0)} of {enqueued} collectives completed, " if enqueued > 0 else ""


def _spell(entry: dict[str, Any]) -> str:
    name, shapes, dtypes = entry["profiling_name"], entry["input_sizes"], entry["input_dtypes"]
    inputs = ", ".join(f"{list(shape)} {dtype}" for shape, dtype in zip(shapes, dtypes, strict=False))
    return f"#{entry['collective_seq_id']} {name} of {inputs or 'nothing'}"
