"""Messages between ranks over the store of the process group: JSON values, signed with the key of the run.

The store of `torch.distributed` answers whoever reaches its port. So nothing that comes from it is unpickled.
Where the launcher has set a key for the run (`ACCELERATE_RUN_KEY`), a value that no rank of this run has
signed counts as absent. The signature is HMAC-SHA256 (RFC 2104) over the full name and the value, so a value
cannot be copied to another name, nor from another run.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, get_type_hints

from torch.distributed import Store  # type: ignore[attr-defined]

from accelerate.launch import KEY_VARIABLE

logger = logging.getLogger(__name__)

FIRST_PAUSE = 0.002
LONGEST_PAUSE = 0.1
Message = TypeVar("Message")

_DIGITS = hashlib.sha256().digest_size * 2


class StoreChannel:
    """Named values in a part of a store.

    Args:
        store: a connection that no other thread uses at the same time.
        scope: name of the part; the same on all ranks. It is part of each signature.
        environ: variables of this process, `ACCELERATE_RUN_KEY` among them.
    """

    def __init__(self, store: Store, scope: str, environ: Mapping[str, str]) -> None:
        self._store: Any = store
        self._scope = scope
        self._key = environ.get(KEY_VARIABLE, "").encode(errors="surrogateescape")
        self._has_warned = False

    @property
    def is_signed(self) -> bool:
        """Whether values of other runs and programs are told from those of this run."""
        return bool(self._key)

    def post(self, name: str, value: Any) -> None:
        """Set a value.

        Args:
            name: of the value in this part of the store.
            value: numbers, text, booleans, and lists and dictionaries of these; not None.

        Raises:
            TypeError: the value cannot be written as JSON.
            torch.distributed.DistError: the store does not answer.
        """
        self._store.set(self._name(name), self._encode(name, value))

    def post_first(self, name: str, value: Any) -> bool:
        """Set a value unless there is one; return whether the value is now this one."""
        mine = self._encode(name, value)
        return bool(self._store.compare_set(self._name(name), "", mine) == mine)

    def read(self, name: str) -> Any:
        """Return a value; None where there is none, or one that is not of this run."""
        return self._get([name])[name] if self._has([name]) else None

    def read_all(self, names: Sequence[str]) -> dict[str, Any]:
        """Return values by name, as `read` does; two requests where all are there."""
        return self._get(names) if self._has(names) else {name: self.read(name) for name in names}

    def wait(self, names: Sequence[str], seconds: float) -> dict[str, Any]:
        """Wait until values are there; signals are handled meanwhile.

        Args:
            names: of the values.
            seconds: to wait at most.

        Returns:
            The values by name; None for those that did not come in time.
        """
        end, pause = time.monotonic() + seconds, FIRST_PAUSE
        while (left := end - time.monotonic()) > 0:
            found = self._get(names) if self._has(names) else {}
            if found and None not in found.values():
                return found
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, LONGEST_PAUSE)
        return self.read_all(names)

    def count(self, name: str, more: int = 0) -> int:
        """Add to a counter and return it. Counters are not signed: a rank may wait for one, and no more."""
        return int(self._store.add(self._name(name), more))

    def remove(self, *names: str) -> None:
        """Delete values."""
        for name in names:
            self._store.delete_key(self._name(name))

    def _has(self, names: Sequence[str]) -> bool:
        return bool(self._store.check([self._name(name) for name in names]))

    def _get(self, names: Sequence[str]) -> dict[str, Any]:
        content = self._store.multi_get([self._name(name) for name in names])
        return {name: self._decode(name, data) for name, data in zip(names, content, strict=True)}

    def _name(self, name: str) -> str:
        return f"{self._scope}/{name}"

    def _encode(self, name: str, value: Any) -> bytes:
        body = json.dumps(value).encode()
        return self._signature(name, body) + body

    def _signature(self, name: str, body: bytes) -> bytes:
        message = f"{self._name(name)}\n".encode() + body
        return hmac.new(self._key, message, hashlib.sha256).hexdigest().encode()

    def _decode(self, name: str, data: bytes) -> Any:
        body = data[_DIGITS:]
        if hmac.compare_digest(data[:_DIGITS], self._signature(name, body)):
            with suppress(ValueError, RecursionError):  # without a key anybody can write anything
                return json.loads(body)
        self._warn(name)
        return None

    def _warn(self, name: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "The store of this run holds a value that none of its ranks has written (%s): it is ignored. "
            "Another program reaches the port of the store, or the ranks have different values of %s.",
            self._name(name),
            KEY_VARIABLE,
        )


def as_dataclass(kind: type[Message], value: Any) -> Message | None:
    """Build a dataclass from what `dataclasses.asdict` has made of one; None from anything else.

    Args:
        kind: its fields are numbers, text, booleans and lists of whole numbers.
        value: what was read.
    """
    if not isinstance(value, dict):
        return None
    hints = get_type_hints(kind)
    fits = value.keys() == hints.keys() and all(_fits(value[name], hint) for name, hint in hints.items())
    return kind(**value) if fits else None


def _fits(value: Any, hint: Any) -> bool:
    if hint == list[int]:
        return isinstance(value, list) and all(type(item) is int for item in value)
    return type(value) is hint or (hint is float and type(value) is int)
