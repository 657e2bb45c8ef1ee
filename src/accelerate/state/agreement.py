"""How ranks agree over the store of the process group, and not over its collectives.

`StoreChannel` posts and reads JSON values, signed with the key of the run; `StoreConsensus` lets rank 0
decide for all. A background thread may use them while the main thread trains, and a rank that does not come
is named.

The store of `torch.distributed` answers whoever reaches its port. So nothing that comes from it is unpickled.
Where the launcher has set a key for the run (`ACCELERATE_RUN_KEY`), a value that no rank of this run has
signed counts as absent. The signature is HMAC-SHA256 (RFC 2104) over the full name and the value, so a value
cannot be copied to another name, nor from another run.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import logging
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

PAUSE = 0.1
"""Seconds between requests for a value that is not of this run, and for counters at the end of a run."""
LONGEST_WAIT = 5.0
"""Seconds that one request waits for values: Python handles signals, such as Ctrl-C, between two requests."""
SHORTEST = timedelta(milliseconds=1)  # a store takes 0 for no limit
SECONDS_FOR_THE_VERDICT = 10.0
LARGEST_PLAIN = 1 << 20
"""Bytes beyond which a value is compressed: `TCPStore` closes a connection that sets more than 8 MB."""
_COMPRESSED = b"z"  # no JSON begins with it
_ABSENT = b"?"  # no value is so short
_END = b"\n"  # JSON has none
Message = TypeVar("Message")

_DIGITS = hashlib.sha256().digest_size * 2


class StoreChannel:
    """Named values in a part of a store."""

    def __init__(self, store: Store, scope: str, environ: Mapping[str, str]) -> None:
        self._store: Any = store
        self._scope = scope
        self._key = environ.get(KEY_VARIABLE, "").encode(errors="surrogateescape")
        self._has_warned = False

    @property
    def is_signed(self) -> bool:
        """Whether values that another run or program posted are refused."""
        return bool(self._key)

    def post(self, name: str, value: Any) -> None:
        """Set a value: numbers, text, booleans, and lists and dictionaries of these; not None."""
        self._store.set(self._name(name), self._encode(name, value))

    def post_all(self, values: Mapping[str, Any]) -> None:
        """Set several values in one request."""
        encoded = [self._encode(name, value) for name, value in values.items()]
        self._store.multi_set([self._name(name) for name in values], encoded)

    def decide(self, name: str, value: Any) -> Any:
        """Set a value unless there is one, and return the one that is there: the first decides for all."""
        return self._decode(name, self._store.compare_set(self._name(name), "", self._encode(name, value)))

    def read(self, name: str) -> Any:
        """Return a value; None where there is none, or one that is not of this run."""
        data = self._read(name)
        return None if data == _ABSENT else self._decode(name, data)

    def append(self, name: str, value: Any) -> None:
        """Append a value to a list."""
        self._store.append(self._name(name), self._sign(name, json.dumps(value).encode()) + _END)

    def read_list(self, name: str) -> list[Any]:
        """Return the values of a list, in the order in which they were appended."""
        values = (self._decode(name, line) for line in self._read(name).split(_END)[:-1])
        return [value for value in values if value is not None]

    def wait(self, names: Sequence[str], seconds: float) -> dict[str, Any]:
        """Wait until values are there, and return them by name; None for those that did not come in time.

        One request where all come within `LONGEST_WAIT`. No other thread can use the connection meanwhile.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                values = self._get(names, min(left, LONGEST_WAIT))
            except DistStoreError:  # some did not come in time
                continue
            if None not in values.values():
                return values
            time.sleep(min(PAUSE, left))  # a value that is not of this run may be replaced
        return dict.fromkeys(names) | self._get(self._present(names))

    def gather(self, topic: str, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
        """Wait for the values that ranks post as `topic/rank`; see `wait`."""
        values = self.wait([f"{topic}/{rank}" for rank in ranks], seconds)
        return dict(zip(ranks, values.values(), strict=True))

    def count(self, name: str, more: int = 0) -> int:
        """Add to a counter and return it. Counters are not signed: a rank may wait for one, and no more."""
        return int(self._store.add(self._name(name), more))

    def remove(self, *names: str) -> None:
        for name in names:
            self._store.delete_key(self._name(name))

    def _read(self, name: str) -> bytes:
        """Return the data of a name without waiting for it, in one request."""
        # An exchange against a value that no rank has changes nothing. `get` would wait.
        return bytes(self._store.compare_set(self._name(name), _ABSENT, _ABSENT))

    def _get(self, names: Sequence[str], seconds: float = 0.0) -> dict[str, Any]:
        """Return values by name; they are there, or come within `seconds`."""
        if not names:
            return {}
        before = self._store.timeout
        self._store.set_timeout(max(timedelta(seconds=seconds), before if seconds == 0 else SHORTEST))
        try:
            content = self._store.multi_get([self._name(name) for name in names])
        finally:
            self._store.set_timeout(before)
        return {name: self._decode(name, data) for name, data in zip(names, content, strict=True)}

    def _present(self, names: Sequence[str]) -> list[str]:
        """Return those names that have values: halves are searched in which some have none."""
        if not names or self._store.check([self._name(name) for name in names]):
            return list(names)
        if len(names) == 1:
            return []
        middle = len(names) // 2
        return self._present(names[:middle]) + self._present(names[middle:])

    def _name(self, name: str) -> str:
        return f"{self._scope}/{name}"

    def _encode(self, name: str, value: Any) -> bytes:
        body = json.dumps(value).encode()
        if len(body) > LARGEST_PLAIN:
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
            with suppress(ValueError, RecursionError, zlib.error):  # without a key anybody can write anything
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


def as_dataclass(kind: type[Message], value: Any) -> Message | None:
    """Build a dataclass from what `dataclasses.asdict` has made of one; None from anything else.

    Its fields are numbers, text, booleans and lists of whole numbers.
    """
    if not isinstance(value, dict):
        return None
    hints = _hints(cast(Any, kind))
    fits = value.keys() == hints.keys() and all(_fits(value[name], hint) for name, hint in hints.items())
    return kind(**value) if fits else None


@functools.cache  # one rank reads the messages of all
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    if hint in (list[int], list[float]):
        kinds = (int,) if hint == list[int] else (int, float)
        return isinstance(value, list) and all(type(item) in kinds for item in value)
    return type(value) is hint or (hint is float and type(value) is int)


Judge = Callable[[list[Any]], Any]
"""Turns the values of all ranks, in their order, into the decision."""

DescribeAbsence = Callable[[str, Sequence[int], float], str]
"""Writes the error for ranks that did not come in time: of the name of the call, the ranks, the seconds."""


class Consensus:
    """Rank 0 decides, and all ranks read the decision; here with one process, which decides alone."""

    rank = 0
    size = 1
    is_threaded = True  # a background thread may use it while the main thread trains

    def decide(self, what: str, value: Any, judge: Judge, patience: float) -> Any:
        """Let rank 0 decide from the values of all ranks; called on all ranks in the same order.

        JSON holds values and decision: tuples become lists. What the judge raises is raised on all ranks.
        After `patience` seconds without a rank, those that came to `what` raise a `StateError`.
        """
        return judge([value])

    def share(self, name: str, make: Callable[[], Any], patience: float) -> tuple[int, Any]:
        """Let one of the ranks that give the same name make a value; return its rank and the value.

        Called on all ranks after `decide`. An empty name takes no part: its rank gets -1 and None. What
        `make` raises is raised on the ranks of that name.
        """
        return (self.rank, make()) if name else (-1, None)

    def close(self) -> None:
        """End the agreement on this rank."""


class StoreConsensus(Consensus):
    """Over a connection to the store: a rank that does not come is named, and does not block the others.

    A decision takes three requests on each rank: its value, the decision, and the removal of an old value.
    The connection is used by one thread at a time.
    """

    def __init__(
        self, channel: StoreChannel, rank: int, size: int, describe_absence: DescribeAbsence | None = None
    ) -> None:
        self.rank, self.size, self._channel = rank, size, channel
        self._describe_absence = describe_absence or _describe_absence
        self._number = 0
        self._old: list[str] = []  # what this rank has posted, and removes when all have read it
        self._decided_at = -SECONDS_FOR_THE_VERDICT

    def decide(self, what: str, value: Any, judge: Judge, patience: float) -> Any:
        try:
            return self._decide(what, value, judge, patience)
        except DistError as error:
            raise StateError(
                f"`{what}` cannot be agreed upon: the store of the process group does not answer ({error}). "
                "Process 0 keeps it, and has probably ended: see its output for the cause."
            ) from error

    def _decide(self, what: str, value: Any, judge: Judge, patience: float) -> Any:
        self._number += 1
        key, own = f"{self._number}/verdict", f"{self._number}/{self.rank}"
        if self.rank == 0:
            verdict = self._judge([what, value], judge, patience)
            self._channel.post(key, verdict)
            self._decided_at = time.monotonic()
            self._old.append(key)
            return unpack(verdict)
        self._channel.post(own, [what, value])
        verdict = self._channel.wait([key], patience + SECONDS_FOR_THE_VERDICT)[key]
        if verdict is None:
            raise StateError(self._describe_absence(what, [0], patience))
        self._remove_old(own)
        return unpack(verdict)

    def _remove_old(self, *names: str) -> None:
        self._channel.remove(*names, *self._old)
        self._old = []

    def _judge(self, own: list[Any], judge: Judge, patience: float) -> dict[str, Any]:
        what = own[0]
        posted = {0: own} | self._channel.gather(f"{self._number}", range(1, self.size), patience)
        if missing := [rank for rank, value in posted.items() if value is None]:
            return pack_error(StateError(self._describe_absence(what, missing, patience)))
        self._remove_old()  # all ranks have read the verdict before
        if len({name for name, _ in posted.values()}) > 1:
            lines = "\n".join(f"  - Process {rank}: {name}" for rank, (name, _) in posted.items())
            return pack_error(StateError(f"The processes do different things at the same time:\n{lines}"))
        return pack_verdict(judge, [value for _, value in posted.values()])

    def share(self, name: str, make: Callable[[], Any], patience: float) -> tuple[int, Any]:
        if not name:
            return -1, None
        topic = f"{self._number}/shared/{name}"
        maker = int(self._channel.decide(f"{topic}/maker", self.rank))
        if maker == self.rank:
            made = pack_verdict(lambda _: make(), [])
            self._channel.post(topic, made)
            self._old += [topic, f"{topic}/maker"]
        else:
            made = self._channel.wait([topic], patience)[topic]
        if made is None:
            raise StateError(self._describe_absence(name, [maker], patience))
        return maker, unpack(made)

    def close(self) -> None:
        """End the agreement on this rank; rank 0, whose process may keep the store, waits for the others.

        It waits until they have read the last decision, `SECONDS_FOR_THE_VERDICT` after it at most.
        """
        with suppress(DistError):  # the process that keeps the store has ended
            closed, pause = self._channel.count("closed", 1), PAUSE / 64
            while (
                self.rank == 0
                and closed < self.size
                and time.monotonic() < self._decided_at + SECONDS_FOR_THE_VERDICT
            ):
                time.sleep(pause)
                pause = min(2 * pause, PAUSE)
                closed = self._channel.count("closed")


def pack_verdict(judge: Judge, values: Sequence[Any]) -> dict[str, Any]:
    """Return the decision of a judge, or its error, as JSON that `unpack` reads on every rank."""
    try:
        return {"result": judge(list(values))}
    except AccelerateError as error:
        return pack_error(error)
    except Exception as error:  # of any kind: the other ranks have to know
        return pack_error(CheckpointError(f"Process 0 failed for all: {describe(error)}."))


def pack_error(error: AccelerateError) -> dict[str, str]:
    return {"error": type(error).__name__, "text": str(error)}


def unpack(verdict: dict[str, Any]) -> Any:
    """Return a decision, or raise the error that took its place."""
    if "error" not in verdict:
        return verdict["result"]
    raise getattr(errors, verdict["error"], CheckpointError)(verdict["text"])


def spell_absent(ranks: Sequence[int], seconds: float, word: str = "process") -> str:
    """Say which ranks did not come in time: "processes 1, 3 did not come within 5 s"."""
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    who = f"{word} {ranks[0]}" if len(ranks) == 1 else f"{plural} {', '.join(map(str, ranks))}"
    return f"{who} did not come within {seconds:g} s"


def _describe_absence(what: str, ranks: Sequence[int], patience: float) -> str:
    return (
        f"`{what}` must be called on all processes, and {spell_absent(ranks, patience)}. Take it out of "
        "`if accelerator.is_main_process:` and the like; a process that is only late needs a longer "
        "hang_timeout."
    )
