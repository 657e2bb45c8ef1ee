"""Collectives over nested tensors and objects, with few collectives of the transport for a whole structure.

The public collectives in `ops/collectives.py` call these functions. For CPU tensors and objects, the ranks
first exchange one header, which compares their calls and contains small payloads. Larger payloads follow:
small tensors packed into flat buffers, and large ones separately and without a copy. A distributed tensor
(`torch.distributed.tensor.DTensor`) counts as one tensor, independent of its placements.
"""

from __future__ import annotations

import logging
import pickle
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accelerate.nested import recursively_apply
from accelerate.ops.base import Header, Transport, at_least_1d, finish_reduction, reducible_dtype
from accelerate.ops.packing import (
    DtypeSegment,
    FlatStructure,
    TransferPlan,
    fingerprint_of,
    flatten_structure,
    joined_shape,
    plan_transfer,
    unflatten_structure,
)
from accelerate.ops.verify import Call, checking_header, compare_calls, is_debug_mode, must_verify


def gather_packed(data: Any, transport: Transport, call: Call) -> Any:
    """Concatenates nested tensors of equal shapes and dtypes on all ranks along their first dimension."""
    structure = flatten_structure(data)
    if any(map(is_dtensor, structure.leaves)):
        return recursively_apply(_gather_leaf, data, transport, call, error_on_other_type=True)
    leaves, size = structure.leaves, transport.size
    plan, header = _begin(structure, transport, call, sends=True)
    results: list[Any] = [None] * len(leaves)
    for index in plan.empty:
        results[index] = leaves[index].new_empty(joined_shape(leaves[index].shape, size))
    if header is not None and plan.in_header is not None:
        for segment in plan.in_header.segments:
            segment.receive(header, results)
        if leaves and not leaves[0].is_cpu:
            results = [result.to(leaves[0].device) for result in results]
    for layout in plan.buffers:
        joined = transport.gather(layout.pack(leaves)).view(size, -1)
        for segment in layout.segments:
            segment.split_rows(segment.read(joined), results)
    for index in plan.separate:
        results[index] = transport.gather(leaves[index])
    return unflatten_structure(data, iter(results))


def reduce_packed(data: Any, how: str, scale: float, transport: Transport, call: Call) -> Any:
    """Reduces nested tensors of equal shapes and dtypes on all ranks, and multiplies the result by `scale`.

    Tensors in the header are reduced in rank order, in the dtype that a collective would use.
    """
    structure = flatten_structure(data)
    if any(map(is_dtensor, structure.leaves)):
        return recursively_apply(_reduce_leaf, data, how, scale, transport, call, error_on_other_type=True)
    leaves, size = structure.leaves, transport.size
    plan, header = _begin(structure, transport, call, sends=True, mixed=False)
    results: list[Any] = [None] * len(leaves)
    if header is not None and plan.in_header is not None:
        for segment, rows in plan.in_header.received(header):
            total = finish_reduction(_reduce_rows(rows, segment, how), how, size, leaves[segment.indices[0]])
            segment.split(_scaled(total, scale), results)
    for layout in plan.buffers:
        segment = layout.segments[0]
        segment.split(_scaled(transport.reduce(segment.flatten(leaves), how), scale), results)
    for index in plan.separate:
        results[index] = _scaled(transport.reduce(leaves[index], how), scale)
    for index in plan.empty:
        empty = leaves[index].detach().to(reducible_dtype(leaves[index].dtype), copy=True)
        results[index] = _scaled(finish_reduction(empty, how, size, leaves[index]), scale)
    return unflatten_structure(data, iter(results))


def broadcast_packed(data: Any, source: int, transport: Transport, call: Call) -> Any:
    """Overwrites the tensors of the other ranks in place with those of rank `source`."""
    structure = flatten_structure(data)
    leaves, sends = structure.leaves, transport.rank == source
    with torch.no_grad():
        plan, header = _begin(structure, transport, call, sends=sends)
        if header is not None and plan.in_header is not None and not sends:
            for segment, rows in plan.in_header.received(header):
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
        for index in plan.separate:
            transport.broadcast(leaves[index], source)
    return unflatten_structure(data, iter(leaves))


def _begin(
    structure: FlatStructure, transport: Transport, call: Call, *, sends: bool, mixed: bool = True
) -> tuple[TransferPlan, Header | None]:
    """Plans the transfer of a structure, and exchanges headers if the tensors are sent over the CPU.

    Args:
        sends: Whether this rank sends tensors, and writes them into the header if they fit.
        mixed: Whether a flat buffer may contain several dtypes.

    Returns:
        The plan, and the header of tensors that are sent over the CPU, or None.
    """
    is_over_cpu = transport.verifies or not structure.leaves or structure.leaves[0].is_cpu  # as the header is
    header = transport.header if is_over_cpu else None
    capacity = -1 if header is None else header.capacity
    name = f"{call.operation}({call.arguments})"
    plan = plan_transfer(name, structure, size=transport.size, capacity=capacity, mixed=mixed)
    if header is not None:
        if sends and plan.in_header is not None:
            plan.in_header.send(structure.leaves, header)
        compare_calls(transport, header, plan.fingerprint, call)
    elif is_debug_mode():
        compare_calls(transport, checking_header(transport), plan.fingerprint, call)
    return plan, header


def _reduce_rows(rows: Tensor, segment: DtypeSegment, how: str) -> Tensor:
    reduce = {"max": torch.maximum, "min": torch.minimum}.get(how, torch.add)
    first, second, *others = rows.to(reducible_dtype(segment.dtype)).unbind(0)
    total = reduce(first, second)
    for row in others:
        reduce(total, row, out=total)
    return total


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1.0 else torch.mul(tensor, scale)


# Distributed tensors


def is_dtensor(value: object) -> bool:
    """Returns whether a value is a `DTensor`, without an import of the class."""
    return type(value) is not Tensor and isinstance(value, Tensor) and hasattr(type(value), "full_tensor")


def local_tensor(value: Any) -> Any:
    """Returns the local shard of a distributed tensor, and any other value unchanged."""
    return value.to_local() if is_dtensor(value) else value


def to_full_tensor(value: Any) -> Tensor:
    """Returns the full tensor of a distributed tensor on the device of its mesh.

    Called on all ranks of the mesh. Shards that are offloaded to the CPU are moved to that device first,
    because the process group may have no backend for the CPU.
    """
    # torch warns that several gathers of a tensor are slower than one, and that sums would be rounded.
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    was_disabled, log.disabled = log.disabled, True
    try:
        full: Tensor = value.to(value.device_mesh.device_type).full_tensor()
    finally:
        log.disabled = was_disabled
    return full


def to_full_tensors(data: Any) -> Any:
    """Replaces the distributed tensors in nested data by full tensors.

    Called on all ranks.
    """
    return recursively_apply(to_full_tensor, data, test_type=is_dtensor)


def _gather_leaf(leaf: Tensor, transport: Transport, call: Call) -> Tensor:
    """Concatenates a tensor of all ranks, or the full tensors of a distributed one.

    The result has each full tensor once for each mesh, and not once for each rank.
    """
    if not is_dtensor(leaf):
        return gather_packed(leaf, transport, call)  # type: ignore[no-any-return]
    full, first_ranks = _full_tensor_and_first_ranks(leaf, transport)
    if first_ranks == [0]:
        return at_least_1d(full)
    by_rank = gather_packed(full, transport, call).chunk(transport.size)
    return torch.cat([by_rank[rank] for rank in first_ranks])


def _reduce_leaf(leaf: Tensor, how: str, scale: float, transport: Transport, call: Call) -> Tensor:
    """Reduces a tensor of all ranks, or the full tensors of a distributed one.

    Each full tensor counts once for each mesh, and not once for each rank.
    """
    if not is_dtensor(leaf):
        return reduce_packed(leaf, how, scale, transport, call)  # type: ignore[no-any-return]
    full, first_ranks = _full_tensor_and_first_ranks(leaf, transport)
    if first_ranks == [0]:
        return _scaled(full, scale)
    if how in ("max", "min"):
        return reduce_packed(full, how, scale, transport, call)  # type: ignore[no-any-return]
    counted = full if transport.rank in first_ranks else torch.zeros_like(full)
    total: Tensor = reduce_packed(counted, "sum", 1.0, transport, call)
    return _scaled(total if how == "sum" else total / len(first_ranks), scale)


def _full_tensor_and_first_ranks(leaf: Any, transport: Transport) -> tuple[Tensor, list[int]]:
    """Returns the full tensor, and the first rank of each mesh that has one."""
    ranks = leaf.device_mesh.mesh
    full = to_full_tensor(leaf)
    if ranks.numel() == transport.size:
        return full, [0]
    return full, sorted(set(transport.gather_object(int(ranks.min()))))


# Objects and integers


def gather_objects(obj: object, transport: Transport, call: Call) -> list[Any]:
    """Returns the picklable objects of all ranks in rank order, on every rank."""
    header = transport.header
    if header is None:
        compare_call(transport, call)
        return transport.gather_object(obj)
    return [pickle.loads(payload) for payload in _gather_bytes(pickle.dumps(obj), header, transport, call)]


def broadcast_object(obj: Any, source: int, transport: Transport, call: Call) -> Any:
    """Returns the object of rank `source` on every rank.

    The source gets the same object and not a copy.
    """
    header = transport.header
    if header is None:
        compare_call(transport, call)
        return transport.broadcast_object(obj, source)
    sends = transport.rank == source
    payload = pickle.dumps(obj) if sends else b""
    _exchange_header(payload, header, transport, call)
    length = header.lengths()[source]
    if length <= header.capacity:
        return obj if sends else pickle.loads(header.payloads()[source])
    buffer = torch.empty(length, dtype=torch.uint8, device="cpu")
    content = buffer.numpy().data
    if sends:
        content[:] = payload
    transport.broadcast(buffer, source)
    return obj if sends else pickle.loads(content)


def gather_integers(
    numbers: Sequence[int], transport: Transport, call: Call, *values: object
) -> list[list[int]]:
    """Gathers the integers of all ranks in rank order.

    Each rank has equally many. `values` are compared as in `compare_call`.
    """
    header = transport.header
    if header is not None and (transport.verifies or is_debug_mode()):
        payloads = _gather_bytes(array("q", numbers).tobytes(), header, transport, call, *values)
        return [payload.cast("q").tolist() for payload in payloads]
    compare_call(transport, call, *values)
    table: list[list[int]] = transport.gather(torch.tensor([list(numbers)], dtype=torch.int64)).tolist()
    return table


def compare_call(transport: Transport, call: Call, *values: object) -> None:
    """Raises an error on all ranks unless their calls are equal.

    Calls over the CPU are always compared, and others in debug mode only.

    Args:
        values: Further values that must be equal on all ranks, compared by their `repr`.
    """
    if must_verify(transport):
        fingerprint = fingerprint_of(call.operation, call.arguments, *values)
        compare_calls(transport, checking_header(transport), fingerprint, call)


def _exchange_header(
    payload: bytes, header: Header, transport: Transport, call: Call, *values: object
) -> None:
    if len(payload) <= header.capacity:
        header.put(payload)
    fingerprint = fingerprint_of(call.operation, call.arguments, *values)
    compare_calls(transport, header, fingerprint, call, len(payload))


def _gather_bytes(
    payload: bytes, header: Header, transport: Transport, call: Call, *values: object
) -> list[memoryview]:
    """Returns the payloads of all ranks, valid until the next collective."""
    _exchange_header(payload, header, transport, call, *values)
    lengths = header.lengths()
    longest = max(lengths)
    if longest <= header.capacity:
        return header.payloads()
    padded = torch.empty(longest, dtype=torch.uint8, device="cpu")
    padded.numpy().data[: len(payload)] = payload
    joined = transport.gather(padded).numpy().data
    return [joined[rank * longest : rank * longest + length] for rank, length in enumerate(lengths)]
