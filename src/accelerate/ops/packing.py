"""Take nested tensors apart, plan how they are sent, pack them into flat buffers, and rebuild the structure.

Nothing is sent here. What depends on the shapes only is computed once per structure as a `TransferPlan`.
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
from accelerate.nested import honor_mapping, honor_type
from accelerate.ops.base import Header

ALIGNMENT = 16
"""Bytes; any dtype may be viewed at such an offset of a buffer."""

_SHARED = 64 * 1024  # bytes of results that may share memory
_ORDERED = 8192  # elements up to which their order is cached
_NOT_SELECTABLE = frozenset({torch.uint16, torch.uint32, torch.uint64})  # torch cannot reorder these

Cut = Callable[..., Sequence[Tensor]]

# The declaration of the function leaves out that it returns the parts.
_split_copy: Cut = torch.split_with_sizes_copy  # type: ignore[assignment]


class RowGroup(NamedTuple):
    """Neighbours in a segment that differ in the first dimension only: they are cut apart in one call."""

    start: int
    stop: int
    tail: tuple[int, ...]
    lengths: list[int]  # number of rows of each leaf; a 0-d leaf counts as one row
    joined: list[int]  # the same for the leaves of all processes together
    scalars: bool  # the leaves are 0-d


@dataclass(slots=True)
class DtypeSegment:
    """All leaves of one dtype in a buffer, from byte `start` to `stop`."""

    dtype: torch.dtype
    start: int
    stop: int
    indices: tuple[int, ...]  # which leaves; those of one group are neighbours
    counts: list[int]  # number of elements of each
    joined: tuple[tuple[int, ...], ...]  # shape of each when those of all processes are joined
    groups: tuple[RowGroup, ...]
    # Where the elements of all processes are in their headers, leaf by leaf; computed when it is received for
    # the second time, so that a structure that is used once does not pay for it.
    order: Tensor | None = None
    uses: int = 0

    def flatten(self, leaves: Sequence[Tensor]) -> Tensor:
        """Return the elements of its leaves, one after the other; may share the memory of a single leaf."""
        own = [leaves[index] for index in self.indices]
        if len(own) == 1 or len(self.groups) > 1:
            flat: Tensor = torch_private.flatten_dense_tensors(own)
        else:
            flat = torch.stack(own) if self.groups[0].scalars else torch.cat(own).reshape(-1)
        return flat.detach().resolve_conj().resolve_neg()

    def read(self, buffer: Tensor) -> Tensor:
        """View its bytes in a buffer, or in one buffer for each process (2-d), as elements."""
        return buffer[..., self.start : self.stop].view(self.dtype)

    def split(self, flat: Tensor, results: list[Tensor], cut: Cut | None = None) -> None:
        """Cut elements into its leaves, which may use their memory; with `torch.split` they always do."""
        indices = iter(self.indices)
        for group in self.groups:
            rows = flat[group.start : group.stop].view(-1, *group.tail)
            for leaf in (cut or _cut_of(rows))(rows, group.lengths):
                results[next(indices)] = leaf.view(()) if group.scalars else leaf

    def split_rows(self, rows: Tensor, results: list[Tensor]) -> None:
        """Cut the elements of all processes (one row each) into copies of its leaves, joined by rows."""
        leaves = _split_copy(rows, self.counts, 1)
        for index, leaf, shape in zip(self.indices, leaves, self.joined, strict=True):
            results[index] = leaf.view(shape)

    def receive(self, header: Header, results: list[Tensor]) -> None:
        """Cut the payloads of all headers into its leaves, joined by rows."""
        rows = header.windows(self.start, self.stop, self.dtype)[1]
        self.uses += 1
        can_be_ordered = rows.numel() <= _ORDERED and rows.dtype not in _NOT_SELECTABLE
        if self.order is None and (self.uses == 1 or not can_be_ordered):
            self.split_rows(rows, results)
            return
        if self.order is None:
            self.order = header.positions(self.start, self.dtype, self.counts)
        size, indices = len(rows), iter(self.indices)
        flat = torch.index_select(header.elements(self.dtype), 0, self.order)
        for group in self.groups:
            joined = flat[size * group.start : size * group.stop].view(-1, *group.tail)
            for leaf in _cut_of(joined)(joined, group.joined):
                results[next(indices)] = leaf

    def overwrite(self, flat: Tensor, leaves: Sequence[Tensor]) -> None:
        own = [leaves[index] for index in self.indices]
        theirs = list(torch_private.unflatten_dense_tensors(flat, own))
        if not any(leaf.is_conj() or leaf.is_neg() for leaf in own):
            torch._foreach_copy_(own, theirs)
            return
        for leaf, arrived in zip(own, theirs, strict=True):
            leaf.copy_(arrived)


def _cut_of(rows: Tensor) -> Cut:
    """How rows are cut into results: small ones share memory, but not what they track."""
    return torch.unsafe_split_with_sizes if rows.nbytes <= _SHARED else _split_copy


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """Several leaves in one buffer of `width` bytes, with one segment for each dtype."""

    segments: tuple[DtypeSegment, ...]
    width: int

    def pack(self, leaves: Sequence[Tensor]) -> Tensor:
        """Return the bytes of the leaves; may share the memory of a single leaf."""
        if len(self.segments) == 1 and self.segments[0].stop == self.width:
            return self.segments[0].flatten(leaves).view(torch.uint8)
        device = leaves[self.segments[0].indices[0]].device if self.segments else "cpu"
        buffer = torch.empty(self.width, dtype=torch.uint8, device=device)
        self.pack_into(leaves, buffer)
        return buffer

    def pack_into(self, leaves: Sequence[Tensor], buffer: Tensor) -> None:
        for segment in self.segments:
            segment.read(buffer).copy_(segment.flatten(leaves))

    def send(self, leaves: Sequence[Tensor], header: Header) -> None:
        for segment in self.segments:
            header.windows(segment.start, segment.stop, segment.dtype)[0].copy_(segment.flatten(leaves))

    def received(self, header: Header) -> Iterator[tuple[DtypeSegment, Tensor]]:
        """Yield each segment with the elements of all processes in their headers, one row each."""
        for segment in self.segments:
            yield segment, header.windows(segment.start, segment.stop, segment.dtype)[1]


def lay_out(
    indices: Sequence[int], shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], size: int
) -> FlatBuffer:
    """Give each dtype its segment of one buffer, one segment after the other."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index in indices:
        by_dtype.setdefault(dtypes[index], []).append(index)
    segments, start = [], 0
    for dtype, members in by_dtype.items():
        members.sort(key=lambda index: (len(shapes[index]) == 0, shapes[index][1:]))
        own = [shapes[index] for index in members]
        counts = [shape.numel() for shape in own]
        stop = start + sum(counts) * dtype.itemsize
        joined = tuple(joined_shape(shape, size) for shape in own)
        segments.append(
            DtypeSegment(dtype, start, stop, tuple(members), counts, joined, tuple(_group(own, size)))
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
    """Return the shape of tensors joined along the first dimension; 0-d counts as 1-d."""
    return (size * shape[0], *shape[1:]) if shape else (size,)


@lru_cache(maxsize=256)
def lay_out_once(facts: tuple[tuple[torch.Size, torch.dtype], ...]) -> FlatBuffer:
    """Give each dtype its segment of a buffer with the tensors of one process; the last layouts are cached.

    Those without elements are not in the buffer.
    """
    shapes, dtypes = [shape for shape, _ in facts], [dtype for _, dtype in facts]
    return lay_out([index for index, shape in enumerate(shapes) if shape.numel()], shapes, dtypes, 1)


def views_of(buffer: Tensor, facts: tuple[tuple[torch.Size, torch.dtype], ...]) -> list[Tensor]:
    """Return the tensors of a buffer that `lay_out_once` has laid out, which use its memory."""
    tensors: list[Any] = [None] * len(facts)
    for segment in lay_out_once(facts).segments:
        segment.split(segment.read(buffer), tensors, torch.split)
    for index, (shape, dtype) in enumerate(facts):
        if tensors[index] is None:
            tensors[index] = torch.empty(shape, dtype=dtype, device=buffer.device)
    return tensors


ALONE = 64 * 1024
"""Bytes from which a tensor is sent by itself: copying it into a buffer would cost more than a call."""

_SMALLEST_LIMIT, _LARGEST_LIMIT = 256 * 1024, 32 * 1024 * 1024

Facts = tuple[Any, ...]


@dataclass(slots=True)
class Parts:
    """Nested tensors taken apart."""

    leaves: list[Tensor]
    facts: list[Any]  # shape and dtype of each, one after the other
    skeleton: list[Any]  # the containers: how many leaves came before, and its length or its keys


def take_apart(data: Any) -> Parts:
    """List the tensors of nested data, and note what they look like."""
    parts = Parts([], [], [])
    try:
        _collect(data, parts.leaves, parts.facts, parts.skeleton)
    except _NotSendableError:
        check_leaves(data)
    if parts.leaves:
        device = parts.leaves[0].device
        for leaf in parts.leaves:
            if leaf.device != device:
                devices = ", ".join(sorted({str(leaf.device) for leaf in parts.leaves}))
                raise ConfigurationError(
                    f"The tensors of one structure are on {devices}, and a collective takes them from one "
                    "device. Move them to one with `send_to_device`, or make one call for each device."
                )
        if device.type == "meta":
            check_leaves(data)
    return parts


def put_together(data: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(data, Tensor):
        return next(leaves)
    if isinstance(data, (list, tuple)):
        return honor_type(data, [put_together(item, leaves) for item in data])
    return honor_mapping(data, {key: put_together(value, leaves) for key, value in data.items()})


def _collect(data: Any, leaves: list[Tensor], facts: list[Any], skeleton: list[Any]) -> None:
    if isinstance(data, Tensor):
        if not is_dense(data):
            raise _NotSendableError
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
        raise _NotSendableError


class _NotSendableError(TypeError):
    """A leaf is not a dense tensor; `check_leaves` raises the error for the user."""


def _is_masked(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.masked.MaskedTensor)


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is no more than its elements, which torch can view, cut and join."""
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


def check_leaves(data: Any, path: str = "", accepts: Callable[[Tensor], bool] = _is_sendable) -> None:
    """Raise unless all leaves are tensors, by default dense ones with data; the error names the path."""
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
    place = f" at {path}" if path else ""
    return TypeError(
        f"A collective takes tensors in lists, tuples and dictionaries, and was given {type(data).__name__}"
        f"{place}: use `gather_object` or `broadcast_object_list` for other objects."
    )


def _not_dense(leaf: Tensor, path: str) -> ConfigurationError:
    sparse = f"a tensor with the layout {leaf.layout}", "Pass `tensor.to_dense()`"
    what, fix = next(((what, fix) for applies, what, fix in _FIXES if applies(leaf)), sparse)
    place = f" at {path}" if path else ""
    text = f"A collective takes dense tensors, and was given {what}{place}. {fix}."
    return as_builtin(ConfigurationError(text), RuntimeError)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """How the leaves of one structure are sent; those without elements are not."""

    mark: int  # identifies the operation, the structure, the shapes and the dtypes
    whole: FlatBuffer | None  # all leaves in one buffer, where that fits into the header
    buffers: tuple[FlatBuffer, ...]  # the small leaves, where it does not
    alone: tuple[int, ...]  # the leaves that are sent by themselves
    empty: tuple[int, ...]  # the leaves without elements


def mark_of(*facts: object) -> int:
    """Return a number of 64 bits that identifies facts, by their `repr`."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def plan_for(operation: str, parts: Parts, *, size: int, room: int, mixed: bool = True) -> TransferPlan:
    """Plan how a structure is sent; cached for the structures used last.

    `operation` includes the arguments that must agree on all processes; `room` is the bytes of payload in the
    header. With `mixed` several dtypes may share one buffer: bytes are only moved.
    """
    return _plan(operation, tuple(parts.facts), tuple(parts.skeleton), size, room, mixed)


@lru_cache(maxsize=256)
def _plan(operation: str, facts: Facts, skeleton: Facts, size: int, room: int, mixed: bool) -> TransferPlan:
    shapes, dtypes = facts[::2], facts[1::2]
    lengths = [shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    mark = mark_of(operation, skeleton, facts)
    filled = [index for index, length in enumerate(lengths) if length]
    empty = tuple(index for index, length in enumerate(lengths) if not length)
    whole = lay_out(filled, shapes, dtypes, size)
    if whole.width <= room:
        return TransferPlan(mark, whole, (), (), empty)
    shared = [index for index in filled if lengths[index] < ALONE]
    # Packing and unpacking hold copies of one buffer at a time: a quarter of everything at most.
    limit = max(_SMALLEST_LIMIT, min(_LARGEST_LIMIT // size, sum(lengths) // 4))
    loads = _distribute(shared, lengths, limit, dtypes, mixed)
    alone = [index for index in filled if lengths[index] >= ALONE]
    alone += [load[0] for load in loads if len(load) == 1]
    buffers = tuple(lay_out(load, shapes, dtypes, size) for load in loads if len(load) > 1)
    return TransferPlan(mark, None, buffers, tuple(sorted(alone)), empty)


def _distribute(
    indices: list[int], lengths: list[int], limit: int, dtypes: Facts, mixed: bool
) -> list[list[int]]:
    """Distribute leaves over buffers of at most `limit` bytes."""
    loads: dict[Any, list[list[int]]] = {}
    filled: dict[Any, int] = {}
    for index in indices:
        kind = None if mixed else dtypes[index]
        batches = loads.setdefault(kind, [[]])
        if batches[-1] and filled[kind] + lengths[index] > limit:
            batches.append([])
        filled[kind] = lengths[index] + (filled[kind] if batches[-1] else 0)
        batches[-1].append(index)
    return [batch for batches in loads.values() for batch in batches]
