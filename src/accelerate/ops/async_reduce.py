"""A few numbers of all ranks, reduced while compute goes on.

They are float64 on the CPU, in a gloo group of their own: no device waits for them, and their order among the
collectives of the default group is free. Where there can be no such group (one process, MPI, XLA) the numbers
are reduced at once over the transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from accelerate.ops.flight_record import flight_recorder
from accelerate.ops.transport import current_transport
from accelerate.state import PartialState, services

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX} if dist.is_available() else {}
_NO_SECOND_GROUP = ("mpi", "ucc")


class Answer:
    """Numbers that are already known; the base of those that are still on their way."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers

    def wait(self) -> list[float]:
        """Return the numbers, when all ranks have given theirs."""
        numbers: list[float] = self._numbers.tolist()
        return numbers


class AnswerUnderway(Answer):
    """Numbers that a group is reducing.

    Args:
        numbers: overwritten by the group.
        work: what the group returned for the operation.
        purpose: the name under which waiting is recorded.
    """

    def __init__(self, numbers: torch.Tensor, work: Any, purpose: str) -> None:
        super().__init__(numbers)
        self._work = work
        self._purpose = purpose

    def wait(self) -> list[float]:
        """Return the numbers, when all ranks have given theirs."""
        with flight_recorder().entry(self._purpose):
            self._work.wait()
        return super().wait()


class AsyncGroup:
    """The gloo group for these numbers, a service of the run; called on all ranks.

    Args:
        purpose: of the first numbers, for the flight record: a rank may wait here for one that never asks.

    Attributes:
        group: None where there can be no such group.
    """

    def __init__(self, purpose: str) -> None:
        has_gloo = dist.is_initialized() and dist.is_gloo_available()
        self.group: dist.ProcessGroup | None = None
        own_runtime = PartialState().device_backend.own_runtime
        if has_gloo and dist.get_backend() not in _NO_SECOND_GROUP and not own_runtime:
            with flight_recorder().entry(purpose):
                self.group = dist.new_group(backend="gloo")


def reduce_async(numbers: Sequence[float], how: str, purpose: str) -> Answer:
    """Start to reduce numbers of all ranks, element by element; called on all ranks in the same order.

    Args:
        numbers: equally many on all ranks; exact up to 2**53.
        how: "sum" or "max".
        purpose: what for, as the flight record and the reports of hangs name it.

    Returns:
        The answer; its `wait` is to be called once.
    """
    tensor = torch.tensor(numbers, dtype=torch.float64)
    transport = current_transport()
    if transport.size == 1:
        return Answer(tensor)
    group = services.get(AsyncGroup, partial(AsyncGroup, purpose), uses_group=True).group
    if group is None:
        return Answer(transport.reduce(tensor, how))
    work = dist.all_reduce(tensor, _OPERATIONS[how], group=group, async_op=True)
    return AnswerUnderway(tensor, work, purpose)
