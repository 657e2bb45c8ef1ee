"""Signed messages and decisions of all ranks over the store of the process group, without collectives.

`StoreChannel` writes and reads JSON values, signed with the key of the run, for diagnostics and the search of
a batch size. With `StoreConsensus`, rank 0 decides for all ranks, which checkpointing uses. A background
thread may use them while the main thread trains, and error messages name a rank that does not arrive.

The store of `torch.distributed` serves every program that reaches its port. Therefore its values are never
unpickled. If the launcher has set a key for the run (`ACCELERATE_RUN_KEY`), a value that no rank of this run
has signed counts as absent. The signature is HMAC-SHA256 (RFC 2104) over the full name and the value, so a
value cannot be copied to another name or from another run.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import logging
import math
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast, get_type_hints

from torch.distributed import DistError, DistStoreError, Store  # type: ignore[attr-defined]

from accelerate.base import AccelerateError, CheckpointError, StateError, describe, errors
from accelerate.launch import KEY_VARIABLE

logger = logging.getLogger(__name__)

POLL_INTERVAL = 0.1
"""Seconds between requests that wait for a value of this run or, at its end, for a counter."""
MAX_WAIT = 5.0
"""Timeout of one request in seconds. Python handles signals, such as Ctrl-C, between two requests."""
MIN_TIMEOUT = timedelta(milliseconds=1)  # a store has no timeout if it is 0
DECISION_TIMEOUT = 10.0
"""Seconds that ranks have to read a decision, in addition to the timeout of the decision."""
MAX_UNCOMPRESSED_BYTES = 1 << 20
"""Bytes above which a value is compressed, as `TCPStore` closes a connection that sets more than 8 MB."""
_COMPRESSED = b"z"  # prefix of a compressed value, which JSON never begins with
_ABSENT = b"?"  # shorter than any value
_END = b"\n"  # separator of a list, which the JSON of `json.dumps` does not contain
Message = TypeVar("Message")

_DIGITS = hashlib.sha256().digest_size * 2


class StoreChannel:
    """Access to signed JSON values under a prefix of a store.

    Args:
        store: Store of the process group, or another connection to it.
        environ: Environment variables, of which `ACCELERATE_RUN_KEY` is the key of the signatures.

    Attributes:
        timeout_after_error: Most seconds of a wait while the interpreter exits after an uncaught exception,
            because a process that waits for it may have ended.
    """

    timeout_after_error: float = math.inf

    def __init__(self, store: Store, scope: str, environ: Mapping[str, str]) -> None:
        self._store: Any = store
        self._scope = scope
        self._key = environ.get(KEY_VARIABLE, "").encode(errors="surrogateescape")
        self._has_warned = False

    @property
    def is_signed(self) -> bool:
        """True if values of other runs and programs are ignored, because this run has a key."""
        return bool(self._key)

    def post(self, name: str, value: object) -> None:
        """Writes a value, which is a number, text, boolean, list or dictionary, and not None."""
        self._store.set(self._name(name), self._encode(name, value))

    def post_all(self, values: Mapping[str, Any]) -> None:
        """Writes several values in one request."""
        encoded = [self._encode(name, value) for name, value in values.items()]
        self._store.multi_set([self._name(name) for name in values], encoded)

    def decide(self, name: str, value: object) -> Any:
        """Writes a value unless the name has one, and returns the value of the first rank to write."""
        return self._decode(name, self._store.compare_set(self._name(name), "", self._encode(name, value)))

    def read(self, name: str) -> Any:
        """Returns a value without waiting, or None if there is no value of this run."""
        data = self._read(name)
        return None if data == _ABSENT else self._decode(name, data)

    def append(self, name: str, value: object) -> None:
        self._store.append(self._name(name), self._sign(name, json.dumps(value).encode()) + _END)

    def read_list(self, name: str) -> list[Any]:
        """Returns the values of a list in the order in which they were appended."""
        values = (self._decode(name, line) for line in self._read(name).split(_END)[:-1])
        return [value for value in values if value is not None]

    def wait(
        self, names: Sequence[str], timeout: float, find_lost: Callable[[], Sequence[str]] = list
    ) -> dict[str, Any]:
        """Waits for values, and returns them by name, with None for those that did not arrive.

        This takes one request if all values arrive within `MAX_WAIT`. No other thread can use the connection
        during a request.

        Args:
            timeout: In seconds.
            find_lost: Returns the names that no rank will write if they have no value. The wait ends when
                there is one.
        """
        end = time.monotonic() + timeout
        is_exiting = False
        while (left := end - time.monotonic()) > 0:
            if not is_exiting and exits_after_error():
                is_exiting = True
                left = min(left, self.timeout_after_error)
                end = time.monotonic() + left
            try:
                values = self._get(names, min(left, MAX_WAIT))
            except DistStoreError:  # some values did not arrive
                lost = find_lost()
                if len(self._present(lost)) < len(lost):
                    break
                continue
            if None not in values.values():
                return values
            time.sleep(min(POLL_INTERVAL, left))  # a value that is not of this run may be overwritten
        return dict.fromkeys(names) | self._get(self._present(names))

    def gather(
        self, topic: str, ranks: Sequence[int], timeout: float, find_ended: Callable[[], Sequence[int]] = list
    ) -> dict[int, Any]:
        """Waits for the values that ranks write as `topic/rank`, and returns them by rank as `wait` does.

        The wait ends if one of the ranks that `find_ended` returns has written no value.
        """
        names = [f"{topic}/{rank}" for rank in ranks]
        values = self.wait(names, timeout, lambda: [f"{topic}/{rank}" for rank in find_ended()])
        return dict(zip(ranks, values.values(), strict=True))

    def count(self, name: str, more: int = 0) -> int:
        """Adds to a counter and returns it.

        Counters are not signed. A rank may only wait for one.
        """
        return int(self._store.add(self._name(name), more))

    def remove(self, *names: str) -> None:
        for name in names:
            self._store.delete_key(self._name(name))

    def _read(self, name: str) -> bytes:
        """Returns the data of a name in one request without waiting."""
        # `get` would wait. No value equals `_ABSENT`, so this exchange never changes one.
        return bytes(self._store.compare_set(self._name(name), _ABSENT, _ABSENT))

    def _get(self, names: Sequence[str], timeout: float = 0.0) -> dict[str, Any]:
        """Returns values by name, or raises a `DistStoreError` after a timeout in seconds.

        The default, 0, is the timeout of the store, for values that exist.
        """
        if not names:
            return {}
        before = self._store.timeout
        self._store.set_timeout(max(timedelta(seconds=timeout), before if timeout == 0 else MIN_TIMEOUT))
        try:
            content = self._store.multi_get([self._name(name) for name in names])
        finally:
            self._store.set_timeout(before)
        return {name: self._decode(name, data) for name, data in zip(names, content, strict=True)}

    def _present(self, names: Sequence[str]) -> list[str]:
        """Returns the names that have values, by a binary search for those without."""
        if not names or self._store.check([self._name(name) for name in names]):
            return list(names)
        if len(names) == 1:
            return []
        middle = len(names) // 2
        return self._present(names[:middle]) + self._present(names[middle:])

    def _name(self, name: str) -> str:
        return f"{self._scope}/{name}"

    def _encode(self, name: str, value: object) -> bytes:
        body = json.dumps(value).encode()
        if len(body) > MAX_UNCOMPRESSED_BYTES:
            body = _COMPRESSED + zlib.compress(body, level=1)
        return self._sign(name, body)

    def _sign(self, name: str, body: bytes) -> bytes:
        return self._signature(name, body) + body

    def _signature(self, name: str, body: bytes) -> bytes:
        message = f"{self._name(name)}\n".encode() + body
        return hmac.new(self._key, message, hashlib.sha256).hexdigest().encode()

    def _decode(self, name: str, data: bytes) -> Any:
        body = data[_DIGITS:]
        if hmac.compare_digest(data[:_DIGITS], self._signature(name, body)):
            with suppress(ValueError, RecursionError, zlib.error):  # without a key any program can write
                is_compressed = body.startswith(_COMPRESSED)
                return json.loads(zlib.decompress(body[len(_COMPRESSED) :]) if is_compressed else body)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The store of this run holds a value that none of its ranks has written (%s): it is ignored. "
                "Another program reaches the port of the store, or the ranks have different values of %s.",
                self._name(name),
                KEY_VARIABLE,
            )
        return None


def exits_after_error() -> bool:
    """Returns whether the interpreter exits after an uncaught exception, and waits for other threads."""
    return getattr(sys, "last_type", None) is not None and not threading.main_thread().is_alive()


def as_dataclass(kind: type[Message], value: object) -> Message | None:
    """Returns a dataclass from the result of `dataclasses.asdict`, or None for any other value.

    Its fields are numbers, text, booleans and lists of numbers.
    """
    if not isinstance(value, dict):
        return None
    hints = _hints(cast(Any, kind))
    fits = value.keys() == hints.keys() and all(_fits(value[name], hint) for name, hint in hints.items())
    return kind(**value) if fits else None


@functools.cache  # one rank reads the messages of all
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    if hint in (list[int], list[float]):
        kinds = (int,) if hint == list[int] else (int, float)
        return isinstance(value, list) and all(type(item) in kinds for item in value)
    return type(value) is hint or (hint is float and type(value) is int)


ReduceFunction = Callable[[list[Any]], Any]
"""Function that returns the decision from the values of all ranks in rank order."""

FormatAbsence = Callable[[str, Sequence[int], float], str]
"""Function that formats the error for absent ranks, from the operation, ranks and timeout in seconds."""


class Consensus:
    """Consensus of a single process, and the interface of consensus in general.

    Rank 0 makes each decision, and all ranks read it.
    """

    rank = 0
    size = 1
    is_threaded = True  # whether a background thread may use it while the main thread trains

    def decide(self, operation: str, value: object, reduce_fn: ReduceFunction, timeout: float) -> Any:
        """Returns the decision of rank 0 from the values of all ranks.

        Called on all ranks in the same order. Values and decision are encoded as JSON, so tuples become
        lists. An error of `reduce_fn` is raised on all ranks.

        Args:
            operation: Name of the call in error messages, equal on all ranks.
            reduce_fn: Function that returns the decision, called on rank 0.
            timeout: Seconds after which the ranks that have arrived raise a `StateError`.
        """
        return reduce_fn([value])

    def close(self, waits: bool = True) -> None:
        """Ends the use of the consensus on this rank."""


class StoreConsensus(Consensus):
    """Consensus over the store, which does not hang if a rank is absent, and names it in the error.

    A decision takes three requests on each rank, to write its value, read the decision, and delete an old
    value. The connection is used by one thread at a time.

    Args:
        find_ended: Returns ranks that have ended. Rank 0 does not wait for them, nor the others for rank 0.
    """

    def __init__(
        self,
        channel: StoreChannel,
        rank: int,
        size: int,
        format_absence: FormatAbsence | None = None,
        find_ended: Callable[[], Sequence[int]] = list,
    ) -> None:
        self.rank, self.size, self._channel = rank, size, channel
        self._format_absence = format_absence or _format_absence
        self._find_ended = find_ended
        self._number = 0
        self._old: list[str] = []  # names that this rank deletes after all ranks have read them
        self._decided_at = -DECISION_TIMEOUT

    def decide(self, operation: str, value: object, reduce_fn: ReduceFunction, timeout: float) -> Any:
        try:
            return self._decide(operation, value, reduce_fn, timeout)
        except DistError as error:
            raise StateError(
                f"`{operation}` failed: the store of the process group does not answer ({error}). "
                "The process that keeps it, rank 0 or the launcher, has probably ended. See its output for "
                "the cause."
            ) from error

    def _decide(self, operation: str, value: object, reduce_fn: ReduceFunction, timeout: float) -> Any:
        self._number += 1
        key, own = f"{self._number}/decision", f"{self._number}/{self.rank}"
        if self.rank == 0:
            decision = self._gather_and_decide([operation, value], reduce_fn, timeout)
            self._channel.post(key, decision)
            self._decided_at = time.monotonic()
            self._old.append(key)
            return unpack_decision(decision)
        self._channel.post(own, [operation, value])
        decision = self._channel.wait(
            [key], timeout + DECISION_TIMEOUT, lambda: [key] if self._find_ended() else []
        )[key]
        if decision is None:
            raise self._absence_error(operation, [0], timeout)
        self._remove_old(own)
        return unpack_decision(decision)

    def _remove_old(self, *names: str) -> None:
        self._channel.remove(*names, *self._old)
        self._old = []

    def _gather_and_decide(self, own: list[Any], reduce_fn: ReduceFunction, timeout: float) -> dict[str, Any]:
        operation = own[0]
        ranks = range(1, self.size)
        posted = {0: own} | self._channel.gather(f"{self._number}", ranks, timeout, self._find_ended)
        if absent := [rank for rank, value in posted.items() if value is None]:
            return pack_error(self._absence_error(operation, absent, timeout))
        self._remove_old()  # all ranks have read the previous decision
        if len({name for name, _ in posted.values()}) > 1:
            lines = "\n".join(f"  - Process {rank}: {name}" for rank, (name, _) in posted.items())
            return pack_error(StateError(f"The processes are in different operations:\n{lines}"))
        return pack_decision(reduce_fn, [value for _, value in posted.values()])

    def _absence_error(self, operation: str, absent: Sequence[int], timeout: float) -> StateError:
        ended = sorted(set(self._find_ended()) & set(absent))
        if not ended:
            return StateError(self._format_absence(operation, absent, timeout))
        which = ", ".join(map(str, ended))
        subject = (
            f"processes {which} of other nodes have"
            if len(ended) > 1
            else f"process {which} of another node has"
        )
        return StateError(
            f"`{operation}` was not completed: {subject} ended, or its machine does not answer. See the "
            "output there."
        )

    def close(self, waits: bool = True) -> None:
        """Ends the use of the consensus on this rank.

        Rank 0, whose process may keep the store, waits until the others have read the last decision, for at
        most `DECISION_TIMEOUT` seconds after it.

        Args:
            waits: Whether rank 0 waits, which it does not after an error that ends the run.
        """
        with suppress(DistError):  # the process that keeps the store has ended
            closed, pause = self._channel.count("closed", 1), POLL_INTERVAL / 64
            while (
                waits
                and self.rank == 0
                and closed < self.size
                and time.monotonic() < self._decided_at + DECISION_TIMEOUT
            ):
                time.sleep(pause)
                pause = min(2 * pause, POLL_INTERVAL)
                closed = self._channel.count("closed")


def pack_decision(reduce_fn: ReduceFunction, values: Sequence[Any]) -> dict[str, Any]:
    """Returns the decision of a function, or its error, in a form that `unpack_decision` reads."""
    try:
        return {"result": reduce_fn(list(values))}
    except AccelerateError as error:
        return pack_error(error)
    except Exception as error:  # raised again, on all ranks
        return pack_error(CheckpointError(f"Rank 0 failed for all ranks: {describe(error)}."))


def pack_error(error: AccelerateError) -> dict[str, str]:
    return {"error": type(error).__name__, "text": str(error)}


def unpack_decision(decision: dict[str, Any]) -> Any:
    """Returns a packed decision, or raises the packed error."""
    if "error" not in decision:
        return decision["result"]
    raise getattr(errors, decision["error"], CheckpointError)(decision["text"])


def format_absent_ranks(ranks: Sequence[int], timeout: float, word: str = "process") -> str:
    """Formats ranks that did not arrive, as in "processes 1, 3 did not arrive within 5 s"."""
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    subject = f"{word} {ranks[0]}" if len(ranks) == 1 else f"{plural} {', '.join(map(str, ranks))}"
    return f"{subject} did not arrive within {timeout:g} s"


def _format_absence(operation: str, ranks: Sequence[int], timeout: float) -> str:
    if exits_after_error():
        absent = "processes" if len(ranks) > 1 else "process"
        return (
            f"`{operation}` was not completed, because this process has failed and {absent} "
            f"{', '.join(map(str, ranks))} did not arrive."
        )
    return (
        f"`{operation}` must be called on all processes, and {format_absent_ranks(ranks, timeout)}. Its "
        "process or machine may have ended, or it is late and needs a longer hang_timeout, or the script has "
        "the call in a block such as `if accelerator.is_main_process:`."
    )
