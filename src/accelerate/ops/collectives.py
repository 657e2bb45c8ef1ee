"""Public collectives of `accelerate.utils`, which gather, broadcast, reduce and pad nested data.

Each function is called on all ranks, and uses the transport of this process. A single process returns the
data without a copy.
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
    broadcast_object,
    broadcast_packed,
    compare_call,
    gather_integers,
    gather_objects,
    gather_packed,
    reduce_packed,
)
from accelerate.ops.packing import check_leaves, is_dense
from accelerate.ops.transport import current_transport
from accelerate.ops.verify import PUBLIC_MODULE, Call, chained_operation, map_leaves, operation
from accelerate.state import PartialState, services

T = TypeVar("T")

ReductionName: TypeAlias = Literal[Reduction, "none"]
_REDUCTIONS = get_args(ReductionName)

# Size that is sent for a tensor that is not padded.
_NOT_PADDED = -1


@operation
def gather(tensor: T, *, uneven: bool = False) -> T:
    """Concatenates the tensors of all ranks along their first dimension in rank order.

    Called on all ranks. The result is not differentiable.

    Args:
        tensor: Tensors in any nesting of lists, tuples and dictionaries, with equal dtypes and shapes on all
            ranks. A 0-d tensor counts as `[1]`.
        uneven: Whether the size of the first dimension may differ between ranks, and may be 0. Tensors are
            concatenated without padding, and their sizes need one more collective. The default is False.

    Returns:
        The same nesting on all ranks. Without `uneven`, the first dimension of each tensor is
        `num_processes` times as large. A single process returns the argument itself.

    Raises:
        DistributedOperationException: Shapes differ. Checked on the CPU, and on devices in debug mode.
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
def gather_object(object: object) -> Any: ...
@operation
def gather_object(object: object) -> Any:
    """Gathers picklable objects from all ranks.

    Called on all ranks.

    Args:
        object: A list or tuple of objects, of any length on each rank, or one object of another type.

    Returns:
        One list on all ranks, with the items of all lists in rank order, or with one object for each rank. A
        single process returns the argument itself.
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
    """Broadcasts the tensors of one rank to all ranks.

    Called on all ranks.

    Args:
        tensor: Nested tensors of equal shapes and dtypes on all ranks, which are overwritten in place on the
            receiving ranks.
        from_process: The source rank. The default is 0.

    Returns:
        The same nesting of tensors on all ranks.

    Raises:
        DistributedOperationException: Shapes differ. Checked on the CPU, and on devices in debug mode.
    """
    transport = current_transport()
    if transport.size == 1:
        return tensor
    source = _check_rank(from_process, transport)
    call = Call(f"{PUBLIC_MODULE}.broadcast", f"from_process={source}", tensor)
    return broadcast_packed(tensor, source, transport, call)  # type: ignore[no-any-return]


@operation
def broadcast_object_list(object_list: list[T], from_process: int = 0) -> list[T]:
    """Broadcasts the objects in the list of one rank to all ranks.

    Called on all ranks.

    Args:
        object_list: Picklable objects. On the receiving ranks the list, of any length, is overwritten.
        from_process: The source rank. The default is 0.

    Returns:
        The argument `object_list`, with the objects of the source rank.
    """
    transport = current_transport()
    if transport.size == 1:
        return object_list
    source = _check_rank(from_process, transport)
    call = Call(f"{PUBLIC_MODULE}.broadcast_object_list", f"from_process={source}")
    received = broadcast_object(object_list, source, transport, call)
    if received is not object_list:
        object_list[:] = received
    return object_list


@operation
def reduce(tensor: T, reduction: ReductionName = "mean", scale: float = 1.0) -> T:
    """Reduces the tensors of all ranks elementwise.

    Called on all ranks.

    Args:
        tensor: Nested tensors of equal shapes and dtypes on all ranks, which are not changed.
        reduction: "mean", "sum", "max", "min", or "none", which returns the tensors of each rank. The default
            is "mean".
        scale: Factor of the result. The default is 1.0.

    Returns:
        The same nesting. A single process returns the tensors themselves if `scale` is 1. With several
        processes, integers and booleans are summed in int64, and their mean has the default floating dtype.
        Maxima and minima keep the dtype.

    Raises:
        ConfigurationError: The reduction does not exist, or is the maximum or minimum of complex numbers.
        DistributedOperationException: Shapes differ. Checked on the CPU, and on devices in debug mode.
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
    """Concatenates nested tensors whose first dimension differs between ranks, in rank order.

    The result has no padding. Called on all ranks. A difference in another dimension raises an error, on
    devices in debug mode only.
    """
    transport = current_transport()
    if transport.size == 1:
        return tensor
    check_leaves(tensor)
    call = Call(f"{PUBLIC_MODULE}.gather", "uneven=True", tensor, rows_only=True)
    tensor = recursively_apply(at_least_1d, tensor, error_on_other_type=True)
    lengths: list[int] = []
    recursively_apply(lambda leaf: lengths.append(leaf.shape[0]), tensor)
    table = gather_integers(lengths, transport, call, map_leaves(tensor, row_shape_and_dtype))
    return gather_rows(tensor, zip(*table, strict=True), transport, call)


@operation
def gather_valid(data: Any, counts: Sequence[int]) -> Any:
    """Gathers the first `counts[rank]` rows of nested tensors from each rank.

    Tensors have one row for each sample. Called on all ranks, with the same `counts`. Ranks may have
    different numbers of rows. Raises a `ConfigurationError` unless there is one count for each rank, and if
    there are fewer rows than the count.
    """
    transport = current_transport()
    _check_counts(counts, transport)
    count = counts[transport.rank]
    valid = recursively_apply(first_rows, data, count, error_on_other_type=True)
    if transport.size == 1:
        return valid
    call = Call(f"{__name__}.gather_valid", f"counts={list(counts)}", valid, rows_only=True)
    return gather_rows(valid, repeat(tuple(counts)), transport, call)


@operation
def gather_valid_objects(items: Sequence[T], counts: Sequence[int]) -> list[T]:
    """Gathers the first `counts[rank]` objects of a list from each rank.

    The list has one picklable object for each sample. Otherwise as `gather_valid`.
    """
    transport = current_transport()
    _check_counts(counts, transport)
    count = counts[transport.rank]
    if len(items) < count:
        raise too_few_rows(len(items), count)
    valid = list(items[:count])
    if transport.size == 1:
        return valid
    call = Call(f"{__name__}.gather_valid_objects", f"counts={list(counts)}")
    return list(chain.from_iterable(gather_objects(valid, transport, call)))


@operation
def gather_tensor_shape(tensor: Tensor | None) -> Tensor:
    """Returns the shape of a tensor that exists on one rank, on all ranks.

    Called on all ranks.

    Args:
        tensor: The tensor on one rank, and None on the others.

    Returns:
        The shape as a 1-d int64 tensor on the CPU.

    Raises:
        ConfigurationError: The number of ranks with a tensor is not one.
    """
    shape = None if tensor is None else tuple(tensor.shape)
    _, shape = _owner_and_object(shape, current_transport(), Call(f"{PUBLIC_MODULE}.gather_tensor_shape"))
    return torch.tensor(shape, dtype=torch.int64)


@operation
def copy_tensor_to_devices(tensor: object = None) -> Any:
    """Copies nested tensors from the one rank that has them to all others.

    Called on all ranks. The other ranks do not need to know the structure or the shapes.

    Args:
        tensor: Nested tensors on one rank, and None on the others.

    Returns:
        The argument itself on the source rank, and equal tensors on the device of the process on the others.

    Raises:
        ConfigurationError: The number of ranks with tensors is not one.
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
    """Warning about a `torch.nested` tensor, which `pad_across_processes` returns without padding."""


@chained_operation
def pad_across_processes(tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
    """Pads the tensors of all ranks to the same size in one dimension.

    Called on all ranks. All sizes are sent in one collective, for any nesting.

    Args:
        tensor: Nested tensors whose size in `dim` may differ between ranks. A tensor without that dimension
            is not padded, and neither is a `torch.nested` tensor, with one warning for each call.
        dim: The dimension to pad. A negative number counts from the end. The default is 0.
        pad_index: The value of the padding. The default is 0.
        pad_first: Whether to pad at the beginning instead of the end. The default is False.

    Returns:
        The same nesting. In `dim`, each tensor has the largest size on any rank. A tensor that has this size
        already is returned without a copy.

    Raises:
        DistributedOperationException: The numbers of dimensions differ. Checked on the CPU, and on devices in
            debug mode.
    """
    if any(leaf.is_nested for leaf in iterate_tensors(tensor)):
        warnings.warn(
            "A nested tensor has no common length and cannot be padded: it is returned without padding.",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
    transport = current_transport()
    if transport.size == 1:
        return tensor
    check_leaves(tensor, accepts=is_torch_tensor)
    leaves = iterate_tensors(tensor)
    sizes = [leaf.shape[dim] if _can_pad(leaf, dim) else _NOT_PADDED for leaf in leaves]
    call = Call(f"{PUBLIC_MODULE}.pad_across_processes", f"dim={dim}", tensor)
    table = gather_integers(sizes, transport, call, map_leaves(tensor, Tensor.dim))
    longest = iter([max(column) for column in zip(*table, strict=True)])
    padded: T = recursively_apply(
        lambda leaf: _pad(leaf, dim, next(longest), pad_index, pad_first), tensor, error_on_other_type=True
    )
    return padded


def pad_input_tensors(tensor: T, batch_size: int, num_processes: int, dim: int = 0) -> T:
    """Repeats the last sample until the batch size is a multiple of the number of processes.

    Does not communicate.

    Args:
        tensor: Nested tensors, of which only those of size `batch_size` in `dim` are padded.
        batch_size: Number of samples in the batch.
        num_processes: Number of equal shards that the batch is split into.
        dim: The batch dimension. The default is 0.

    Returns:
        The same nesting, with `batch_size` rounded up to a multiple of `num_processes`.
    """
    missing = -batch_size % num_processes
    if missing == 0 or batch_size == 0:
        return tensor
    padded: T = recursively_apply(_repeat_last, tensor, batch_size, missing, dim)
    return padded


@operation
def wait_for_everyone() -> None:
    """Waits until all ranks have called this.

    Called on all ranks.

    Raises:
        DistributedOperationException: Another rank is in another operation. Checked on the CPU, and on
            devices in debug mode.
        StateError: The process group is closed.
    """
    transport = current_transport()
    if transport.size > 1:
        compare_call(transport, Call("accelerate.utils.wait_for_everyone"))
        transport.barrier()


# Each barrier is recorded and verified as an operation.
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


def _owner_and_object(obj: object, transport: Transport, call: Call) -> tuple[int, Any]:
    """Returns the only rank whose object is not None, and its object."""
    entries = [obj] if transport.size == 1 else gather_objects(obj, transport, call)
    owners = [rank for rank, entry in enumerate(entries) if entry is not None]
    if len(owners) != 1:
        reason = f"processes {owners} have one" if owners else "no process has one"
        text = f"tensor: {reason}. Pass the tensor on one process and None on all others."
        raise as_builtin(ConfigurationError(text), IndexError)
    return owners[0], entries[owners[0]]


def _check_rank(rank: int, transport: Transport) -> int:
    if not 0 <= rank < transport.size:
        reason = f"there are {transport.size} processes"
        raise wrong_value("from_process", rank, reason, f"Use a rank from 0 to {transport.size - 1}")
    return rank


def _can_pad(tensor: Tensor, dim: int) -> bool:
    return not tensor.is_nested and -tensor.ndim <= dim < tensor.ndim


def _pad(tensor: Tensor, dim: int, longest: int, pad_index: int = 0, pad_first: bool = False) -> Tensor:
    if not _can_pad(tensor, dim) or tensor.shape[dim] == longest:
        return tensor
    check_leaves(tensor, accepts=is_dense)
    shape = list(tensor.shape)
    shape[dim] = longest - tensor.shape[dim]
    padding = tensor.new_full(shape, pad_index)
    return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim=dim)


def _repeat_last(tensor: Tensor, batch_size: int, missing: int, dim: int) -> Tensor:
    if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] != batch_size:
        return tensor
    last = tensor.narrow(dim, batch_size - 1, 1)
    return torch.cat([tensor, *[last] * missing], dim=dim)


def gather_rows(data: Any, counts: Iterator[tuple[int, ...]], transport: Transport, call: Call) -> Any:
    """Concatenates nested tensors with different numbers of rows along their first dimension.

    The tensors are padded to the largest number of rows, gathered, and the padding is removed.

    Args:
        counts: For each tensor, the number of its rows on each rank.
    """
    first, second = tee(counts)
    padded = recursively_apply(lambda leaf: _pad(leaf, 0, max(next(first))), data, error_on_other_type=True)
    joined = gather_packed(padded, transport, call)
    return recursively_apply(lambda leaf: _remove_padding(leaf, next(second)), joined)


def first_rows(tensor: Tensor, count: int) -> Tensor:
    """Returns the first `count` rows of a tensor, or raises an error if it has fewer."""
    rows = 0 if tensor.ndim == 0 else tensor.shape[0]
    if rows < count or tensor.ndim == 0:
        raise too_few_rows(rows, count)
    return tensor if rows == count else tensor[:count]


def row_shape_and_dtype(tensor: Tensor) -> tuple[list[int], str]:
    return list(tensor.shape[1:]), str(tensor.dtype)


def too_few_rows(rows: int, count: int) -> ConfigurationError:
    reason = f"this process has {rows} samples and not {count}"
    fix = "Give one row for each sample of the batch; average only after gathering"
    return wrong_value("counts", count, reason, fix)


def _remove_padding(joined: Tensor, counts: tuple[int, ...]) -> Tensor:
    longest = max(counts)
    if min(counts) == longest:
        return joined
    return torch.cat([joined[rank * longest : rank * longest + count] for rank, count in enumerate(counts)])
