"""Consensus over the store: rank 0 decides, and all ranks read the decision.

It goes over the store of the process group and not over its wire: a background thread may use it while the
main thread trains, and a rank that does not come is named instead of waited for without end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import DistError

from accelerate.base import AccelerateError, CheckpointError, StateError, describe, errors
from accelerate.ops import Transport
from accelerate.state import StoreChannel

Judge = Callable[[list[Any]], Any]

SECONDS_FOR_THE_VERDICT = 10.0


class Consensus:
    """One process, which agrees with itself.

    Attributes:
        rank: of this process.
        size: number of processes.
        is_threaded: whether a background thread may use it while the main thread trains.
    """

    rank = 0
    size = 1
    is_threaded = True

    def decide(self, what: str, value: Any, judge: Judge, patience: float) -> Any:
        """Let rank 0 decide from what all ranks say; called on all ranks in the same order.

        Args:
            what: name of the call that needs all ranks, for messages.
            value: what this rank says, as JSON can hold it: tuples become lists.
            judge: turns what the ranks say, in their order, into the decision, which JSON can hold as well;
                runs on rank 0.
            patience: seconds to wait for the other ranks.

        Returns:
            The decision, the same on all ranks.

        Raises:
            StateError: a rank did not come in time; on all that did.
            AccelerateError: what `judge` raised; on all ranks.
        """
        return judge([value])


class CollectiveConsensus(Consensus):
    """Over the collectives of a run, where it has no store.

    Args:
        transport: the wire.
    """

    is_threaded = False

    def __init__(self, transport: Transport) -> None:
        self.rank, self.size, self._transport = transport.rank, transport.size, transport

    def decide(self, what: str, value: Any, judge: Judge, patience: float) -> Any:
        values = self._transport.gather_object(value)
        verdict = _verdict(judge, values) if self.rank == 0 else None
        return _unpack(self._transport.broadcast_object(verdict))


class StoreConsensus(Consensus):
    """Over a connection to the store of the process group.

    Args:
        channel: the connection; used by one thread at a time.
        rank: of this process.
        size: number of processes.
    """

    def __init__(self, channel: StoreChannel, rank: int, size: int) -> None:
        self.rank, self.size, self._channel = rank, size, channel
        self._number = 0

    def decide(self, what: str, value: Any, judge: Judge, patience: float) -> Any:
        try:
            return self._decide(what, value, judge, patience)
        except DistError as error:
            raise StateError(
                f"`{what}` cannot be agreed upon: the store of the process group does not answer ({error}). "
                "It lies with process 0, which has probably ended: see its output for the cause."
            ) from error

    def _decide(self, what: str, value: Any, judge: Judge, patience: float) -> Any:
        self._number += 1
        topic = f"{self._number}"
        self._channel.post(f"{topic}/{self.rank}", [what, value])
        if self.rank == 0:
            verdict = self._judge(topic, what, judge, patience)
            self._channel.post(f"{topic}/verdict", verdict)
            self._forget(self._number - 2)
            self._stay(topic)
            return _unpack(verdict)
        key = f"{topic}/verdict"
        verdict = self._channel.wait([key], patience + SECONDS_FOR_THE_VERDICT)[key]
        if verdict is None:
            raise StateError(_absence(what, [0], patience))
        self._channel.post(f"{topic}/read/{self.rank}", True)
        return _unpack(verdict)

    def _stay(self, topic: str) -> None:
        """Wait until all ranks that came have read it: rank 0 may end next, and the store with it."""
        others = range(1, self.size)
        came = self._channel.read_all([f"{topic}/{rank}" for rank in others])
        names = [f"{topic}/read/{rank}" for rank in others if came[f"{topic}/{rank}"] is not None]
        if names:
            self._channel.wait(names, SECONDS_FOR_THE_VERDICT)

    def _judge(self, topic: str, what: str, judge: Judge, patience: float) -> dict[str, Any]:
        found = self._channel.wait([f"{topic}/{rank}" for rank in range(self.size)], patience)
        said = list(found.values())
        if missing := [rank for rank, value in enumerate(said) if value is None]:
            return _failure(StateError(_absence(what, missing, patience)))
        if len({name for name, _ in said}) > 1:
            lines = "\n".join(f"  - Process {rank}: {name}" for rank, (name, _) in enumerate(said))
            return _failure(StateError(f"The processes do different things at the same time:\n{lines}"))
        return _verdict(judge, [value for _, value in said])

    def _forget(self, number: int) -> None:
        """Remove what nobody reads any more: all ranks have come to the topic after it."""
        if number > 0:
            ranks = range(self.size)
            self._channel.remove(
                f"{number}/verdict",
                *(f"{number}/{rank}" for rank in ranks),
                *(f"{number}/read/{rank}" for rank in ranks),
            )


def open_consensus(transport: Transport, channel: StoreChannel | None) -> Consensus:
    """Choose the way in which the ranks of a run agree.

    Args:
        transport: the wire of the run.
        channel: a connection of its own to the store of the process group; None where there is no such store.
    """
    if transport.size == 1:
        return Consensus()
    if channel is None:
        return CollectiveConsensus(transport)
    return StoreConsensus(channel, transport.rank, transport.size)


def _verdict(judge: Judge, values: Sequence[Any]) -> dict[str, Any]:
    try:
        return {"result": judge(list(values))}
    except AccelerateError as error:
        return _failure(error)
    except Exception as error:  # of any kind: the other ranks have to know
        return _failure(CheckpointError(f"Process 0 failed for all: {describe(error)}."))


def _failure(error: AccelerateError) -> dict[str, Any]:
    return {"error": type(error).__name__, "text": str(error)}


def _unpack(verdict: dict[str, Any]) -> Any:
    if "error" not in verdict:
        return verdict["result"]
    kind = getattr(errors, verdict["error"], CheckpointError)
    raise kind(verdict["text"])


def _absence(what: str, ranks: list[int], patience: float) -> str:
    who = f"process {ranks[0]}" if len(ranks) == 1 else f"processes {', '.join(map(str, ranks))}"
    return (
        f"`{what}` must be called on all processes, and {who} did not come within {patience:g} s. Take it "
        "out of `if accelerator.is_main_process:` and the like; a process that is only late needs a longer "
        "hang_timeout."
    )
