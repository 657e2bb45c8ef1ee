"""What the training thread of this rank does: the operation that it waits in, the line, and for how long.

Where it waits for a batch of a loader, also what the worker processes do that are to read it. With several
processes the watcher of each rank reports that. With one process a thread watches each pass over a loader
with workers, and ends with it. It takes no lock, so a process that is forked meanwhile inherits none that is
held.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from accelerate import torch_private
from accelerate.base import Frame
from accelerate.data_loader import DataLoaderDispatcher, ReadAhead, WorkersObserver
from accelerate.diagnostics import processes
from accelerate.diagnostics.hang_report import DEVICE, Doing, Limits, Outlet, RankState, Report, compose
from accelerate.ops import Ring

MOST_WORK = 0.5
"""Processor time per second, of all threads together, up to which a process counts as waiting."""
STILL = 2.0
"""Seconds on one line after which unfinished collectives of the device are looked for."""

_ON_DEVICE = "dump_nccl_trace"
_DUMPS = ("dump_fr_trace", _ON_DEVICE)
"""Names of torch's flight recorders; a build of torch has those of its communication libraries."""


GROWTH = 2.0
"""By how much longer the next wait may be before it is reported again."""
MOST_WORKERS = 8
"""Workers that a report describes; those that owe the next batch come first."""
MOST_WORKER_STACKS = 3
_DEPTH = 64  # the wait of a loader is among the innermost frames
_DATASET = "the dataset of rank 0"  # which reads for all ranks
_WAIT_OF_OURS = ReadAhead.take.__code__
_FIRST_READ = (
    DataLoaderDispatcher._read_ahead.__code__
)  # reads the first batches of a pass in the caller's thread
_TASK_QUEUE = "get"  # what the loop of a worker calls when it has nothing to read


@dataclass(frozen=True)
class BatchWait:
    """A thread that waits for a batch."""

    token: tuple[object, ...]  # identifies the wait
    iterator: Any = field(repr=False)  # torch's, which has the workers; None where a thread reads without any
    reader: FrameType | None = field(repr=False)  # of the thread that reads, where that is another one
    source: str = "a batch"


def find_wait(frame: FrameType | None) -> BatchWait | None:
    """Find the batch that a thread waits for, from its innermost frame; None when it waits for none."""
    innermost: Any = frame
    for _ in range(_DEPTH):
        # Python 3.11 was seen to return another object where the thread leaves the frame at this moment.
        if not isinstance(frame, FrameType):
            return None
        if frame.f_code is _WAIT_OF_OURS:
            return _wait_for_reader(frame.f_locals["self"], innermost)
        if frame.f_code is _FIRST_READ:
            loader = frame.f_locals["self"]
            return BatchWait(("first read", id(loader), loader.iteration), None, innermost, _DATASET)
        if frame.f_code.co_name == torch_private.WAIT_FOR_BATCH:
            iterator = frame.f_locals.get("self")
            if workers := torch_private.loader_workers(iterator):
                # The token keeps nothing of the iterator: its workers end with the last reference to it.
                token = (workers[0].pid, *torch_private.loader_progress(iterator))
                return BatchWait(token, iterator, None)
        frame = frame.f_back
    return None


def describe_wait(wait: BatchWait) -> str:
    """Say what the workers of a loader do, or where the thread is that reads; what follows the rank."""
    if wait.iterator is not None:
        return _describe_workers(wait.iterator)
    if wait.reader is None:
        return "waits for its thread that reads batches, which has ended"
    stack = processes.read_position(wait.reader).stack
    return f"reads the dataset for all ranks, and is at:\n{stack}"


def _wait_for_reader(reader: Any, innermost: FrameType) -> BatchWait:
    token = ("reader", id(reader), reader.takes)
    if reader.thread is None:  # this thread reads by itself
        return BatchWait(token, None, innermost, _DATASET)
    frame = processes.innermost(reader.thread.ident or 0)
    return find_wait(frame) or BatchWait(token, None, frame, _DATASET)


def _describe_workers(iterator: Any) -> str:
    workers, tasks = torch_private.loader_workers(iterator), torch_private.loader_tasks(iterator)
    # Those that have been asked for batches and gave none yet, the one of the next batch first.
    owing = list(dict.fromkeys(task[0] for task in tasks if len(task) == 1))
    numbers = [*owing, *(n for n in range(len(workers)) if n not in owing)]
    lines = ["waits for the workers of its loader:"]
    for number in numbers[:MOST_WORKERS]:
        pid = workers[number].pid
        task = ", which owes the next batch," if number == next(iter(owing), None) else ""
        line = f"worker {number} (process {pid}){task} {processes.describe(pid)}"
        stack = _stack_of_worker(pid) if number in owing[:MOST_WORKER_STACKS] else ""
        lines += [f"{line}, is at:", stack.rstrip()] if stack else [line]
    if len(numbers) > MOST_WORKERS:
        lines.append(f"and {len(numbers) - MOST_WORKERS} more workers")
    return "\n".join(lines)


def _stack_of_worker(pid: int) -> str:
    """The stack of a worker that owes a batch; of all its threads where its main thread does not read one.

    The main thread has then handed the batch on, and another one is to send it.
    """
    frames = processes.stack_of(pid)
    own = _own_frames(frames)
    if not own or own[0][2] != _TASK_QUEUE:
        return processes.spell_stack(own)
    threads = [own, *map(_own_frames, processes.stacks_of_all_threads(pid))]
    others = [thread for thread in threads[1:] if thread and thread[:1] != own[:1]]
    texts = [processes.spell_stack(thread).rstrip() for thread in (own, *others)]
    return "\nanother thread of it is at:\n".join(texts)


def _own_frames(frames: list[Frame]) -> list[Frame]:
    """The frames of a worker below torch's loop: a forked one begins with those of the process it is from."""
    after_loop = [i + 1 for i, frame in enumerate(frames) if frame[2] == torch_private.WORKER_LOOP]
    return frames[max(after_loop, default=0) :]


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
        frame = processes.innermost(self._ring.owner or 0)
        if frame is None:
            self._last_seen = None
            return None, 0.0
        batch = find_wait(frame)
        if batch is not None:
            return (Doing.DATA, batch.token), self._seconds_in(batch.token, 0)
        seconds = self._seconds_in(frame, frame.f_lasti)
        if not processes.may_wait(frame):
            seconds = min(seconds, seconds_on_device()) if seconds > STILL else 0.0
            return (("device", self._since), seconds) if seconds else (None, 0.0)
        if processes.may_compute(frame) and time.process_time() - self._used > MOST_WORK * seconds:
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
        entry = self._ring.running()
        frame = processes.innermost(self._ring.owner or 0)
        if frame is None:
            ended = "no code: its training thread has ended"
            return RankState(doing=Doing.OTHER_CODE, operation=ended, **self._process)
        position = processes.read_position(frame)
        source = entry if entry is not None and entry.file else position
        facts: dict[str, Any] = {"file": source.file, "line": source.line, **self._process}
        if entry is not None:
            return RankState(
                doing=Doing.COLLECTIVE,
                operation=entry.operation,
                sequence=entry.sequence,
                facts=entry.facts,
                seconds=time.monotonic() - entry.started,
                stack=position.stack,
                **facts,
            )
        token, seconds = self.waited()
        batch = find_wait(frame)
        if batch is not None:
            details = describe_wait(batch)
            operation = batch.source
            return RankState(doing=Doing.DATA, operation=operation, seconds=seconds, details=details, **facts)
        waits_in = "" if token is None else position.waits_in or DEVICE
        return RankState(
            doing=Doing.TORCH if waits_in else Doing.OTHER_CODE,
            operation=waits_in or position.waits_in or position.function,
            seconds=seconds,
            stack=position.stack,
            recorded=describe_recorded(),
            **facts,
        )

    def release(self) -> None:
        self._last_seen = None


def describe_recorded() -> str:
    """Describe the progress of torch's collectives in each process group; empty without a record."""
    texts = []
    for trace in map(_read, _DUMPS):
        last_entries = {entry["process_group"]: entry for entry in _entries(trace)}
        for (number, description), entry in last_entries.items():
            status = trace.get("pg_status", {}).get(number, {})
            enqueued = status.get("last_enqueued_collective", -1)
            completed = max(status.get("last_completed_collective", -1), 0)
            progress = f"{completed} of {enqueued} collectives completed, " if enqueued > 0 else ""
            inputs = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
            given = ", ".join(f"{list(shape)} {dtype}" for shape, dtype in inputs) or "nothing"
            last = f"#{entry['collective_seq_id']} {entry['profiling_name']} of {given}"
            texts.append(f"{description or number}: {progress}the last one is {last}")
    return "; ".join(texts)


def seconds_on_device() -> float:
    """Seconds since the oldest unfinished collective of the device was enqueued; 0.0 without one.

    The training thread enqueues collectives, and waits for them where it needs a result.
    """
    entries = _entries(_read(_ON_DEVICE))
    enqueued = [entry["time_created_ns"] for entry in entries if entry["state"] != "completed"]
    return max(time.time() - min(enqueued) / 1e9, 0.0) if enqueued else 0.0


def _read(name: str) -> dict[str, Any]:
    dump = getattr(torch_private, name)
    return {} if dump is None else pickle.loads(dump(includeStackTraces=False))


def _entries(trace: dict[str, Any]) -> Iterable[dict[str, Any]]:
    return (entry for entry in trace.get("entries", ()) if not entry["is_p2p"])


class LoaderWatch(WorkersObserver):
    """Watches the passes over loaders with workers, where there is one process."""

    def __init__(self, limits: Limits, outlet: Outlet) -> None:
        self._limits, self._outlet = limits, outlet

    def follow(self, iterator: Any) -> None:
        """Watch a pass until its iterator is gone; called by the thread that waits for its batches."""
        over: list[bool] = []  # an event has a lock, which a fork could inherit held
        weakref.finalize(iterator, over.append, True)
        worker, thread = torch_private.loader_workers(iterator)[0].pid, threading.get_ident()
        watch = _Pass(worker, self._limits, self._outlet, over, thread, self._limits.seconds)
        threading.Thread(target=watch.run, name="accelerate-loader", daemon=True).start()


@dataclass
class _Pass:
    """One pass, which the thread reads; nothing here holds its iterator."""

    worker: int
    limits: Limits
    outlet: Outlet
    over: list[bool]
    thread: int
    limit: float
    token: object = None
    since: float = 0.0
    was_reported: bool = False

    def run(self) -> None:
        while not self.over:
            time.sleep(self.limits.pause)
            self._look()

    def _look(self) -> None:
        frame = processes.innermost(self.thread)
        wait = find_wait(frame)
        if frame is None or wait is None or wait.token[0] != self.worker:
            self._change(None)
            return
        self._change(wait.token)
        seconds = time.monotonic() - self.since
        if seconds >= self.limit:
            self.limit = seconds * GROWTH  # a loader that is slow at each batch is not reported each time
            self._report(wait, processes.read_position(frame), seconds)

    def _change(self, token: object) -> None:
        if token == self.token:
            return
        self.token, self.since = token, time.monotonic()
        if self.was_reported:
            self.outlet.withdraw("accelerate: the batch has come.")
            self.was_reported = False

    def _report(self, wait: BatchWait, position: processes.Position, seconds: float) -> None:
        state = RankState(
            0,
            Doing.DATA,
            file=position.file,
            line=position.line,
            seconds=seconds,
            details=describe_wait(wait),
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        self.outlet.publish(Report(compose([state], os.getcwd()), 0, False, 1, []))
        self.was_reported = True
