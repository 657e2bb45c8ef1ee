"""Whether a thread waits for a batch of a loader, and what the worker processes do that are to read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from accelerate import torch_private
from accelerate.base import Frame
from accelerate.data_loader import ReadAhead
from accelerate.diagnostics import process_view, stacks

MOST_WORKERS = 8
"""Workers that a report describes; those that owe the next batch come first."""
MOST_WORKER_STACKS = 3
_DEPTH = 16  # the wait of a loader is among the innermost frames
_WAIT_OF_OURS = ReadAhead.take.__code__
_TASK_QUEUE = "get"  # what the loop of a worker calls when it has nothing to read


@dataclass(frozen=True)
class BatchWait:
    """A thread that waits for a batch.

    Attributes:
        token: differs between two waits.
        iterator: torch's iterator, which has the workers; None where a thread reads without any.
        reader: the frame of the thread that reads, where that is another one.
    """

    token: tuple[object, ...]
    iterator: Any = field(repr=False)
    reader: FrameType | None = field(repr=False)


def find_wait(frame: FrameType | None) -> BatchWait | None:
    """What batch a thread waits for; None when it waits for none.

    Args:
        frame: the innermost one of the thread.
    """
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
    """Say what the workers of a loader do, or where the thread stands that reads; what follows the rank.

    Args:
        wait: for the batch.
    """
    if wait.iterator is not None:
        return _describe_workers(wait.iterator)
    if wait.reader is None:
        return "waits for its thread that reads batches, which has ended"
    stack = stacks.read_position(wait.reader).stack
    return f"waits for its thread that reads batches, which stands at:\n{stack}"


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
    for place, number in enumerate(numbers[:MOST_WORKERS]):
        pid = workers[number].pid
        task = ", which owes the next batch," if place == 0 and owing else ""
        line = f"worker {number} (process {pid}){task} {process_view.describe(pid)}"
        stack = _stack_of_worker(pid) if number in owing[:MOST_WORKER_STACKS] else ""
        lines += [f"{line}, stands at:", stack.rstrip()] if stack else [line]
    if len(numbers) > MOST_WORKERS:
        lines.append(f"and {len(numbers) - MOST_WORKERS} more workers")
    return "\n".join(lines)


def _stack_of_worker(pid: int) -> str:
    """Where a worker stands that owes a batch; with all of its threads where none of its own reads one.

    The main thread has then handed the batch on, and another one is to send it.
    """
    frames = process_view.stack_of(pid)
    own = _own_frames(frames)
    if not own or own[0][2] != _TASK_QUEUE:
        return process_view.spell_stack(own)
    others = process_view.stacks_of_all_threads(pid)
    return "\nanother thread of it stands at:\n".join(
        process_view.spell_stack(_own_frames(each)).rstrip() for each in [frames, *_without(others, own)]
    )


def _without(stacks_of_threads: list[list[Frame]], own: list[Frame]) -> list[list[Frame]]:
    return [each for each in stacks_of_threads if each and _own_frames(each)[:1] != own[:1]]


def _workers_that_owe(iterator: Any) -> list[int]:
    """Numbers of the workers that have been asked for batches and gave none yet, the next batch first."""
    tasks = torch_private.loader_tasks(iterator)
    return list(dict.fromkeys(task[0] for task in tasks if len(task) == 1))


def _own_frames(frames: list[Frame]) -> list[Frame]:
    """The frames of a worker below torch's loop: a forked one begins with those of the process it is from."""
    loop = max(
        (place for place, frame in enumerate(frames) if frame[2] == torch_private.WORKER_LOOP), default=-1
    )
    return frames[loop + 1 :]
