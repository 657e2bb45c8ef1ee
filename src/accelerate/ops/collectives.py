"""Gather, broadcast and reduce nested data over the current transport.

Every function here is called on all processes. On one process the data comes back as it is, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any, Literal, TypeAlias, TypeVar, get_args, overload

import torch
from torch import Tensor

from accelerate.base import ConfigurationError, as_builtin, wrong_value
from accelerate.nested import get_data_structure, initialize_tensors, recursively_apply, send_to_device
from accelerate.ops.base import Reduction, Transport
from accelerate.ops.packed import (
    agree_on_call,
    broadcast_object,
    broadcast_packed,
    gather_objects,
    gather_packed,
    reduce_packed,
    share_numbers,
)
from accelerate.ops.padding import at_least_1d, first_rows, gather_rows, row_fact, too_few_rows
from accelerate.ops.transport import current_transport
from accelerate.ops.verify import PUBLIC_MODULE, Call, operation, outline
from accelerate.state import PartialState, services

T = TypeVar("T")

ReductionName: TypeAlias = Literal[Reduction, "none"]
_REDUCTIONS = get_args(ReductionName)


@operation
def gather(tensor: T) -> T:
    """Join the tensors of all processes along their first dimension.

    Args:
        tensor: Tensors in any nesting of lists, tuples and dictionaries; equal shapes and dtypes on all
            ranks. 0-d tensors count as `[1]`. Batches of different length: `gather_uneven`.

    Returns:
        The same nesting with tensors of `num_processes` times the length, in rank order, on every process.

    Raises:
        DistributedOperationException: Shapes differ (on CPU always; else in debug mode).
        TypeError: A leaf is not a tensor.
    """
    transport = current_transport()
    if transport.size == 1:
        return tensor
    call = Call(f"{PUBLIC_MODULE}.gather", data=tensor)
    return gather_packed(tensor, transport, call)  # type: ignore[no-any-return]


@overload
def gather_object(object: list[T]) -> list[T]: ...
@overload
def gather_object(object: Any) -> Any: ...
@operation
def gather_object(object: Any) -> Any:
    """Collect picklable objects of all processes.

    Args:
        object: A list or tuple of objects, of any length on each rank; or one object of another kind.

    Returns:
        On every process one list: the items of all lists in rank order, or one entry for each process. On one
        process the argument itself.
    """
    transport = current_transport()
    if transport.size == 1:
        return object
    parts = gather_objects(object, transport, Call(f"{PUBLIC_MODULE}.gather_object"))
    if all(isinstance(part, (list, tuple)) for part in parts):
        return list(chain.from_iterable(parts))
    return parts


@operation
def broadcast(tensor: T, from_process: int = 0) -> T:
    """Give every process the tensors of one of them.

    Args:
        tensor: Nested tensors of equal shapes and dtypes on all ranks; overwritten in place on the receiving
            ones.
        from_process: The rank to send from.

    Returns:
        The same nesting of tensors, on every process.

    Raises:
        DistributedOperationException: Shapes differ (on CPU always; else in debug mode).
    """
    transport = current_transport()
    if transport.size == 1:
        return tensor
    source = _known_rank(from_process, transport)
    call = Call(f"{PUBLIC_MODULE}.broadcast", f"from_process={source}", tensor)
    return broadcast_packed(tensor, source, transport, call)  # type: ignore[no-any-return]


@operation
def broadcast_object_list(object_list: list[T], from_process: int = 0) -> list[T]:
    """Give every process the objects in the list of one of them.

    Args:
        object_list: Picklable objects; on the receiving ranks the list is overwritten, whatever its length.
        from_process: The rank to send from.

    Returns:
        The list that was given, now with the objects of `from_process`.
    """
    transport = current_transport()
    if transport.size == 1:
        return object_list
    source = _known_rank(from_process, transport)
    call = Call(f"{PUBLIC_MODULE}.broadcast_object_list", f"from_process={source}")
    arrived = broadcast_object(object_list, source, transport, call)
    if arrived is not object_list:
        object_list[:] = arrived
    return object_list


@operation
def reduce(tensor: T, reduction: ReductionName = "mean", scale: float = 1.0) -> T:
    """Combine the tensors of all processes element by element.

    Args:
        tensor: Nested tensors of equal shapes and dtypes on all ranks; not changed.
        reduction: "mean", "sum", "max", "min", or "none" to leave each process its own.
        scale: Factor for the result.

    Returns:
        The same nesting; on one process the tensors themselves when `scale` is 1. Between several processes
        integers and booleans are summed in int64, and their mean has the default floating dtype. Maxima and
        minima keep the dtype.

    Raises:
        ConfigurationError: No such reduction, or the maximum or minimum of complex numbers.
        DistributedOperationException: Shapes differ (on CPU always; else in debug mode).
    """
    if reduction not in _REDUCTIONS:
        fix = f"Use one of {', '.join(map(repr, _REDUCTIONS))}"
        raise wrong_value("reduction", reduction, "no such reduction", fix)
    if reduction in ("max", "min"):
        recursively_apply(_refuse_complex, tensor, reduction)
    transport = current_transport()
    if reduction != "none" and transport.size > 1:
        call = Call(f"{PUBLIC_MODULE}.reduce", f"reduction={reduction!r}", tensor)
        return reduce_packed(tensor, reduction, scale, transport, call)  # type: ignore[no-any-return]
    if scale != 1.0:
        tensor = recursively_apply(torch.mul, tensor, scale, error_on_other_type=True)
    return tensor


@operation
def gather_uneven(tensor: Any) -> Any:
    """Join tensors whose first dimension differs between processes.

    Args:
        tensor: Nested tensors that agree on all ranks in everything but the length of the first dimension.

    Returns:
        The same nesting; along the first dimension the parts of all ranks in rank order, without any filling.

    Raises:
        DistributedOperationException: Another dimension than the first differs (detected on CPU, or in
            debug mode).
    """
    transport = current_transport()
    if transport.size == 1:
        return tensor
    call = Call(f"{__name__}.gather_uneven", data=tensor, rows_only=True)
    tensor = recursively_apply(at_least_1d, tensor, error_on_other_type=True)
    lengths: list[int] = []
    recursively_apply(lambda leaf: lengths.append(leaf.shape[0]), tensor)
    table = share_numbers(lengths, transport, call, outline(tensor, row_fact))
    return gather_rows(tensor, zip(*table, strict=True), transport, call)


@operation
def gather_valid(data: Any, counts: Sequence[int]) -> Any:
    """Gather per-sample tensors and keep the first samples of each process only.

    Args:
        data: Nested tensors with one row for each sample; rank r has at least `counts[r]` of them, and ranks
            may have different numbers.
        counts: How many leading samples of each rank are real; the same on all ranks.

    Returns:
        The same nesting with `sum(counts)` rows in rank order, on every process.

    Raises:
        ConfigurationError: Not one count for each process, or a tensor with fewer rows than its count.
    """
    transport = current_transport()
    _check_counts(counts, transport)
    own = counts[transport.rank]
    kept = recursively_apply(first_rows, data, own, error_on_other_type=True)
    if transport.size == 1:
        return kept
    call = Call(f"{__name__}.gather_valid", f"counts={list(counts)}", kept, rows_only=True)
    return gather_rows(kept, repeat(tuple(counts)), transport, call)


@operation
def gather_valid_objects(items: Sequence[T], counts: Sequence[int]) -> list[T]:
    """Gather lists with one object for each sample and keep the first ones of each process only.

    Args:
        items: At least `counts[r]` picklable objects on rank r.
        counts: How many leading items of each rank are real; the same on all ranks.

    Returns:
        The kept items of all ranks in rank order, on every process.

    Raises:
        ConfigurationError: Not one count for each process, or fewer items than their count.
    """
    transport = current_transport()
    _check_counts(counts, transport)
    own = counts[transport.rank]
    if len(items) < own:
        raise too_few_rows(len(items), own)
    kept = list(items[:own])
    if transport.size == 1:
        return kept
    call = Call(f"{__name__}.gather_valid_objects", f"counts={list(counts)}")
    return list(chain.from_iterable(gather_objects(kept, transport, call)))


@operation
def gather_tensor_shape(tensor: Tensor | None) -> Tensor:
    """Give every process the shape of a tensor that one of them has.

    Args:
        tensor: The tensor on the rank that has it, None on the others.

    Returns:
        The shape as a 1-d int64 tensor on the CPU.

    Raises:
        ConfigurationError: Not exactly one process has a tensor.
    """
    transport = current_transport()
    shape = None if tensor is None else tuple(tensor.shape)
    shapes = _objects_of_all(shape, transport, Call(f"{PUBLIC_MODULE}.gather_tensor_shape"))
    return torch.tensor(shapes[_only_owner(shapes)], dtype=torch.int64)


@operation
def copy_tensor_to_devices(tensor: Any = None) -> Any:
    """Copy tensors that one process has to all others, which need not know their shapes.

    Args:
        tensor: Nested tensors on the rank that has them, None on the others.

    Returns:
        On the owner what it gave; on the others equal tensors on the device of the process.

    Raises:
        ConfigurationError: Not exactly one process has a tensor.
    """
    transport = current_transport()
    structure = None if tensor is None else get_data_structure(tensor)
    call = Call(f"{PUBLIC_MODULE}.copy_tensor_to_devices")
    structures = _objects_of_all(structure, transport, call)
    owner = _only_owner(structures)
    if transport.rank != owner:
        tensor = send_to_device(initialize_tensors(structures[owner]), PartialState().device)
    return tensor if transport.size == 1 else broadcast_packed(tensor, owner, transport, call)


@operation
def wait_for_everyone() -> None:
    """Wait until all processes have called this.

    Raises:
        DistributedOperationException: Another process is in another operation (detected on CPU, or in
            debug mode).
        StateError: The process group is closed.
    """
    transport = current_transport()
    if transport.size > 1:
        agree_on_call(transport, Call("accelerate.utils.wait_for_everyone"))
        transport.barrier()


# All waits for other processes are recorded and verified as operations.
services.barrier = wait_for_everyone


def _objects_of_all(obj: Any, transport: Transport, call: Call) -> list[Any]:
    return [obj] if transport.size == 1 else gather_objects(obj, transport, call)


def _refuse_complex(leaf: Tensor, reduction: str) -> Tensor:
    if leaf.is_complex():
        reason = "complex numbers have no order"
        raise wrong_value("reduction", reduction, reason, "Reduce their absolute values")
    return leaf


def _check_counts(counts: Sequence[int], transport: Transport) -> None:
    if len(counts) != transport.size:
        reason = f"there are {transport.size} processes"
        raise wrong_value("counts", tuple(counts), reason, "Give the number of samples of each")


def _only_owner(entries: list[Any]) -> int:
    owners = [rank for rank, entry in enumerate(entries) if entry is not None]
    if len(owners) != 1:
        reason = f"processes {owners} have one" if owners else "no process has one"
        text = f"tensor: {reason}. Pass the tensor on one process and None on all others."
        raise as_builtin(ConfigurationError(text), IndexError)
    return owners[0]


def _known_rank(rank: int, transport: Transport) -> int:
    if not 0 <= rank < transport.size:
        reason = f"there are {transport.size} processes"
        raise wrong_value("from_process", rank, reason, f"Use a rank from 0 to {transport.size - 1}")
    return rank
