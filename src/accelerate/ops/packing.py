"""Flattening of nested tensors, plans for their transfer, and the flat buffers that they are packed into.

`ops/packed.py` calls it for each collective, and the dispatch transport of `data_loader` uses the buffers.
Nothing is sent here. A `TransferPlan` depends only on structure, shapes and dtypes, and is cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerate import torch_private
from accelerate.base import ConfigurationError, as_builtin
from accelerate.nested import recursively_apply
from accelerate.ops.base import Header

ALIGNMENT = 16
"""Alignment of segments in bytes, a multiple of the size of every dtype."""

_MAX_SHARED_BYTES = 64 * 1024  # results of at most this size may be views of one tensor
_MAX_ORDERED_NUMEL = 8192  # number of elements up to which their indices are cached
_NOT_SELECTABLE = frozenset({torch.uint16, torch.uint32, torch.uint64})  # index_select lacks these dtypes

Split = Callable[..., Sequence[Tensor]]

# The type stub of the function omits its return value.
_split_copy: Split = torch.split_with_sizes_copy  # type: ignore[assignment]


class RowGroup(NamedTuple):
    """Adjacent leaves of a segment that differ in the first dimension only, and are split in one call."""

    start: int  # first element in the segment
    stop: int
    tail: tuple[int, ...]  # sizes of the other dimensions
    lengths: list[int]  # number of rows of each leaf, where a 0-d leaf counts as one row
    joined: list[int]  # the same for the leaves of all ranks together
    scalars: bool  # whether the leaves are 0-d


@dataclass(slots=True)
class DtypeSegment:
    """Leaves of one dtype in a flat buffer, from byte `start` to `stop`."""

    dtype: torch.dtype
    start: int
    stop: int
    indices: tuple[int, ...]  # indices of the leaves, where those of one group are adjacent
    counts: list[int]  # number of elements of each leaf
    joined: tuple[tuple[int, ...], ...]  # shape of each leaf, concatenated over all ranks
    groups: tuple[RowGroup, ...]
    # Indices of the elements of all ranks in their headers, leaf by leaf. Computed when the segment is
    # received for the second time, so that a structure that is used once does not pay for it.
    order: Tensor | None = None
    uses: int = 0

    def flatten(self, leaves: Sequence[Tensor]) -> Tensor:
        """Returns the elements of the leaves in one dimension, a view if there is a single leaf."""
        members = [leaves[index] for index in self.indices]
        if len(members) == 1 or len(self.groups) > 1:
            flat: Tensor = torch_private.flatten_dense_tensors(members)
        else:
            flat = torch.stack(members) if self.groups[0].scalars else torch.cat(members).reshape(-1)
        return flat.detach().resolve_conj().resolve_neg()

    def read(self, buffer: Tensor) -> Tensor:
        """Returns a view of the bytes in a buffer, or in the buffers of all ranks (2-d), as elements."""
        return buffer[..., self.start : self.stop].view(self.dtype)

    def split(self, flat: Tensor, results: list[Tensor], split: Split | None = None) -> None:
        """Splits elements into the leaves, which may be views.

        With `torch.split` as `split` they are views.
        """
        indices = iter(self.indices)
        for group in self.groups:
            rows = flat[group.start : group.stop].view(-1, *group.tail)
            for leaf in (split or _split_function(rows))(rows, group.lengths):
                results[next(indices)] = leaf.view(()) if group.scalars else leaf

    def split_rows(self, rows: Tensor, results: list[Tensor]) -> None:
        """Splits the elements of all ranks, one row each, into concatenated copies of the leaves."""
        leaves = _split_copy(rows, self.counts, 1)
        for index, leaf, shape in zip(self.indices, leaves, self.joined, strict=True):
            results[index] = leaf.view(shape)

    def receive(self, header: Header, results: list[Tensor]) -> None:
        """Splits the payloads of all headers into the leaves, concatenated over ranks."""
        rows = header.views(self.start, self.stop, self.dtype)[1]
        self.uses += 1
        can_be_ordered = rows.numel() <= _MAX_ORDERED_NUMEL and rows.dtype not in _NOT_SELECTABLE
        if self.order is None and (self.uses == 1 or not can_be_ordered):
            self.split_rows(rows, results)
            return
        if self.order is None:
            self.order = header.positions(self.start, self.dtype, self.counts)
        size, indices = len(rows), iter(self.indices)
        flat = torch.index_select(header.elements(self.dtype), 0, self.order)
        for group in self.groups:
            joined = flat[size * group.start : size * group.stop].view(-1, *group.tail)
            for leaf in _split_function(joined)(joined, group.joined):
                results[next(indices)] = leaf

    def overwrite(self, flat: Tensor, leaves: Sequence[Tensor]) -> None:
        """Copies elements into the leaves in place."""
        members = [leaves[index] for index in self.indices]
        received = list(torch_private.unflatten_dense_tensors(flat, members))
        if not any(leaf.is_conj() or leaf.is_neg() for leaf in members):
            torch._foreach_copy_(members, received)
            return
        for leaf, values in zip(members, received, strict=True):
            leaf.copy_(values)


def _split_function(rows: Tensor) -> Split:
    """Returns the function that splits rows into results, which are views of small tensors.

    These views do not share a version counter, so for autograd an in-place change of one is not a change of
    the others.
    """
    return torch.unsafe_split_with_sizes if rows.nbytes <= _MAX_SHARED_BYTES else _split_copy


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """Layout of several leaves in one buffer of `width` bytes, with one segment for each dtype."""

    segments: tuple[DtypeSegment, ...]
    width: int

    def pack(self, leaves: Sequence[Tensor]) -> Tensor:
        """Returns the bytes of the leaves, a view if there is a single leaf."""
        if len(self.segments) == 1 and self.segments[0].stop == self.width:
            return self.segments[0].flatten(leaves).view(torch.uint8)
        device = leaves[self.segments[0].indices[0]].device if self.segments else "cpu"
        buffer = torch.empty(self.width, dtype=torch.uint8, device=device)
        self.pack_into(leaves, buffer)
        return buffer

    def pack_into(self, leaves: Sequence[Tensor], buffer: Tensor) -> None:
        """Copies the leaves into a buffer."""
        for segment in self.segments:
            segment.read(buffer).copy_(segment.flatten(leaves))

    def send(self, leaves: Sequence[Tensor], header: Header) -> None:
        """Copies the leaves into the payload of a header."""
        for segment in self.segments:
            header.views(segment.start, segment.stop, segment.dtype)[0].copy_(segment.flatten(leaves))

    def received(self, header: Header) -> Iterator[tuple[DtypeSegment, Tensor]]:
        """Yields each segment with the elements of all ranks in their headers, one row each."""
        for segment in self.segments:
            yield segment, header.views(segment.start, segment.stop, segment.dtype)[1]


def lay_out(
    indices: Sequence[int], shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], size: int
) -> FlatBuffer:
    """Returns the layout of leaves in one buffer, with one segment for each dtype.

    Args:
        indices: Indices of these leaves in `shapes` and `dtypes`.
        size: World size, for the shapes that are concatenated over ranks.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index in indices:
        by_dtype.setdefault(dtypes[index], []).append(index)
    segments, start = [], 0
    for dtype, members in by_dtype.items():
        members.sort(key=lambda index: (len(shapes[index]) == 0, shapes[index][1:]))
        sizes = [shapes[index] for index in members]
        counts = [shape.numel() for shape in sizes]
        stop = start + sum(counts) * dtype.itemsize
        joined = tuple(joined_shape(shape, size) for shape in sizes)
        segments.append(
            DtypeSegment(dtype, start, stop, tuple(members), counts, joined, tuple(_group(sizes, size)))
        )
        start = -(-stop // ALIGNMENT) * ALIGNMENT
    return FlatBuffer(tuple(segments), segments[-1].stop if len(segments) == 1 else start)


def _group(shapes: list[torch.Size], size: int) -> Iterator[RowGroup]:
    start = 0
    for (scalars, tail), members in groupby(shapes, key=lambda shape: (len(shape) == 0, tuple(shape[1:]))):
        lengths = [shape[0] if shape else 1 for shape in members]
        stop = start + sum(lengths) * torch.Size(tail).numel()
        yield RowGroup(start, stop, tail, lengths, [size * length for length in lengths], scalars)
        start = stop


def joined_shape(shape: torch.Size, size: int) -> tuple[int, ...]:
    """Returns the shape of `size` tensors concatenated along dimension 0, where 0-d counts as `[1]`."""
    return (size * shape[0], *shape[1:]) if shape else (size,)


@lru_cache(maxsize=256)
def cached_layout(tensors: tuple[tuple[torch.Size, torch.dtype], ...]) -> FlatBuffer:
    """Returns the cached layout of the tensors of one rank, given by shape and dtype.

    Tensors without elements are not in the buffer.
    """
    shapes, dtypes = [shape for shape, _ in tensors], [dtype for _, dtype in tensors]
    return lay_out([index for index, shape in enumerate(shapes) if shape.numel()], shapes, dtypes, 1)


def views_of(buffer: Tensor, tensors: tuple[tuple[torch.Size, torch.dtype], ...]) -> list[Tensor]:
    """Returns views of the tensors in a buffer with the layout of `cached_layout`."""
    views: list[Any] = [None] * len(tensors)
    for segment in cached_layout(tensors).segments:
        segment.split(segment.read(buffer), views, torch.split)
    for index, (shape, dtype) in enumerate(tensors):
        if views[index] is None:
            views[index] = torch.empty(shape, dtype=dtype, device=buffer.device)
    return views


SEPARATE_BYTES = 64 * 1024
"""Bytes from which a tensor is sent separately, because a copy into a buffer costs more than a collective."""

_MIN_BUFFER_LIMIT, _MAX_BUFFER_LIMIT = 256 * 1024, 32 * 1024 * 1024

Key = tuple[Any, ...]


@dataclass(slots=True)
class FlatStructure:
    """Flattened form of nested tensors."""

    leaves: list[Tensor]
    shapes_and_dtypes: list[Any]  # shape and dtype of each leaf, in alternation
    containers: list[Any]  # for each container, the number of leaves before it, and its length or keys


def flatten_structure(data: object) -> FlatStructure:
    """Returns the leaves, shapes, dtypes and containers of nested tensors.

    Raises an error unless all leaves are dense tensors on one device.
    """
    structure = FlatStructure([], [], [])
    is_sendable = True
    try:
        _collect(data, structure.leaves, structure.shapes_and_dtypes, structure.containers)
    except _NotSendableError:
        is_sendable = False
    if not is_sendable:  # outside of `except`, so that the traceback has one error
        check_leaves(data)
    if structure.leaves:
        device = structure.leaves[0].device
        for leaf in structure.leaves:
            if leaf.device != device:
                devices = ", ".join(sorted({str(leaf.device) for leaf in structure.leaves}))
                raise ConfigurationError(
                    f"The tensors of one structure are on {devices}, and a collective takes them from one "
                    "device. Move them to one with `send_to_device`, or make one call for each device."
                )
        if device.type == "meta":
            check_leaves(data)
    return structure


def unflatten_structure(data: Any, leaves: Iterator[Any]) -> Any:
    """Returns nested data of the structure of `data` with other leaves."""
    return recursively_apply(lambda leaf: next(leaves), data)


def _collect(data: object, leaves: list[Tensor], shapes_and_dtypes: list[Any], containers: list[Any]) -> None:
    if isinstance(data, Tensor):
        if not is_dense(data):
            raise _NotSendableError
        leaves.append(data)
        shapes_and_dtypes += (data.shape, data.dtype)
    elif isinstance(data, (list, tuple)):
        containers += (len(leaves), len(data))
        for item in data:
            _collect(item, leaves, shapes_and_dtypes, containers)
    elif isinstance(data, Mapping):
        containers += (len(leaves), tuple(data))
        for item in data.values():
            _collect(item, leaves, shapes_and_dtypes, containers)
    else:
        raise _NotSendableError


class _NotSendableError(TypeError):
    """Internal error for a leaf that is not a dense tensor, which `check_leaves` reports to the user."""


def _is_masked(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.masked.MaskedTensor)


def is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor is an ordinary strided tensor that torch can view, split and concatenate."""
    if tensor.layout is not torch.strided or (type(tensor) is not Tensor and _is_masked(tensor)):
        return False
    return not (tensor.is_nested or tensor.is_quantized)


def _is_sendable(tensor: Tensor) -> bool:
    return is_dense(tensor) and not tensor.is_meta


_FIXES: tuple[tuple[Callable[[Tensor], bool], str, str], ...] = (
    (
        lambda leaf: leaf.is_nested,
        "a nested tensor",
        "Pad it with `torch.nested.to_padded_tensor`, or pass the list of its parts, `tensor.unbind()`, to "
        "`gather_object`",
    ),
    (lambda leaf: leaf.is_meta, "a tensor on the meta device, without data", "Move it to a device first"),
    (
        _is_masked,
        "a masked tensor",
        "Pass its data and its mask, `tensor.get_data()` and `tensor.get_mask()`",
    ),
    (lambda leaf: leaf.is_quantized, "a quantized tensor", "Pass `tensor.dequantize()`"),
)


def check_leaves(data: object, path: str = "", accepts: Callable[[Tensor], bool] = _is_sendable) -> None:
    """Raises an error with the path of the first leaf that is not a tensor or is not accepted.

    Args:
        accepts: Predicate of a tensor. The default accepts dense tensors with data.
    """
    if isinstance(data, Tensor):
        if not accepts(data):
            raise _not_dense(data, path)
    elif isinstance(data, (list, tuple)):
        for index, item in enumerate(data):
            check_leaves(item, f"{path}[{index}]", accepts)
    elif isinstance(data, Mapping):
        for key, value in data.items():
            check_leaves(value, f"{path}[{key!r}]", accepts)
    else:
        raise not_a_tensor(data, path)


def not_a_tensor(data: object, path: str = "") -> TypeError:
    location = f" at {path}" if path else ""
    return TypeError(
        f"A collective takes tensors in lists, tuples and dictionaries, and was given {type(data).__name__}"
        f"{location}: use `gather_object` or `broadcast_object_list` for other objects."
    )


def _not_dense(leaf: Tensor, path: str) -> ConfigurationError:
    sparse = f"a tensor with the layout {leaf.layout}", "Pass `tensor.to_dense()`"
    kind, fix = next(((kind, fix) for applies, kind, fix in _FIXES if applies(leaf)), sparse)
    location = f" at {path}" if path else ""
    text = f"A collective takes dense tensors, and was given {kind}{location}. {fix}."
    return as_builtin(ConfigurationError(text), RuntimeError)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Plan for the transfer of the leaves of one structure."""

    fingerprint: int  # identifies the operation, the structure, the shapes and the dtypes
    in_header: FlatBuffer | None  # all leaves, if they fit into the header
    buffers: tuple[FlatBuffer, ...]  # otherwise the small leaves
    separate: tuple[int, ...]  # indices of the leaves that are sent separately
    empty: tuple[int, ...]  # indices of the leaves without elements, which are not sent


def fingerprint_of(*values: object) -> int:
    """Returns a signed number of 64 bits that identifies values, as a hash of their `repr`."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def plan_transfer(
    operation: str, structure: FlatStructure, *, size: int, capacity: int, mixed: bool = True
) -> TransferPlan:
    """Returns the cached plan for the transfer of a structure.

    Args:
        operation: Name of the operation, with the arguments that must be equal on all ranks.
        capacity: Bytes of payload in the header.
        mixed: Whether a buffer may contain several dtypes, which is possible if nothing is computed.
    """
    tensors, containers = tuple(structure.shapes_and_dtypes), tuple(structure.containers)
    return _plan(operation, tensors, containers, size, capacity, mixed)


@lru_cache(maxsize=256)
def _plan(
    operation: str, tensors: Key, containers: Key, size: int, capacity: int, mixed: bool
) -> TransferPlan:
    shapes, dtypes = tensors[::2], tensors[1::2]
    lengths = [shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    fingerprint = fingerprint_of(operation, containers, tensors)
    nonempty = [index for index, length in enumerate(lengths) if length]
    empty = tuple(index for index, length in enumerate(lengths) if not length)
    buffer = lay_out(nonempty, shapes, dtypes, size)
    if buffer.width <= capacity:
        return TransferPlan(fingerprint, buffer, (), (), empty)
    small = [index for index in nonempty if lengths[index] < SEPARATE_BYTES]
    # Packing and unpacking hold copies of one buffer at a time, of at most a quarter of all bytes.
    limit = max(_MIN_BUFFER_LIMIT, min(_MAX_BUFFER_LIMIT // size, sum(lengths) // 4))
    buckets = _assign_to_buckets(small, lengths, limit, dtypes, mixed)
    separate = [index for index in nonempty if lengths[index] >= SEPARATE_BYTES]
    separate += [bucket[0] for bucket in buckets if len(bucket) == 1]
    buffers = tuple(lay_out(bucket, shapes, dtypes, size) for bucket in buckets if len(bucket) > 1)
    return TransferPlan(fingerprint, None, buffers, tuple(sorted(separate)), empty)


def _assign_to_buckets(
    indices: list[int], lengths: list[int], limit: int, dtypes: Key, mixed: bool
) -> list[list[int]]:
    """Assigns leaves to buckets of at most `limit` bytes, each of which becomes one buffer."""
    by_dtype: dict[Any, list[list[int]]] = {}
    num_bytes: dict[Any, int] = {}
    for index in indices:
        dtype = None if mixed else dtypes[index]
        buckets = by_dtype.setdefault(dtype, [[]])
        if buckets[-1] and num_bytes[dtype] + lengths[index] > limit:
            buckets.append([])
        num_bytes[dtype] = lengths[index] + (num_bytes[dtype] if buckets[-1] else 0)
        buckets[-1].append(index)
    return [bucket for buckets in by_dtype.values() for bucket in buckets]
