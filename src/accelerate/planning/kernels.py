"""Buffers inside of operators: what a kernel allocates besides its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accelerate import torch_private
from accelerate.nested import iterate_tensors
from accelerate.torch_private import operator

aten: Any = torch.ops.aten

BATCHED: Mapping[Any, tuple[int, ...]] = {
    aten.convolution.default: (0,),
    aten.convolution_backward.default: (0, 1),
    aten.mkldnn_rnn_layer.default: (0,),
    aten.mkldnn_rnn_layer_backward.default: (0, 7, 10),
}
"""Operator with buffers -> its arguments whose dimension 0 is of samples or time steps."""


def _strided(args: Sequence[Any], result: Any) -> int:
    """Arguments that are not contiguous are copied."""
    return sum(each.nbytes for each in args if isinstance(each, Tensor) and not each.is_contiguous())


def _first_argument(args: Sequence[Any], result: Any) -> int:
    return _strided(args, result) + int(args[0].nbytes)


def _both(args: Sequence[Any], result: Any) -> int:
    return int(args[0].nbytes) + sum(each.nbytes for each in iterate_tensors(result))


def _mask(args: Sequence[Any], result: Any) -> int:
    return int(args[0].numel())


COPIED: Mapping[Any, Callable[[Sequence[Any], Any], int]] = {
    **dict.fromkeys(
        (
            aten.native_layer_norm.default,
            aten.native_layer_norm_backward.default,
            operator("_softmax.default"),
            operator("_softmax_backward_data.default"),
            operator("_log_softmax.default"),
            operator("_log_softmax_backward_data.default"),
            aten.embedding_dense_backward.default,
            aten.gelu_backward.default,
            operator("_ctc_loss_backward.Tensor"),
        ),
        _strided,
    ),
    aten.native_batch_norm_backward.default: _first_argument,
    aten.roll.default: _first_argument,
    operator("_safe_softmax.default"): _mask,
    aten.upsample_nearest2d.default: _both,
    aten.upsample_nearest2d_backward.default: _both,
    aten.upsample_bilinear2d.default: _both,
    aten.upsample_bilinear2d_backward.default: _both,
}
"""Operator -> bytes of the arguments and results that it copies to a memory format of its own."""

MOST_PRODUCTS = 2 * 10**9
"""Multiplications of an operator that is run to measure its buffers: at most about a second."""
WORKSPACE = 40, 25
"""Bytes in the workspace of a recurrent layer, for each hidden value and for each of the wider side."""
Buffers = tuple[float, tuple[int, ...]]
"""Bytes that an operator allocates besides its results, and those of each result."""


class Kernels:
    """Counts the buffers inside of operators in a trace.

    An operator of a step on the CPU runs with zeros, and its allocations are recorded. On other devices its
    kernel is assumed to copy arguments and results to its memory format.

    Args:
        measures: whether operators may run.
        on_cpu: whether the step runs on the CPU.
    """

    def __init__(self, measures: bool, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self.measures = measures
        self.known: dict[Any, Buffers | None] = {}

    def count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Allocate the buffers of an operator for a moment; return its result, with what it really has."""
        if func not in BATCHED:
            _allocate(self._copied(func, args, result), result)
            return result
        key = (func, *(_described(each) for each in args))
        if key not in self.known:
            self.known[key] = self._measure(func, args) if self.measures else None
        found = self.known[key]
        results = list(iterate_tensors(result))
        buffers, sizes = found or (_copies(func, args, result), _workspaces(func, args, results))
        if len(results) == len(sizes) and any(
            size != each.untyped_storage().nbytes() for size, each in zip(sizes, results, strict=True)
        ):
            pairs = zip(results, sizes, strict=True)
            result = tuple(
                each if size == each.untyped_storage().nbytes() else each.new_empty(size, dtype=torch.uint8)
                for each, size in pairs
            )
        _allocate(buffers, result)
        return result

    def _copied(self, func: Any, args: Sequence[Any], result: Any) -> int:
        if func in COPIED:
            return COPIED[func](args, result)
        if self.on_cpu and torch.Tag.pointwise in func.tags:
            return _promoted(args)
        return 0

    def _measure(self, func: Any, args: Sequence[Any]) -> Buffers | None:
        """Return the buffers of an operator that runs; of a large one from those of two small batches."""
        size = args[BATCHED[func][0]].shape[0]
        limit = int(size * MOST_PRODUCTS / max(1, _products(args)))
        if size <= limit:
            return _run(func, args, size)
        if limit < 2:
            return None
        one, two = (_run(func, args, part) for part in (limit // 2, limit))
        if one is None or two is None:
            return None
        steps = (size - limit) / (limit - limit // 2)
        first, second = ((buffers, *sizes) for buffers, sizes in (one, two))
        grown = [b + max(0, b - a) * steps for a, b in zip(first, second, strict=True)]
        return grown[0], tuple(round(each) for each in grown[1:])


def _allocate(size: float, result: Any) -> None:
    """Allocate bytes next to a result for a moment."""
    if size > 0:
        torch.empty(round(size), dtype=torch.uint8, device=next(iterate_tensors(result)).device)


def _promoted(args: Sequence[Any]) -> int:
    """Return the bytes of arguments that kernels of the CPU convert to the dtype that all have in common."""
    tensors = [each for each in args if isinstance(each, Tensor)]
    if len({tensor.dtype for tensor in tensors}) < 2:
        return 0
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return sum(each.numel() * dtype.itemsize for each in tensors if each.dtype != dtype and each.ndim)


def _described(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype, argument.device.type
    return tuple(argument) if isinstance(argument, (list, tuple)) else argument


def _products(args: Sequence[Any]) -> int:
    """Return about how many multiplications an operator makes: weights, for each position of its argument."""
    weights = sum(each.numel() for each in args[1:6] if isinstance(each, Tensor) and each.ndim > 1)
    channels: int = args[0].shape[1 if args[0].ndim > 3 else -1]
    return int(weights * args[0].numel() // channels)


def _copies(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return the bytes of copies of the arguments and of the first result."""
    copied = [*(args[index] for index in BATCHED[func]), next(iterate_tensors(result), None)]
    return sum(each.nbytes for each in copied[:2] if isinstance(each, Tensor))


def _workspaces(func: Any, args: Sequence[Any], results: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the bytes of results, with those of the workspace that a recurrent layer keeps for backward."""
    sizes = [each.untyped_storage().nbytes() for each in results]
    if func is aten.mkldnn_rnn_layer.default:
        time, batch, inputs = args[0].shape
        hidden = results[0].shape[-1]
        sizes[-1] = time * batch * (WORKSPACE[0] * hidden + WORKSPACE[1] * max(inputs, hidden))
    return tuple(sizes)


def _run(func: Any, args: Sequence[Any], size: int) -> Buffers | None:
    """Run an operator with zeros for a number of samples, and return its buffers."""

    def zeros(index: int, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        shape = (size, *argument.shape[1:]) if index in BATCHED[func] else argument.shape
        return torch.empty_strided(shape, argument.stride(), dtype=argument.dtype).zero_()

    def run() -> Any:
        return func(*real)

    with torch_private.no_dispatch():
        real = [zeros(index, argument) for index, argument in enumerate(args)]
        measured = torch_private.peak_on_cpu(run)
        if measured is None:
            return None
        result, peak = measured
        sizes = tuple(each.untyped_storage().nbytes() for each in iterate_tensors(result))
        return peak - sum(sizes), sizes
