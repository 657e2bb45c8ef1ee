"""A few numbers of all ranks, combined beside the main wire while compute goes on.

They travel as float64 on the CPU, in a gloo group of their own: no device waits for them, and their order
among the collectives of the main group is free. Where there is no such group (one process, MPI, XLA) the
numbers are combined at once over the transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate.ops.flight_record import RING
from accelerate.ops.transport import current_transport
from accelerate.state import PartialState

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX} if dist.is_available() else {}
_GROUP = "_aside"
_NO_GROUP_BESIDE = ("mpi", "ucc")


class Answer:
    """Numbers that are already known; the base of those that are still on their way."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers

    def wait(self) -> list[float]:
        """Return the numbers, when all ranks have given theirs."""
        numbers: list[float] = self._numbers.tolist()
        return numbers


class AnswerUnderway(Answer):
    """Numbers that a group is combining.

    Args:
        numbers: overwritten by the group.
        work: what the group gave for the operation.
        purpose: the name under which waiting is noted in the record of this process.
    """

    def __init__(self, numbers: torch.Tensor, work: Any, purpose: str) -> None:
        super().__init__(numbers)
        self._work = work
        self._purpose = purpose

    def wait(self) -> list[float]:
        """Return the numbers, when all ranks have given theirs."""
        RING.begin(self._purpose, None)
        try:
            self._work.wait()
        finally:
            RING.end()
        return super().wait()


def combine_aside(numbers: Sequence[float], how: str, purpose: str) -> Answer:
    """Start to combine numbers of all ranks, element by element; called on all ranks in the same order.

    Args:
        numbers: equally many on all ranks; exact up to 2**53.
        how: "sum" or "max".
        purpose: what for, as the record of operations and the reports of hangs name it.

    Returns:
        The answer; its `wait` is to be called once.
    """
    tensor = torch.tensor(numbers, dtype=torch.float64)
    transport = current_transport()
    if transport.size == 1:
        return Answer(tensor)
    group = _group_aside(purpose)
    if group is None:
        return Answer(transport.reduce(tensor, how))
    return AnswerUnderway(
        tensor, dist.all_reduce(tensor, _OPERATIONS[how], group=group, async_op=True), purpose
    )


def _group_aside(purpose: str) -> dist.ProcessGroup | None:
    """The group of this process's state, opened at the first call on all ranks; None where it cannot be."""
    shared = PartialState._shared_state
    if _GROUP not in shared:
        fits = (
            dist.is_initialized()
            and dist.is_gloo_available()
            and dist.get_backend() not in _NO_GROUP_BESIDE
            and shared["device"].type != "xla"
        )
        shared[_GROUP] = _open_group(purpose) if fits else None
    group: dist.ProcessGroup | None = shared[_GROUP]
    return group


def _open_group(purpose: str) -> dist.ProcessGroup:
    """Open the group; whoever waits here for a rank that never asks is in the record of operations."""
    RING.begin(purpose, None)
    try:
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        return group
    finally:
        RING.end()
