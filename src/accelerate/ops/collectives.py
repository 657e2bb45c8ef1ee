"""Gather, broadcast, reduce and pad nested data over the current transport.

Every function here is called on all processes. On one process the data is returned as it is, without a copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import chain, repeat, tee
from typing import Any, Literal, TypeAlias, TypeVar, get_args, overload

import torch
from torch import Tensor

from accelerate.base import ConfigurationError, as_builtin, plain_value, wrong_value
from accelerate.nested import (
    get_data_structure,
    initialize_tensors,
    is_torch_tensor,
    iterate_tensors,
    recursively_apply,
    send_to_device,
)
from accelerate.ops.base import Reduction, Transport, at_least_1d
from accelerate.ops.packed import (
    agree_on_call,
    broadcast_object,
    broadcast_packed,
    gather_objects,
    gather_packed,
    reduce_packed,
    share_numbers,
)
from accelerate.ops.packing import check_leaves, is_dense
from accelerate.ops.transport import current_transport
from accelerate.ops.verify import PUBLIC_MODULE, Call, chained_operation, operation, outline
from accelerate.state import PartialState, services

T = TypeVar("T")

ReductionName: TypeAlias = Literal[Reduction, "none"]
_REDUCTIONS = get_args(ReductionName)

# The size that is sent for a tensor that is not padded.
_LEFT_ALONE = -1


@operation
def gather(tensor: T, *, uneven: bool = False) -> T:
    """Join the tensors of all processes along their first dimension.

    Args:
        tensor: Tensors in any nesting of lists, tuples and dictionaries; equal dtypes and shapes on all
            ranks. 0-d tensors count as `[1]`.
        uneven: Whether the first dimension may differ between ranks, also be 0. Tensors are joined without
            padding; their sizes take one more collective.

    Returns:
        The same nesting on every process, in rank order. Without `uneven`, tensors have `num_processes` times
        the length. On one process the argument itself. Nothing is differentiable.

    Raises:
        DistributedOperationException: Shapes differ (on CPU always; else in debug mode).
        TypeError: A leaf is not a tensor.
        ConfigurationError: A leaf is not a dense tensor.
    """
    transport = current_transport()
    if transport.size == 1:
        return tensor
    if uneven:
        return gather_uneven(tensor)  # type: ignore[no-any-return]
    return gather_packed(tensor, transport, Call(f"{PUBLIC_MODULE}.gather", data=tensor))  # type: ignore[no-any-return]


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
    reduction = plain_value(reduction)
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
    """Join nested tensors whose first dimension differs between processes, in rank order without filling.

    A difference in another dimension is refused where it is detected: on CPU, or in debug mode.
    """
    transport = current_transport()
    if transport.size == 1:
        return tensor
    check_leaves(tensor)
    call = Call(f"{PUBLIC_MODULE}.gather", "uneven=True", tensor, rows_only=True)
    tensor = recursively_apply(at_least_1d, tensor, error_on_other_type=True)
    lengths: list[int] = []
    recursively_apply(lambda leaf: lengths.append(leaf.shape[0]), tensor)
    table = share_numbers(lengths, transport, call, outline(tensor, row_fact))
    return gather_rows(tensor, zip(*table, strict=True), transport, call)


@operation
def gather_valid(data: Any, counts: Sequence[int]) -> Any:
    """Gather nested tensors of one row for each sample, and keep the first `counts[rank]` of each process.

    Ranks may have different numbers of rows; `counts` is the same on all. Refused without one count for each
    process, or with fewer rows than the count.
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
    """Gather lists with one picklable object for each sample, as `gather_valid` does tensors."""
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
    shape = None if tensor is None else tuple(tensor.shape)
    _, shape = _owner_and_object(shape, current_transport(), Call(f"{PUBLIC_MODULE}.gather_tensor_shape"))
    return torch.tensor(shape, dtype=torch.int64)


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
    if tensor is not None and transport.size > 1:
        check_leaves(tensor)
    structure = None if tensor is None else get_data_structure(tensor)
    call = Call(f"{PUBLIC_MODULE}.copy_tensor_to_devices")
    owner, structure = _owner_and_object(structure, transport, call)
    if transport.rank != owner:
        tensor = send_to_device(initialize_tensors(structure), PartialState().device)
    return tensor if transport.size == 1 else broadcast_packed(tensor, owner, transport, call)


class CannotPadNestedTensorWarning(UserWarning):
    """A `torch.nested` tensor was given to be padded; it is returned as it is."""


@chained_operation
def pad_across_processes(tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
    """Bring the tensors of all processes to the same length in one dimension.

    Called on all ranks. All sizes are sent in one collective, whatever the nesting.

    Args:
        tensor: Nested tensors that may differ between ranks in the size of `dim`; a tensor without that
            dimension is returned as it is, so is a `torch.nested` tensor, with one warning for the call.
        dim: The dimension to pad; negative ones count from the end.
        pad_index: The value to fill with.
        pad_first: Fill at the beginning instead of the end.

    Returns:
        The same nesting; each tensor as long in `dim` as the longest of all processes, unchanged where it is.

    Raises:
        DistributedOperationException: The numbers of dimensions differ (on CPU always; else in debug mode).
    """
    if any(leaf.is_nested for leaf in iterate_tensors(tensor)):
        warnings.warn(
            "A nested tensor has no common length and cannot be padded: it is returned as it is.",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
    transport = current_transport()
    if transport.size == 1:
        return tensor
    check_leaves(tensor, accepts=is_torch_tensor)
    sizes: list[int] = []
    recursively_apply(lambda leaf: sizes.append(_size_to_pad(leaf, dim)), tensor, error_on_other_type=True)
    call = Call(f"{PUBLIC_MODULE}.pad_across_processes", f"dim={dim}", tensor)
    table = share_numbers(sizes, transport, call, outline(tensor, Tensor.dim))
    longest = iter([max(column) for column in zip(*table, strict=True)])
    padded: T = recursively_apply(
        lambda leaf: _pad(leaf, dim, next(longest), pad_index, pad_first), tensor, error_on_other_type=True
    )
    return padded


def pad_input_tensors(tensor: T, batch_size: int, num_processes: int, dim: int = 0) -> T:
    """Repeat the last sample until the batch divides among the processes. Purely local.

    Args:
        tensor: Nested tensors; only those of size `batch_size` in `dim` are padded.
        batch_size: Number of samples in the batch.
        num_processes: Number of equal parts it will be cut in.
        dim: The dimension that counts samples.

    Returns:
        The same nesting, `batch_size` rounded up to a multiple of `num_processes`.
    """
    missing = -batch_size % num_processes
    if missing == 0 or batch_size == 0:
        return tensor
    padded: T = recursively_apply(_repeat_last, tensor, batch_size, missing, dim)
    return padded


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


def _refuse_complex(leaf: Tensor, reduction: str) -> Tensor:
    if leaf.is_complex():
        reason = "complex numbers have no order"
        raise wrong_value("reduction", reduction, reason, "Reduce their absolute values")
    return leaf


def _check_counts(counts: Sequence[int], transport: Transport) -> None:
    if len(counts) != transport.size:
        reason = f"there are {transport.size} processes"
        raise wrong_value("counts", tuple(counts), reason, "Give the number of samples of each")


def _owner_and_object(obj: Any, transport: Transport, call: Call) -> tuple[int, Any]:
    """Return the one rank whose object is not None, and its object."""
    entries = [obj] if transport.size == 1 else gather_objects(obj, transport, call)
    owners = [rank for rank, entry in enumerate(entries) if entry is not None]
    if len(owners) != 1:
        reason = f"processes {owners} have one" if owners else "no process has one"
        text = f"tensor: {reason}. Pass the tensor on one process and None on all others."
        raise as_builtin(ConfigurationError(text), IndexError)
    return owners[0], entries[owners[0]]


def _known_rank(rank: int, transport: Transport) -> int:
    if not 0 <= rank < transport.size:
        reason = f"there are {transport.size} processes"
        raise wrong_value("from_process", rank, reason, f"Use a rank from 0 to {transport.size - 1}")
    return rank


def _can_pad(tensor: Tensor, dim: int) -> bool:
    return not tensor.is_nested and -tensor.ndim <= dim < tensor.ndim


def _size_to_pad(tensor: Tensor, dim: int) -> int:
    return tensor.shape[dim] if _can_pad(tensor, dim) else _LEFT_ALONE


def _pad(tensor: Tensor, dim: int, longest: int, pad_index: int = 0, pad_first: bool = False) -> Tensor:
    if not _can_pad(tensor, dim) or tensor.shape[dim] == longest:
        return tensor
    check_leaves(tensor, accepts=is_dense)
    shape = list(tensor.shape)
    shape[dim] = longest - tensor.shape[dim]
    filling = tensor.new_full(shape, pad_index)
    return torch.cat([filling, tensor] if pad_first else [tensor, filling], dim=dim)


def _repeat_last(tensor: Tensor, batch_size: int, missing: int, dim: int) -> Tensor:
    if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] != batch_size:
        return tensor
    last = tensor.narrow(dim, batch_size - 1, 1)
    return torch.cat([tensor, *[last] * missing], dim=dim)


def gather_rows(data: Any, counts: Iterator[tuple[int, ...]], transport: Transport, call: Call) -> Any:
    """Join nested tensors along their first dimension: padded to the longest to be sent, and cut again.

    `counts` gives for each tensor the number of its rows on each rank.
    """
    first, second = tee(counts)
    filled = recursively_apply(lambda leaf: _pad(leaf, 0, max(next(first))), data, error_on_other_type=True)
    joined = gather_packed(filled, transport, call)
    return recursively_apply(lambda leaf: _cut(leaf, next(second)), joined)


def first_rows(tensor: Tensor, count: int) -> Tensor:
    """Return the first rows of a tensor; refuse one that has fewer."""
    rows = 0 if tensor.ndim == 0 else tensor.shape[0]
    if rows < count or tensor.ndim == 0:
        raise too_few_rows(rows, count)
    return tensor if rows == count else tensor[:count]


def row_fact(tensor: Tensor) -> tuple[list[int], str]:
    return list(tensor.shape[1:]), str(tensor.dtype)


def too_few_rows(rows: int, count: int) -> ConfigurationError:
    reason = f"this process has {rows} samples and not {count}"
    fix = "Give one row for each sample of the batch; average only after gathering"
    return wrong_value("counts", count, reason, fix)


def _cut(joined: Tensor, counts: tuple[int, ...]) -> Tensor:
    longest = max(counts)
    if min(counts) == longest:
        return joined
    return torch.cat([joined[rank * longest : rank * longest + count] for rank, count in enumerate(counts)])
