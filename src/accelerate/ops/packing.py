"""Take nested tensors apart, plan how they travel, and put them together again.

Nothing travels here. What depends on the shapes only is worked out once per structure and kept as a `Plan`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from accelerate.base import ConfigurationError
from accelerate.nested import honor_mapping, honor_type
from accelerate.ops.dtensors import is_dtensor
from accelerate.ops.flat_buffers import FlatBuffer, lay_out

ALONE = 64 * 1024
"""Bytes from which a tensor travels by itself: copying it into a buffer would cost more than a call."""

_SMALLEST_LIMIT, _LARGEST_LIMIT = 256 * 1024, 32 * 1024 * 1024

Facts = tuple[Any, ...]


@dataclass(slots=True)
class Parts:
    """Nested tensors taken apart.

    Attributes:
        leaves: The tensors, in order.
        facts: Shape and dtype of each, one after the other.
        skeleton: The containers: how many leaves came before, and its length or its keys.
    """

    leaves: list[Tensor]
    facts: list[Any]
    skeleton: list[Any]

    @property
    def is_distributed(self) -> bool:
        """Whether a leaf is a distributed tensor."""
        return any(map(is_dtensor, self.leaves))


def take_apart(data: Any) -> Parts:
    """List the tensors of nested data, and note what they look like.

    Raises:
        TypeError: A leaf is not a tensor.
        ConfigurationError: The tensors lie on several devices.
    """
    parts = Parts([], [], [])
    _collect(data, parts.leaves, parts.facts, parts.skeleton)
    if parts.leaves:
        device = parts.leaves[0].device
        for leaf in parts.leaves:
            if leaf.device != device:
                raise _mixed_devices(parts.leaves)
    return parts


def put_together(data: Any, leaves: Iterator[Any]) -> Any:
    """Return the nesting of `data` with other leaves, in its own types."""
    if isinstance(data, Tensor):
        return next(leaves)
    if isinstance(data, (list, tuple)):
        return honor_type(data, [put_together(item, leaves) for item in data])
    return honor_mapping(data, {key: put_together(value, leaves) for key, value in data.items()})


def _collect(data: Any, leaves: list[Tensor], facts: list[Any], skeleton: list[Any]) -> None:
    if isinstance(data, Tensor):
        leaves.append(data)
        facts += (data.shape, data.dtype)
    elif isinstance(data, (list, tuple)):
        skeleton += (len(leaves), len(data))
        for item in data:
            _collect(item, leaves, facts, skeleton)
    elif isinstance(data, Mapping):
        skeleton += (len(leaves), tuple(data))
        for item in data.values():
            _collect(item, leaves, facts, skeleton)
    else:
        raise not_a_tensor(data)


def not_a_tensor(data: object) -> TypeError:
    """Build the error for a leaf that is something else."""
    return TypeError(
        f"A collective takes tensors in lists, tuples and dictionaries, and was given {type(data).__name__}: "
        "use `gather_object` or `broadcast_object_list` for other objects."
    )


def _mixed_devices(leaves: list[Tensor]) -> ConfigurationError:
    devices = ", ".join(sorted({str(leaf.device) for leaf in leaves}))
    return ConfigurationError(
        f"The tensors of one structure lie on {devices}, and a collective takes them from one device. "
        "Move them to one with `send_to_device`, or make one call for each device."
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """How the leaves of one structure travel.

    Attributes:
        mark: A number that stands for the operation, the structure, the shapes and the dtypes.
        whole: All leaves in one buffer, where that fits into the room that was asked for.
        buffers: The small leaves, where it does not.
        alone: The leaves that travel by themselves.
        empty: The leaves without elements, which need not travel.
    """

    mark: int
    whole: FlatBuffer | None
    buffers: tuple[FlatBuffer, ...]
    alone: tuple[int, ...]
    empty: tuple[int, ...]


def mark_of(*facts: object) -> int:
    """Return a number of 64 bits that stands for facts, by what their `repr` reads."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def plan_for(operation: str, parts: Parts, *, size: int, room: int, mixed: bool = True) -> Plan:
    """Work out how a structure travels; kept for the structures used last.

    Args:
        operation: Its name with the arguments that must agree on all processes.
        parts: The structure.
        size: Number of processes.
        room: Bytes that travel with the head.
        mixed: Whether several dtypes may share one buffer (bytes are only moved).
    """
    return _plan(operation, tuple(parts.facts), tuple(parts.skeleton), size, room, mixed)


@lru_cache(maxsize=256)
def _plan(operation: str, facts: Facts, skeleton: Facts, size: int, room: int, mixed: bool) -> Plan:
    shapes, dtypes = facts[::2], facts[1::2]
    lengths = [shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    mark = mark_of(operation, skeleton, facts)
    filled = [place for place, length in enumerate(lengths) if length]
    empty = tuple(place for place, length in enumerate(lengths) if not length)
    whole = lay_out(filled, shapes, dtypes, size)
    if whole.width <= room:
        return Plan(mark, whole, (), (), empty)
    shared = [place for place in filled if lengths[place] < ALONE]
    # Packing and unpacking hold copies of one buffer at a time: a quarter of everything at most.
    limit = max(_SMALLEST_LIMIT, min(_LARGEST_LIMIT // size, sum(lengths) // 4))
    loads = _load(shared, lengths, limit, dtypes, mixed)
    alone = [place for place in filled if lengths[place] >= ALONE]
    alone += [load[0] for load in loads if len(load) == 1]
    buffers = tuple(lay_out(load, shapes, dtypes, size) for load in loads if len(load) > 1)
    return Plan(mark, None, buffers, tuple(sorted(alone)), empty)


def _load(places: list[int], lengths: list[int], limit: int, dtypes: Facts, mixed: bool) -> list[list[int]]:
    """Distribute leaves over buffers of at most `limit` bytes."""
    loads: dict[Any, list[list[int]]] = {}
    filled: dict[Any, int] = {}
    for place in places:
        kind = None if mixed else dtypes[place]
        batches = loads.setdefault(kind, [[]])
        if batches[-1] and filled[kind] + lengths[place] > limit:
            batches.append([])
        filled[kind] = lengths[place] + (filled[kind] if batches[-1] else 0)
        batches[-1].append(place)
    return [batch for batches in loads.values() for batch in batches]
