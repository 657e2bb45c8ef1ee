"""Objects and numbers of all processes: in the head of one collective where they are small."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from accelerate.ops.base import Transport
from accelerate.ops.header import Head
from accelerate.ops.packing import mark_of
from accelerate.ops.verify import Call, agree, checking_head, debugging, must_verify


def gather_objects(obj: Any, transport: Transport, call: Call) -> list[Any]:
    """Collect one picklable object of each process, in rank order, on every process.

    Args:
        obj: The object of this process.
        transport: The wire between several processes.
        call: For the message when the processes disagree.
    """
    head = transport.head
    if head is None:
        agree_on_call(transport, call)
        return transport.gather_object(obj)
    return [pickle.loads(part) for part in _share(pickle.dumps(obj), head, transport, call)]


def broadcast_object(obj: Any, source: int, transport: Transport, call: Call) -> Any:
    """Return rank `source`'s object on every process; on the source it is the very object given.

    Args:
        obj: The object; not used on the receiving ranks.
        source: The rank to send from.
        transport: The wire between several processes.
        call: For the message when the processes disagree.
    """
    head = transport.head
    if head is None:
        agree_on_call(transport, call)
        return transport.broadcast_object(obj, source)
    sends = transport.rank == source
    payload = pickle.dumps(obj) if sends else b""
    _announce(payload, head, transport, call)
    length = head.lengths()[source]
    if length <= head.room:
        return obj if sends else pickle.loads(head.payloads()[source])
    buffer = torch.empty(length, dtype=torch.uint8, device="cpu")
    content = buffer.numpy().data
    if sends:
        content[:] = payload
    transport.broadcast(buffer, source)
    return obj if sends else pickle.loads(content)


def share_numbers(
    numbers: Sequence[int], transport: Transport, call: Call, *facts: object
) -> list[list[int]]:
    """Tell every process the integers of all, in rank order.

    Args:
        numbers: As many on each rank.
        transport: The wire between several processes.
        call: For the message when the processes disagree.
        *facts: What else has to be the same on all processes, by what its `repr` reads.
    """
    head = transport.head
    if head is not None and (transport.verifies or debugging()):
        parts = _share(array("q", numbers).tobytes(), head, transport, call, *facts)
        return [part.cast("q").tolist() for part in parts]
    agree_on_call(transport, call, *facts)
    table: list[list[int]] = transport.gather(torch.tensor([list(numbers)], dtype=torch.int64)).tolist()
    return table


def agree_on_call(transport: Transport, call: Call, *facts: object) -> None:
    """Compare the calls of the processes: where that is cheap, and in debug mode everywhere.

    Args:
        transport: The wire between several processes.
        call: What this process does.
        *facts: What else has to be the same on all processes, by what its `repr` reads.

    Raises:
        DistributedOperationException: They differ.
    """
    if must_verify(transport):
        agree(transport, checking_head(transport), mark_of(call.operation, call.arguments, *facts), call)


def _announce(payload: bytes, head: Head, transport: Transport, call: Call, *facts: object) -> None:
    if len(payload) <= head.room:
        head.put(payload)
    mark = mark_of(call.operation, call.arguments, *facts)
    agree(transport, head, mark, call, len(payload))


def _share(payload: bytes, head: Head, transport: Transport, call: Call, *facts: object) -> list[memoryview]:
    """Return the bytes of all processes; valid until the next collective."""
    _announce(payload, head, transport, call, *facts)
    lengths = head.lengths()
    longest = max(lengths)
    if longest <= head.room:
        return head.payloads()
    padded = torch.empty(longest, dtype=torch.uint8, device="cpu")
    padded.numpy().data[: len(payload)] = payload
    joined = transport.gather(padded).numpy().data
    return [joined[rank * longest : rank * longest + length] for rank, length in enumerate(lengths)]
