"""Agreement of all ranks that run the same calls: over the store of a run, or over its collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.base import AccelerateError, CheckpointError, describe
from accelerate.ops.base import Transport
from accelerate.ops.transport import current_transport
from accelerate.state import Consensus, Judge, StoreChannel, StoreConsensus, pack_verdict, unpack

Result = TypeVar("Result")


class CollectiveConsensus(Consensus):
    """Over the collectives of a run, where it has no store."""

    is_threaded = False

    def __init__(self, transport: Transport) -> None:
        self.rank, self.size, self._transport = transport.rank, transport.size, transport

    def decide(self, what: str, value: Any, judge: Judge, patience: float) -> Any:
        values = self._transport.gather_object(value)
        verdict = pack_verdict(judge, values) if self.rank == 0 else None
        return unpack(self._transport.broadcast_object(verdict))


def open_consensus(transport: Transport, channel: StoreChannel | None) -> Consensus:
    """Choose the way in which the ranks of a run agree; `channel` is a connection of its own to the store."""
    if transport.size == 1:
        return Consensus()
    if channel is None:
        return CollectiveConsensus(transport)
    return StoreConsensus(channel, transport.rank, transport.size)


def run_on_all_ranks(action: Callable[[], Result]) -> Result:
    """Run an action that does not communicate on each rank, and return what it returned on this one.

    Raises:
        CheckpointError: It failed on a rank; on all.
    """
    result, failure = None, ""
    try:
        result = action()
    except Exception as error:  # raised again, on all ranks
        failure = describe(error)
    failures = [text for text in current_transport().gather_object(failure) if text]
    if failures:
        raise CheckpointError("; ".join(dict.fromkeys(failures)))
    return result  # type: ignore[return-value]  # None only where the action returned it


def run_on_rank_0(action: Callable[[], Result]) -> Result | None:
    """Run an action that does not communicate on rank 0, and return what it returned; None on the others.

    Raises:
        AccelerateError: What it raised, on all ranks; a `CheckpointError` for an error of another kind.
    """
    transport = current_transport()
    result: Result | None = None
    failure: AccelerateError | None = None
    if transport.rank == 0:
        try:
            result = action()
        except AccelerateError as error:
            failure = error
        except Exception as error:  # raised again, on all ranks
            failure = CheckpointError(describe(error))
    failure = transport.broadcast_object(failure)
    if failure is not None:
        raise failure
    return result
