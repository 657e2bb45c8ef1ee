"""Observation of the training thread of this rank, with the operation, line and duration of its wait.

If it waits for a batch of a loader, the state includes the worker processes that read it. With several
processes, the watchdog of each rank (`watching`) uses `ThreadObserver`. With one process, `watch_iterator`
starts a thread for each iterator of a loader with workers. This thread takes no lock, so a process that is
forked meanwhile inherits no held lock.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from accelerate import torch_private
from accelerate.base import Frame
from accelerate.data_loader import DataLoaderDispatcher, ReadAhead
from accelerate.diagnostics import processes
from accelerate.diagnostics.hang_report import (
    DEVICE,
    Activity,
    HangReporter,
    Limits,
    RankState,
    Report,
    format_report,
)
from accelerate.ops import FlightRecorder
from accelerate.torch_private import (
    WAIT_FOR_BATCH,
    WORKER_LOOP,
    loader_progress,
    loader_tasks,
    loader_workers,
)

MAX_CPU_USAGE = 0.5
"""CPU time of all threads per second, up to which a process in a backward counts as waiting."""
SECONDS_BEFORE_DEVICE_CHECK = 2.0
"""Seconds at one instruction after which unfinished collectives of the device are searched for."""

_ON_DEVICE = "dump_nccl_trace"
_DUMPS = ("dump_fr_trace", _ON_DEVICE)
"""Flight recorders of torch. A build of torch has those of its communication libraries."""

GROWTH = 2.0
"""Factor of the time until a wait is reported again."""
MAX_WORKERS = 8
"""Number of workers that a report describes, beginning with the worker of the next batch."""
MAX_WORKER_STACKS = 3
_MAX_DEPTH = 64  # number of innermost frames in which the wait of a loader is searched for
_DATASET = "the dataset of rank 0"  # source of batches if rank 0 reads for all ranks
_READ_AHEAD_WAIT = ReadAhead.take.__code__
# It reads the first batches of an epoch in the thread of the caller.
_FIRST_READ = DataLoaderDispatcher._read_ahead.__code__
_TASK_QUEUE = "get"  # function in which a worker without a task waits


@dataclass(frozen=True)
class BatchWait:
    """Wait of a thread for a batch."""

    token: tuple[object, ...]  # identifies the wait
    iterator: Any = field(repr=False)  # iterator of torch with the workers; None if a thread reads
    reader: FrameType | None = field(repr=False)  # innermost frame of the thread that reads
    source: str = "a batch"  # what the thread waits for, in the words of the report


def find_wait(frame: FrameType | None) -> BatchWait | None:
    """Returns the wait for a batch of a thread with this innermost frame, or None."""
    innermost: Any = frame
    for _ in range(_MAX_DEPTH):
        # Python 3.11 may return another object if the thread leaves the frame at this moment.
        if not isinstance(frame, FrameType):
            return None
        if frame.f_code is _READ_AHEAD_WAIT:
            return _wait_for_reader(frame.f_locals["self"], innermost)
        if frame.f_code is _FIRST_READ:
            loader = frame.f_locals["self"]
            return BatchWait(("first read", id(loader), loader.iteration), None, innermost, _DATASET)
        if frame.f_code.co_name == WAIT_FOR_BATCH:
            iterator = frame.f_locals.get("self")
            if workers := loader_workers(iterator):
                # The token has no reference to the iterator, whose workers end with its last reference.
                token = (workers[0].pid, *loader_progress(iterator))
                return BatchWait(token, iterator, None)
        frame = frame.f_back
    return None


def describe_wait(wait: BatchWait) -> str:
    """Describes the workers of a loader, or the thread that reads, as text that follows the rank."""
    if wait.iterator is not None:
        return _describe_workers(wait.iterator)
    if wait.reader is None:
        return "waits for its thread that reads batches, which has ended"
    stack = processes.read_position(wait.reader).stack
    return f"reads the dataset for all ranks, and is at:\n{stack}"


def _wait_for_reader(reader: Any, innermost: FrameType) -> BatchWait:
    token = ("reader", id(reader), reader.takes)
    if reader.thread is None:  # this thread itself reads
        return BatchWait(token, None, innermost, _DATASET)
    frame = processes.innermost(reader.thread.ident or 0)
    return find_wait(frame) or BatchWait(token, None, frame, _DATASET)


def _describe_workers(iterator: Iterator[Any]) -> str:
    workers, tasks = loader_workers(iterator), loader_tasks(iterator)
    # Workers with unfinished tasks, beginning with the worker of the next batch.
    pending = list(dict.fromkeys(task[0] for task in tasks if len(task) == 1))
    numbers = [*pending, *(n for n in range(len(workers)) if n not in pending)]
    lines = ["waits for the workers of its loader:"]
    for number in numbers[:MAX_WORKERS]:
        pid = workers[number].pid
        task = ", which owes the next batch," if number == next(iter(pending), None) else ""
        line = f"worker {number} (process {pid}){task} {processes.describe(pid)}"
        stack = _stack_of_worker(pid) if number in pending[:MAX_WORKER_STACKS] else ""
        lines += [f"{line}, is at:", stack.rstrip()] if stack else [line]
    if len(numbers) > MAX_WORKERS:
        lines.append(f"and {len(numbers) - MAX_WORKERS} more workers")
    return "\n".join(lines)


def _stack_of_worker(pid: int) -> str:
    """Returns the stack of a worker with an unfinished task.

    If its main thread does not read a batch, the stacks of all its threads: the main thread has passed the
    batch to another thread, which is to send it.
    """
    frames = processes.stack_of(pid)
    main = _frames_below_loop(frames)
    if not main or main[0][2] != _TASK_QUEUE:
        return processes.format_stack(main)
    threads = [main, *map(_frames_below_loop, processes.stacks_of_all_threads(pid))]
    others = [thread for thread in threads[1:] if thread and thread[:1] != main[:1]]
    texts = [processes.format_stack(thread).rstrip() for thread in (main, *others)]
    return "\nanother thread of it is at:\n".join(texts)


def _frames_below_loop(frames: list[Frame]) -> list[Frame]:
    """Returns the frames of a worker below the loop of torch.

    The outer frames of a forked worker are those of its parent.
    """
    after_loop = [i + 1 for i, frame in enumerate(frames) if frame[2] == WORKER_LOOP]
    return frames[max(after_loop, default=0) :]


def _was_seen(frame: FrameType) -> bool:
    """Returns whether an earlier call had this frame, and not a freed frame with the same `id`.

    The mark is deleted with the frame, and only affects tracing. A traced frame is not marked.
    """
    if not frame.f_trace_lines:
        return True
    frame.f_trace_lines = frame.f_trace is not None
    return False


class ThreadObserver:
    """Observer of the training thread of this process, which is used in another thread.

    `recorder` records the operations of the training thread.
    """

    def __init__(self, recorder: FlightRecorder, rank: int, host: str, pid: int) -> None:
        self._recorder = recorder
        self._process: dict[str, Any] = {"rank": rank, "host": host, "pid": pid}
        self._last_wait: tuple[object, int] | None = None
        self._since = 0.0
        self._cpu_time = 0.0

    def current_wait(self) -> tuple[object, float]:
        """Returns a value that identifies the current wait, and its seconds, or `(None, 0.0)` without a wait.

        The time of an operation that is not in the flight recorder counts from the first call that finds the
        thread in it. A backward that uses the CPU computes, and does not count as a wait.
        """
        entry = self._recorder.running()
        if entry is not None:
            self._last_wait = None
            return entry.sequence, time.monotonic() - entry.started
        frame = processes.innermost(self._recorder.owner or 0)
        if frame is None:
            self._last_wait = None
            return None, 0.0
        batch = find_wait(frame)
        if batch is not None:
            return (Activity.DATA, batch.token), self._seconds_in(batch.token, 0)
        if not _was_seen(frame):
            self._last_wait = None
        # Only the `id` is kept: the frame and its callers would keep their tensors after they return.
        seconds = self._seconds_in(id(frame), frame.f_lasti)
        if not processes.may_wait(frame):
            # The device bounds the time of the wait.
            seconds = min(seconds, seconds_on_device()) if seconds > SECONDS_BEFORE_DEVICE_CHECK else 0.0
            return (("device", self._since), seconds) if seconds else (None, 0.0)
        if processes.may_compute(frame) and time.process_time() - self._cpu_time > MAX_CPU_USAGE * seconds:
            return None, 0.0
        return ("torch", self._since), seconds

    def _seconds_in(self, wait: object, instruction: int) -> float:
        """Returns the seconds since the first call with this instruction of a frame or wait for a batch."""
        if self._last_wait != (wait, instruction):
            self._last_wait = (wait, instruction)
            self._since, self._cpu_time = time.monotonic(), time.process_time()
        return time.monotonic() - self._since

    def state(self) -> RankState:
        entry = self._recorder.running()
        frame = processes.innermost(self._recorder.owner or 0)
        if frame is None:
            ended = "no code: its training thread has ended"
            return RankState(activity=Activity.OTHER_CODE, operation=ended, **self._process)
        position = processes.read_position(frame)
        source = entry if entry is not None and entry.file else position
        location: dict[str, Any] = {"file": source.file, "line": source.line, **self._process}
        if entry is not None:
            return RankState(
                activity=Activity.COLLECTIVE,
                operation=entry.operation,
                sequence=entry.sequence,
                arguments=entry.arguments,
                seconds=time.monotonic() - entry.started,
                stack=position.stack,
                **location,
            )
        token, seconds = self.current_wait()
        batch = find_wait(frame)
        if batch is not None:
            details = describe_wait(batch)
            operation = batch.source
            return RankState(
                activity=Activity.DATA, operation=operation, seconds=seconds, details=details, **location
            )
        waits_in = "" if token is None else position.waits_in or DEVICE
        return RankState(
            activity=Activity.TORCH if waits_in else Activity.OTHER_CODE,
            operation=waits_in or position.waits_in or position.function,
            seconds=seconds,
            stack=position.stack,
            recorded=describe_recorded(),
            **location,
        )

    def release(self) -> None:
        self._last_wait = None


def describe_recorded() -> str:
    """Describes the progress of the collectives of torch in each process group.

    Empty without a flight recorder of torch.
    """
    texts = []
    for trace in map(_read, _DUMPS):
        last_entries = {entry["process_group"]: entry for entry in _entries(trace)}
        for (number, description), entry in last_entries.items():
            status = trace.get("pg_status", {}).get(number, {})
            enqueued = status.get("last_enqueued_collective", -1)
            completed = max(status.get("last_completed_collective", -1), 0)
            progress = f"{completed} of {enqueued} collectives completed, " if enqueued > 0 else ""
            inputs = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
            shapes = ", ".join(f"{list(shape)} {dtype}" for shape, dtype in inputs) or "nothing"
            last = f"#{entry['collective_seq_id']} {entry['profiling_name']} of {shapes}"
            texts.append(f"{description or number}: {progress}the last one is {last}")
    return "; ".join(texts)


def seconds_on_device() -> float:
    """Returns the seconds since the oldest unfinished collective of the device was enqueued, or 0.0.

    The training thread enqueues collectives, and waits for them when it needs a result.
    """
    entries = _entries(_read(_ON_DEVICE))
    enqueued = [entry["time_created_ns"] for entry in entries if entry["state"] != "completed"]
    return max(time.time() - min(enqueued) / 1e9, 0.0) if enqueued else 0.0


def _read(name: str) -> dict[str, Any]:
    dump = getattr(torch_private, name)
    return {} if dump is None else pickle.loads(dump(includeStackTraces=False))


def _entries(trace: dict[str, Any]) -> Iterable[dict[str, Any]]:
    return (entry for entry in trace.get("entries", ()) if not entry["is_p2p"])


def watch_iterator(iterator: Iterator[Any], limits: Limits, reporter: HangReporter) -> None:
    """Watches an iterator with workers until it is deleted, and reports slow batches.

    Called in the thread that waits for its batches.
    """
    # A list, because a fork could inherit the held lock of an event.
    finished: list[bool] = []
    weakref.finalize(iterator, finished.append, True)
    worker, thread = loader_workers(iterator)[0].pid, threading.get_ident()
    watch = _IteratorWatch(worker, limits, reporter, finished, thread, limits.timeout)
    threading.Thread(target=watch.run, name="accelerate-loader", daemon=True).start()


@dataclass
class _IteratorWatch:
    """Watch of one iterator of a loader, without a reference to the iterator."""

    worker: int  # process ID of the first worker
    limits: Limits
    reporter: HangReporter
    finished: list[bool]  # not empty after the iterator is deleted
    thread: int  # that waits for batches
    timeout: float  # seconds until the current wait is reported
    token: object = None  # identifies the current wait
    since: float = 0.0  # start of the current wait
    was_reported: bool = False

    def run(self) -> None:
        while not self.finished:
            time.sleep(self.limits.interval)
            self._check()

    def _check(self) -> None:
        frame = processes.innermost(self.thread)
        wait = find_wait(frame)
        if frame is None or wait is None or wait.token[0] != self.worker:
            self._change(None)
            return
        self._change(wait.token)
        seconds = time.monotonic() - self.since
        if seconds >= self.timeout:
            self.timeout = seconds * GROWTH  # a loader that is slow at each batch is not reported each time
            self._report(wait, processes.read_position(frame), seconds)

    def _change(self, token: object) -> None:
        if token == self.token:
            return
        self.token, self.since = token, time.monotonic()
        if self.was_reported:
            self.reporter.withdraw("accelerate: the batch has come.")
            self.was_reported = False

    def _report(self, wait: BatchWait, position: processes.Position, seconds: float) -> None:
        state = RankState(
            0,
            Activity.DATA,
            file=position.file,
            line=position.line,
            seconds=seconds,
            details=describe_wait(wait),
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        self.reporter.publish(Report(format_report([state], os.getcwd()), 0, False, 1, []))
        self.was_reported = True
