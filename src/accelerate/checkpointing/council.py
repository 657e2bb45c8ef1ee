"""What the ranks settle about a checkpoint: one of them decides, all hear it.

It goes over the store of the process group and not over its wire: a background thread may use it while the
main thread trains, and a rank that does not come is named instead of waited for without end.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from accelerate.base.errors import AccelerateError, CheckpointError, StateError
from accelerate.base.text import describe
from accelerate.ops.transport import Transport

T = TypeVar("T")
Judge = Callable[[list[Any]], T]

SECONDS_BETWEEN_LOOKS = 0.002
SECONDS_FOR_THE_VERDICT = 10.0


class Council:
    """One process, which agrees with itself.

    Attributes:
        rank: of this process.
        size: number of processes.
        is_threaded: whether a background thread may use it while the main thread trains.
    """

    rank = 0
    size = 1
    is_threaded = True

    def decide(self, what: str, value: Any, judge: Judge[T], patience: float) -> T:
        """Let rank 0 decide from what all ranks say; called on all ranks in the same order.

        Args:
            what: name of the call that needs all ranks, for messages.
            value: what this rank says; can be pickled.
            judge: turns what the ranks say, in their order, into the decision; runs on rank 0.
            patience: seconds to wait for the other ranks.

        Returns:
            The decision, the same on all ranks.

        Raises:
            StateError: a rank did not come in time; on all that did.
            AccelerateError: what `judge` raised; on all ranks.
        """
        return judge([value])


class WireCouncil(Council):
    """Over the collectives of a run, where it has no store.

    Args:
        transport: the wire.
    """

    is_threaded = False

    def __init__(self, transport: Transport) -> None:
        self.rank, self.size, self._transport = transport.rank, transport.size, transport

    def decide(self, what: str, value: Any, judge: Judge[T], patience: float) -> T:
        values = self._transport.gather_object(value)
        verdict = _verdict(judge, values) if self.rank == 0 else None
        result: T = _unpack(self._transport.broadcast_object(verdict))
        return result


class StoreCouncil(Council):
    """Over a connection to the store of the process group.

    Args:
        store: the connection; used by one thread at a time.
        rank: of this process.
        size: number of processes.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._number = 0

    def decide(self, what: str, value: Any, judge: Judge[T], patience: float) -> T:
        try:
            return self._decide(what, value, judge, patience)
        except DistError as error:
            raise StateError(
                f"`{what}` cannot be agreed upon: the store of the process group does not answer ({error}). "
                "It lies with process 0, which has probably ended: see its output for the cause."
            ) from error

    def _decide(self, what: str, value: Any, judge: Judge[T], patience: float) -> T:
        self._number += 1
        topic = f"{self._number}"
        self._post(f"{topic}/{self.rank}", (what, value))
        if self.rank == 0:
            self._post(f"{topic}/verdict", self._judge(topic, what, judge, patience))
            self._forget(self._number - 2)
            self._stay(topic)
        keys = [f"{topic}/verdict"]
        if self._missing(keys, patience + SECONDS_FOR_THE_VERDICT):
            raise StateError(_absence(what, [0], patience))
        verdict = pickle.loads(self._store.get(keys[0]))
        self._post(f"{topic}/heard/{self.rank}", True)
        result: T = _unpack(verdict)
        return result

    def _stay(self, topic: str) -> None:
        """Wait until all ranks that came have heard: rank 0 may end next, and the store with it."""
        came = [rank for rank in range(1, self.size) if self._store.check([f"{topic}/{rank}"])]
        self._missing([f"{topic}/heard/{rank}" for rank in came], SECONDS_FOR_THE_VERDICT)

    def _judge(self, topic: str, what: str, judge: Judge[T], patience: float) -> tuple[bool, Any]:
        keys = [f"{topic}/{rank}" for rank in range(self.size)]
        if missing := self._missing(keys, patience):
            return False, StateError(_absence(what, [keys.index(key) for key in missing], patience))
        said = [pickle.loads(self._store.get(key)) for key in keys]
        if len({name for name, _ in said}) > 1:
            lines = "\n".join(f"  - Process {rank}: {name}" for rank, (name, _) in enumerate(said))
            return False, StateError(f"The processes do different things at the same time:\n{lines}")
        return _verdict(judge, [value for _, value in said])

    def _post(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # bytes are taken, too

    def _missing(self, keys: list[str], patience: float) -> list[str]:
        """Wait for keys; the ones that did not come."""
        end = time.monotonic() + patience
        pause = SECONDS_BETWEEN_LOOKS
        while missing := [key for key in keys if not self._store.check([key])]:
            left = end - time.monotonic()
            if left <= 0:
                return missing
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, 0.1)
        return []

    def _forget(self, number: int) -> None:
        """Remove what nobody reads any more: all ranks have come to the topic after it."""
        if number > 0:
            for rank in range(self.size):
                self._store.delete_key(f"{number}/{rank}")
                self._store.delete_key(f"{number}/heard/{rank}")
            self._store.delete_key(f"{number}/verdict")


def open_council(transport: Transport, store: Store | None) -> Council:
    """Choose the way in which the ranks of a run agree.

    Args:
        transport: the wire of the run.
        store: a connection of its own to the store of the process group; None where there is no such store.
    """
    if transport.size == 1:
        return Council()
    if store is None:
        return WireCouncil(transport)
    store.set_timeout(timedelta(minutes=5))
    return StoreCouncil(store, transport.rank, transport.size)


def _verdict(judge: Judge[T], values: list[Any]) -> tuple[bool, Any]:
    try:
        return True, judge(values)
    except AccelerateError as error:
        return False, error
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return False, CheckpointError(f"Process 0 failed for all: {describe(error)}.")


def _unpack(verdict: tuple[bool, Any]) -> Any:
    good, result = verdict
    if not good:
        raise result
    return result


def _absence(what: str, ranks: list[int], patience: float) -> str:
    who = f"process {ranks[0]}" if len(ranks) == 1 else f"processes {', '.join(map(str, ranks))}"
    return (
        f"`{what}` must be called on all processes, and {who} did not come within {patience:g} s. Take it "
        "out of `if accelerator.is_main_process:` and the like; a process that is only late needs a longer "
        "hang_timeout."
    )
