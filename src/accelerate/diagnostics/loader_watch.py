"""Whether a thread waits for a batch of a loader, and what the worker processes do that are to read it.

With several processes the watcher of each rank reports that too. With one process a thread watches each pass
over a loader with workers, and ends with it. It takes no lock, so a process that is forked meanwhile inherits
none that is held.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from accelerate import torch_private
from accelerate.base import Frame
from accelerate.data_loader import ReadAhead, WorkersObserver
from accelerate.diagnostics import processes, stacks
from accelerate.diagnostics.hang_report import DATA, Outlet, RankState, Report, compose

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_NOTICE_A_DEATH = 2.0
GROWTH = 2.0
"""By how much longer the next wait may be before it is reported again."""
MOST_WORKERS = 8
"""Workers that a report describes; those that owe the next batch come first."""
MOST_WORKER_STACKS = 3
_DEPTH = 16  # the wait of a loader is among the innermost frames
_WAIT_OF_OURS = ReadAhead.take.__code__
_TASK_QUEUE = "get"  # what the loop of a worker calls when it has nothing to read


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
class BatchWait:
    """A thread that waits for a batch.

    Attributes:
        token: identifies the wait.
        iterator: torch's iterator, which has the workers; None where a thread reads without any.
        reader: the frame of the thread that reads, where that is another one.
    """

    token: tuple[object, ...]
    iterator: Any = field(repr=False)
    reader: FrameType | None = field(repr=False)


def find_wait(frame: FrameType | None) -> BatchWait | None:
    """Find the batch that a thread waits for, from its innermost frame; None when it waits for none."""
    for _ in range(_DEPTH):
        if frame is None:
            return None
        if frame.f_code is _WAIT_OF_OURS:
            return _wait_for_reader(frame.f_locals["self"])
        if frame.f_code.co_name == torch_private.WAIT_FOR_BATCH:
            iterator = frame.f_locals.get("self")
            if torch_private.loader_workers(iterator):
                return BatchWait(_token(iterator), iterator, None)
        frame = frame.f_back
    return None


def describe(wait: BatchWait) -> str:
    """Say what the workers of a loader do, or where the thread is that reads; what follows the rank."""
    if wait.iterator is not None:
        return _describe_workers(wait.iterator)
    if wait.reader is None:
        return "waits for its thread that reads batches, which has ended"
    stack = stacks.read_position(wait.reader).stack
    return f"waits for its thread that reads batches, which is at:\n{stack}"


def _wait_for_reader(reader: Any) -> BatchWait | None:
    if reader.thread is None:  # this thread reads by itself
        return None
    frame = stacks.innermost(reader.thread.ident or 0)
    inner = find_wait(frame)
    return inner or BatchWait(("reader", id(reader), reader.takes), None, frame)


def _token(iterator: Any) -> tuple[object, ...]:
    # Nothing of the iterator is kept: its workers end with the last reference to it.
    return (torch_private.loader_workers(iterator)[0].pid, *torch_private.loader_progress(iterator))


def _describe_workers(iterator: Any) -> str:
    workers, owing = torch_private.loader_workers(iterator), _workers_that_owe(iterator)
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


def _workers_that_owe(iterator: Any) -> list[int]:
    """Numbers of the workers that have been asked for batches and gave none yet, the next batch first."""
    tasks = torch_private.loader_tasks(iterator)
    return list(dict.fromkeys(task[0] for task in tasks if len(task) == 1))


def _own_frames(frames: list[Frame]) -> list[Frame]:
    """The frames of a worker below torch's loop: a forked one begins with those of the process it is from."""
    after_loop = [i + 1 for i, frame in enumerate(frames) if frame[2] == torch_private.WORKER_LOOP]
    return frames[max(after_loop, default=0) :]


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
        frame = stacks.innermost(self.thread)
        wait = find_wait(frame)
        if frame is None or wait is None or wait.token[0] != self.worker:
            self._change(None)
            return
        self._change(wait.token)
        seconds = time.monotonic() - self.since
        if seconds >= self.limit:
            self.limit = seconds * GROWTH  # a loader that is slow at each batch is not reported each time
            self._report(wait, stacks.read_position(frame), seconds)

    def _change(self, token: object) -> None:
        if token == self.token:
            return
        self.token, self.since = token, time.monotonic()
        if self.was_reported:
            self.outlet.withdraw("accelerate: the batch has come.")
            self.was_reported = False

    def _report(self, wait: BatchWait, position: stacks.Position, seconds: float) -> None:
        state = RankState(
            0,
            DATA,
            file=position.file,
            line=position.line,
            seconds=seconds,
            details=describe(wait),
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        self.outlet.publish(Report(compose([state], os.getcwd()), 0, False, [0], []))
        self.was_reported = True
