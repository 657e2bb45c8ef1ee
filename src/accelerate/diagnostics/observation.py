"""What the training thread of this rank does: the operation that it waits in, the line, and for how long."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable
from typing import Any

from accelerate import torch_private
from accelerate.diagnostics import loader_watch, stacks
from accelerate.diagnostics.hang_report import COLLECTIVE, DATA, DEVICE, OTHER_CODE, TORCH, RankState
from accelerate.ops import Ring

MOST_WORK = 0.5
"""Processor time per second, of all threads together, up to which a process counts as waiting."""
STILL = 2.0
"""Seconds on one line after which unfinished collectives of the device are looked for."""

_ON_DEVICE = "dump_nccl_trace"
_DUMPS = ("dump_fr_trace", _ON_DEVICE)
"""Names of torch's flight recorders; a build of torch has those of its communication libraries."""


class Observation:
    """Observes the training thread of this process from another thread; `ring` is its flight record."""

    def __init__(self, ring: Ring, rank: int, host: str, pid: int) -> None:
        self._ring = ring
        self._process: dict[str, Any] = {"rank": rank, "host": host, "pid": pid}
        self._last_seen: tuple[object, int] | None = None
        self._since = 0.0
        self._used = 0.0

    def waited(self) -> tuple[object, float]:
        """Return a value that identifies the present wait, and its seconds; `(None, 0.0)` without a wait.

        An operation that is not in the flight record began at the latest when this method first saw the
        thread in it. A backward pass that keeps the processors busy computes, and waits for no process.
        """
        entry = self._ring.running()
        if entry is not None:
            self._last_seen = None
            return entry.sequence, time.monotonic() - entry.started
        frame = stacks.innermost(self._ring.owner or 0)
        if frame is None:
            self._last_seen = None
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
        """Seconds since the thread was first seen at this instruction, or in this wait for a batch."""
        # The frame itself is kept until the next look: its `id` may be that of another frame by then.
        if self._last_seen != (what, instruction):
            self._last_seen = (what, instruction)
            self._since, self._used = time.monotonic(), time.process_time()
        return time.monotonic() - self._since

    def state(self) -> RankState:
        """Describe what the thread does."""
        entry = self._ring.running()
        frame = stacks.innermost(self._ring.owner or 0)
        if frame is None:
            return RankState(
                doing=OTHER_CODE, operation="no code: its training thread has ended", **self._process
            )
        position = stacks.read_position(frame)
        source = entry if entry is not None and entry.file else position
        facts: dict[str, Any] = {"file": source.file, "line": source.line, **self._process}
        if entry is not None:
            return RankState(
                doing=COLLECTIVE,
                operation=entry.operation,
                sequence=entry.sequence,
                facts=entry.facts,
                seconds=time.monotonic() - entry.started,
                stack=position.stack,
                **facts,
            )
        token, seconds = self.waited()
        batch = loader_watch.find_wait(frame)
        if batch is not None:
            details = loader_watch.describe(batch)
            return RankState(doing=DATA, operation="batch", seconds=seconds, details=details, **facts)
        waits_in = "" if token is None else position.waits_in or DEVICE
        return RankState(
            doing=TORCH if waits_in else OTHER_CODE,
            operation=waits_in or position.waits_in or position.function,
            seconds=seconds,
            stack=position.stack,
            recorded=describe_recorded(),
            **facts,
        )

    def release(self) -> None:
        """Drop the reference to the last frame."""
        self._last_seen = None


def describe_recorded() -> str:
    """Describe the progress of torch's collectives in each process group; empty without a record."""
    return "; ".join(text for name in _DUMPS for text in _describe_groups(_read(name)))


def seconds_on_device() -> float:
    """Seconds since the oldest unfinished collective of the device was enqueued; 0.0 without one.

    The training thread enqueues collectives, and waits for them where it needs a result.
    """
    entries = _entries(_read(_ON_DEVICE))
    enqueued = [entry["time_created_ns"] for entry in entries if entry["state"] != "completed"]
    return max(time.time() - min(enqueued) / 1e9, 0.0) if enqueued else 0.0


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
