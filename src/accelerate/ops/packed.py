"""Nested tensors over a wire: few collectives for a whole structure, and the results of one for each tensor.

CPU tensors begin with one head that compares the processes and carries small structures with it. What is
larger follows: small tensors together in buffers, large ones each by itself, without a copy in between.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelerate.nested import recursively_apply
from accelerate.ops.base import Transport
from accelerate.ops.dtensors import gather_values, reduce_values
from accelerate.ops.dtypes import finished_reduction, reducible_dtype
from accelerate.ops.flat_buffers import Slot, joined_shape
from accelerate.ops.header import Head
from accelerate.ops.packing import Parts, Plan, plan_for, put_together, take_apart
from accelerate.ops.verify import Call, agree, checking_head, debugging


def gather_packed(data: Any, transport: Transport, call: Call) -> Any:
    """Join the tensors of all processes along their first dimension.

    Args:
        data: Nested tensors of equal shapes and dtypes on all ranks.
        transport: The wire between several processes.
        call: For the message when the processes disagree.

    Returns:
        The same nesting.
    """
    parts = take_apart(data)
    if parts.is_distributed:
        return gather_values(data, transport, lambda leaf: gather_packed(leaf, transport, call))
    leaves, size = parts.leaves, transport.size
    plan, head = _begin(parts, transport, call, sends=True)
    results: list[Any] = [None] * len(leaves)
    for place in plan.empty:
        results[place] = leaves[place].new_empty(joined_shape(leaves[place].shape, size))
    if head is not None and plan.whole is not None:
        for slot in plan.whole.slots:
            slot.receive(head, results)
        results = _back_on_device(results, parts)
    for layout in plan.buffers:
        joined = transport.gather(layout.pack(leaves)).view(size, -1)
        for slot in layout.slots:
            slot.split_rows(slot.read(joined), results)
    for place in plan.alone:
        results[place] = transport.gather(leaves[place])
    return put_together(data, iter(results))


def reduce_packed(data: Any, how: str, scale: float, transport: Transport, call: Call) -> Any:
    """Combine the tensors of all processes element by element.

    What rides on the head is combined in the order of the ranks, in the dtype in which the wire would.

    Args:
        data: Nested tensors of equal shapes and dtypes on all ranks; not changed.
        how: "sum", "mean", "max" or "min".
        scale: Factor for the result.
        transport: The wire between several processes.
        call: For the message when the processes disagree.

    Returns:
        The same nesting.
    """
    parts = take_apart(data)
    if parts.is_distributed:
        totals = reduce_values(data, how, transport, partial(_reduce_value, transport=transport, call=call))
        return recursively_apply(_scaled, totals, scale)
    leaves, size = parts.leaves, transport.size
    plan, head = _begin(parts, transport, call, sends=True, mixed=False)
    results: list[Any] = [None] * len(leaves)
    if head is not None and plan.whole is not None:
        for slot, rows in plan.whole.received(head):
            total = finished_reduction(_combine(rows, slot, how), how, size, leaves[slot.places[0]])
            slot.split(_scaled(total, scale), results)
    for layout in plan.buffers:
        slot = layout.slots[0]
        slot.split(_scaled(transport.reduce(slot.flatten(leaves), how), scale), results)
    for place in plan.alone:
        results[place] = _scaled(transport.reduce(leaves[place], how), scale)
    for place in plan.empty:
        nothing = leaves[place].detach().to(reducible_dtype(leaves[place].dtype), copy=True)
        results[place] = _scaled(finished_reduction(nothing, how, size, leaves[place]), scale)
    return put_together(data, iter(results))


def broadcast_packed(data: Any, source: int, transport: Transport, call: Call) -> Any:
    """Overwrite the tensors of all processes with those of one.

    Args:
        data: Nested tensors of equal shapes and dtypes on all ranks; changed in place on the receiving ones.
        source: The rank to send from.
        transport: The wire between several processes.
        call: For the message when the processes disagree.

    Returns:
        The same nesting of the same tensors.
    """
    parts = take_apart(data)
    leaves, sends = parts.leaves, transport.rank == source
    with torch.no_grad():
        plan, head = _begin(parts, transport, call, sends=sends)
        if head is not None and plan.whole is not None and not sends:
            for slot, rows in plan.whole.received(head):
                slot.overwrite(rows[source], leaves)
        for layout in plan.buffers:
            device = leaves[layout.slots[0].places[0]].device
            buffer = torch.empty(layout.width, dtype=torch.uint8, device=device)
            if sends:
                layout.pack_into(leaves, buffer)
            transport.broadcast(buffer, source)
            if not sends:
                for slot in layout.slots:
                    slot.overwrite(slot.read(buffer), leaves)
        for place in plan.alone:
            transport.broadcast(leaves[place], source)
    return put_together(data, iter(leaves))


def _begin(
    parts: Parts, transport: Transport, call: Call, *, sends: bool, mixed: bool = True
) -> tuple[Plan, Head | None]:
    """Plan how a structure travels, and exchange heads where this wire begins with them.

    Returns:
        The plan, and the head that carries the payload; None where it travels otherwise.
    """
    head = transport.head if _rides(parts, transport) else None
    room = -1 if head is None else head.room
    name = f"{call.operation}({call.arguments})"
    plan = plan_for(name, parts, size=transport.size, room=room, mixed=mixed)
    if head is not None:
        if sends and plan.whole is not None:
            plan.whole.send(parts.leaves, head)
        agree(transport, head, plan.mark, call)
    elif debugging():
        agree(transport, checking_head(transport), plan.mark, call)
    return plan, head


def _rides(parts: Parts, transport: Transport) -> bool:
    """Whether the tensors travel by way of the CPU, as the head does."""
    return transport.verifies or not parts.leaves or parts.leaves[0].is_cpu


def _combine(rows: Tensor, slot: Slot, how: str) -> Tensor:
    combine = {"max": torch.maximum, "min": torch.minimum}.get(how, torch.add)
    first, second, *others = rows.to(reducible_dtype(slot.dtype)).unbind(0)
    total = combine(first, second)
    for row in others:
        combine(total, row, out=total)
    return total


def _reduce_value(data: Any, how: str, *, transport: Transport, call: Call) -> Any:
    return reduce_packed(data, how, 1.0, transport, call)


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1.0 else torch.mul(tensor, scale)


def _back_on_device(results: list[Any], parts: Parts) -> list[Any]:
    if not parts.leaves or parts.leaves[0].is_cpu:
        return results
    return [result.to(parts.leaves[0].device) for result in results]
