"""Nested tensors and objects between processes: few collectives for a whole structure.

CPU tensors and objects begin with one header that compares the processes and contains small payloads.
What is larger follows: small tensors together in flat buffers, large ones each by itself, without a copy in
between. A distributed tensor (`torch.distributed.tensor.DTensor`) is one value, whatever ranks hold parts.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accelerate.nested import recursively_apply
from accelerate.ops.base import Header, Transport, at_least_1d, finished_reduction, reducible_dtype
from accelerate.ops.packing import (
    DtypeSegment,
    Parts,
    TransferPlan,
    joined_shape,
    mark_of,
    plan_for,
    put_together,
    take_apart,
)
from accelerate.ops.verify import Call, agree, checking_header, debugging, must_verify


def gather_packed(data: Any, transport: Transport, call: Call) -> Any:
    """Join nested tensors of equal shapes and dtypes on all ranks along their first dimension."""
    parts = take_apart(data)
    if any(map(is_dtensor, parts.leaves)):
        return recursively_apply(_gather_leaf, data, transport, call, error_on_other_type=True)
    leaves, size = parts.leaves, transport.size
    plan, header = _begin(parts, transport, call, sends=True)
    results: list[Any] = [None] * len(leaves)
    for index in plan.empty:
        results[index] = leaves[index].new_empty(joined_shape(leaves[index].shape, size))
    if header is not None and plan.whole is not None:
        for segment in plan.whole.segments:
            segment.receive(header, results)
        if leaves and not leaves[0].is_cpu:
            results = [result.to(leaves[0].device) for result in results]
    for layout in plan.buffers:
        joined = transport.gather(layout.pack(leaves)).view(size, -1)
        for segment in layout.segments:
            segment.split_rows(segment.read(joined), results)
    for index in plan.alone:
        results[index] = transport.gather(leaves[index])
    return put_together(data, iter(results))


def reduce_packed(data: Any, how: str, scale: float, transport: Transport, call: Call) -> Any:
    """Combine nested tensors of equal shapes and dtypes on all ranks, and multiply the result by `scale`.

    What is sent in the header is combined in rank order, in the dtype in which a collective would do it.
    """
    parts = take_apart(data)
    if any(map(is_dtensor, parts.leaves)):
        return recursively_apply(_reduce_leaf, data, how, scale, transport, call, error_on_other_type=True)
    leaves, size = parts.leaves, transport.size
    plan, header = _begin(parts, transport, call, sends=True, mixed=False)
    results: list[Any] = [None] * len(leaves)
    if header is not None and plan.whole is not None:
        for segment, rows in plan.whole.received(header):
            total = finished_reduction(_combine(rows, segment, how), how, size, leaves[segment.indices[0]])
            segment.split(_scaled(total, scale), results)
    for layout in plan.buffers:
        segment = layout.segments[0]
        segment.split(_scaled(transport.reduce(segment.flatten(leaves), how), scale), results)
    for index in plan.alone:
        results[index] = _scaled(transport.reduce(leaves[index], how), scale)
    for index in plan.empty:
        empty = leaves[index].detach().to(reducible_dtype(leaves[index].dtype), copy=True)
        results[index] = _scaled(finished_reduction(empty, how, size, leaves[index]), scale)
    return put_together(data, iter(results))


def broadcast_packed(data: Any, source: int, transport: Transport, call: Call) -> Any:
    """Overwrite the tensors of the other processes, in place, with those of rank `source`."""
    parts = take_apart(data)
    leaves, sends = parts.leaves, transport.rank == source
    with torch.no_grad():
        plan, header = _begin(parts, transport, call, sends=sends)
        if header is not None and plan.whole is not None and not sends:
            for segment, rows in plan.whole.received(header):
                segment.overwrite(rows[source], leaves)
        for layout in plan.buffers:
            device = leaves[layout.segments[0].indices[0]].device
            buffer = torch.empty(layout.width, dtype=torch.uint8, device=device)
            if sends:
                layout.pack_into(leaves, buffer)
            transport.broadcast(buffer, source)
            if not sends:
                for segment in layout.segments:
                    segment.overwrite(segment.read(buffer), leaves)
        for index in plan.alone:
            transport.broadcast(leaves[index], source)
    return put_together(data, iter(leaves))


def _begin(
    parts: Parts, transport: Transport, call: Call, *, sends: bool, mixed: bool = True
) -> tuple[TransferPlan, Header | None]:
    """Plan how a structure is sent, and exchange headers where this transport begins with them.

    The header is the one that contains the payload; None where it is sent otherwise.
    """
    goes_over_cpu = transport.verifies or not parts.leaves or parts.leaves[0].is_cpu  # as the header does
    header = transport.header if goes_over_cpu else None
    room = -1 if header is None else header.room
    name = f"{call.operation}({call.arguments})"
    plan = plan_for(name, parts, size=transport.size, room=room, mixed=mixed)
    if header is not None:
        if sends and plan.whole is not None:
            plan.whole.send(parts.leaves, header)
        agree(transport, header, plan.mark, call)
    elif debugging():
        agree(transport, checking_header(transport), plan.mark, call)
    return plan, header


def _combine(rows: Tensor, segment: DtypeSegment, how: str) -> Tensor:
    combine = {"max": torch.maximum, "min": torch.minimum}.get(how, torch.add)
    first, second, *others = rows.to(reducible_dtype(segment.dtype)).unbind(0)
    total = combine(first, second)
    for row in others:
        combine(total, row, out=total)
    return total


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1.0 else torch.mul(tensor, scale)


# Distributed tensors


def is_dtensor(value: object) -> bool:
    """Return whether each rank of a mesh holds a part of a value; torch's class stays unimported."""
    return type(value) is not Tensor and isinstance(value, Tensor) and hasattr(value, "full_tensor")


def local_tensor(value: Any) -> Any:
    """Return the part of a distributed tensor that this rank holds; another tensor as it is."""
    return value.to_local() if is_dtensor(value) else value


def whole_tensor(value: Any) -> Tensor:
    """Return the whole of a distributed tensor, on the device of its mesh; called on all ranks.

    Parts that are offloaded to the CPU are moved first: the process group may have no backend for the CPU.
    """
    whole: Tensor = value.to(value.device_mesh.device_type).full_tensor()
    return whole


def whole_tensors(data: Any) -> Any:
    """Return nested data with whole tensors instead of distributed ones; called on all ranks."""
    return recursively_apply(whole_tensor, data, test_type=is_dtensor)


def _gather_leaf(leaf: Tensor, transport: Transport, call: Call) -> Tensor:
    """Join a tensor of all processes: of distributed ones, the whole tensor of each group that shares one."""
    if not is_dtensor(leaf):
        return gather_packed(leaf, transport, call)  # type: ignore[no-any-return]
    whole, first_ranks = _whole_and_first_ranks(leaf, transport)
    if first_ranks == [0]:
        return at_least_1d(whole)
    parts = gather_packed(whole, transport, call).chunk(transport.size)
    return torch.cat([parts[rank] for rank in first_ranks])


def _reduce_leaf(leaf: Tensor, how: str, scale: float, transport: Transport, call: Call) -> Tensor:
    """Combine a tensor of all processes; of a distributed one, each group that shares one counts once."""
    if not is_dtensor(leaf):
        return reduce_packed(leaf, how, scale, transport, call)  # type: ignore[no-any-return]
    whole, first_ranks = _whole_and_first_ranks(leaf, transport)
    if first_ranks == [0]:
        return _scaled(whole, scale)
    if how in ("max", "min"):
        return reduce_packed(whole, how, scale, transport, call)  # type: ignore[no-any-return]
    counted = whole if transport.rank in first_ranks else torch.zeros_like(whole)
    total: Tensor = reduce_packed(counted, "sum", 1.0, transport, call)
    return _scaled(total if how == "sum" else total / len(first_ranks), scale)


def _whole_and_first_ranks(leaf: Any, transport: Transport) -> tuple[Tensor, list[int]]:
    """The whole tensor, and the first rank of each group that shares one."""
    ranks = leaf.device_mesh.mesh
    whole = whole_tensor(leaf)
    if ranks.numel() == transport.size:
        return whole, [0]
    return whole, sorted(set(transport.gather_object(int(ranks.min()))))


# Objects and numbers


def gather_objects(obj: Any, transport: Transport, call: Call) -> list[Any]:
    """Collect one picklable object of each process, in rank order, on every process."""
    header = transport.header
    if header is None:
        agree_on_call(transport, call)
        return transport.gather_object(obj)
    return [pickle.loads(part) for part in _share(pickle.dumps(obj), header, transport, call)]


def broadcast_object(obj: Any, source: int, transport: Transport, call: Call) -> Any:
    """Return rank `source`'s object on every process; on the source it is the very object given."""
    header = transport.header
    if header is None:
        agree_on_call(transport, call)
        return transport.broadcast_object(obj, source)
    sends = transport.rank == source
    payload = pickle.dumps(obj) if sends else b""
    _announce(payload, header, transport, call)
    length = header.lengths()[source]
    if length <= header.room:
        return obj if sends else pickle.loads(header.payloads()[source])
    buffer = torch.empty(length, dtype=torch.uint8, device="cpu")
    content = buffer.numpy().data
    if sends:
        content[:] = payload
    transport.broadcast(buffer, source)
    return obj if sends else pickle.loads(content)


def share_numbers(
    numbers: Sequence[int], transport: Transport, call: Call, *facts: object
) -> list[list[int]]:
    """Gather the integers of all processes, as many on each, in rank order; `facts` as in `agree_on_call`."""
    header = transport.header
    if header is not None and (transport.verifies or debugging()):
        parts = _share(array("q", numbers).tobytes(), header, transport, call, *facts)
        return [part.cast("q").tolist() for part in parts]
    agree_on_call(transport, call, *facts)
    table: list[list[int]] = transport.gather(torch.tensor([list(numbers)], dtype=torch.int64)).tolist()
    return table


def agree_on_call(transport: Transport, call: Call, *facts: object) -> None:
    """Compare the calls of the processes: where that is cheap, and in debug mode everywhere.

    `facts` is what else has to be the same on all processes, by its `repr`.
    """
    if must_verify(transport):
        agree(transport, checking_header(transport), mark_of(call.operation, call.arguments, *facts), call)


def _announce(payload: bytes, header: Header, transport: Transport, call: Call, *facts: object) -> None:
    if len(payload) <= header.room:
        header.put(payload)
    mark = mark_of(call.operation, call.arguments, *facts)
    agree(transport, header, mark, call, len(payload))


def _share(
    payload: bytes, header: Header, transport: Transport, call: Call, *facts: object
) -> list[memoryview]:
    """Return the bytes of all processes; valid until the next collective."""
    _announce(payload, header, transport, call, *facts)
    lengths = header.lengths()
    longest = max(lengths)
    if longest <= header.room:
        return header.payloads()
    padded = torch.empty(longest, dtype=torch.uint8, device="cpu")
    padded.numpy().data[: len(payload)] = payload
    joined = transport.gather(padded).numpy().data
    return [joined[rank * longest : rank * longest + length] for rank, length in enumerate(lengths)]
