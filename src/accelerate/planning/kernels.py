"""Temporary buffers that the kernels of operators allocate in addition to their results.

Traces with fake tensors do not contain them, so `planning.operators` adds them to a trace with `Kernels`.
"""

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
"""Operator with temporary buffers -> indices of its arguments with the batch or time in dimension 0."""
RECURRENT = {aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default}
"""Operators of `BATCHED` with features in the last dimension. Convolutions have them in dimension 1."""


def _strided_bytes(args: Sequence[Any], result: Any) -> int:
    """Returns the bytes of the arguments that are not contiguous, which the kernel copies."""
    return sum(arg.nbytes for arg in args if isinstance(arg, Tensor) and not arg.is_contiguous())


def _strided_and_input_bytes(args: Sequence[Any], result: Any) -> int:
    return _strided_bytes(args, result) + int(args[0].nbytes)


def _input_bytes(args: Sequence[Any], result: Any) -> int:
    return int(args[0].nbytes)


def _input_and_result_bytes(args: Sequence[Any], result: Any) -> int:
    return int(args[0].nbytes) + sum(tensor.nbytes for tensor in iterate_tensors(result))


def _mask_bytes(args: Sequence[Any], result: Any) -> int:
    return int(args[0].numel())


COPIED_BYTES: Mapping[Any, Callable[[Sequence[Any], Any], int]] = {
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
        _strided_bytes,
    ),
    aten.native_batch_norm_backward.default: _input_bytes,
    aten.roll.default: _strided_and_input_bytes,
    operator("_safe_softmax.default"): _mask_bytes,
    aten.upsample_nearest2d.default: _input_and_result_bytes,
    aten.upsample_bilinear2d.default: _input_and_result_bytes,
}
"""Operator -> bytes of the arguments and results that its kernel copies to another memory format."""

MEASURED = {
    aten.native_batch_norm_backward.default,
    aten.avg_pool2d_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    *(
        operator(f"{name}.default")
        for mode in ("upsample_nearest", "upsample_bilinear", "upsample_bicubic", "_upsample_nearest_exact")
        for name in (f"{mode}2d", f"{mode}2d_backward")
    ),
}
"""Operators of images whose copies depend on the memory format and the size. They are measured on the CPU."""
LOSSES, LINEAR_ALGEBRA = ("_loss", "binary_cross_entropy"), ("linalg_", "_linalg_")
"""Parts of the names of operators with temporary buffers, which are measured on the CPU, too."""
MAX_ELEMENTS = 2**27
"""Most elements of the first argument of such an operator that runs to measure its copies."""

MAX_MULTIPLICATIONS = 2 * 10**9
"""Most multiplications of an operator that runs to measure its buffers, about one second."""
WORKSPACE = 40, 25
"""Bytes in the workspace of a recurrent layer per unit of its hidden size, and of its larger size."""
Buffers = tuple[float, tuple[int, ...]]
"""Peak bytes of the temporary buffers of an operator, and the bytes of each result."""


class Kernels:
    """Adds the temporary buffers of kernels to a trace with fake tensors.

    For a step on the CPU, each operator runs once with zeros, and its allocations are recorded. On other
    devices, its kernel is assumed to copy arguments and results to its memory format.

    Args:
        measures: Whether operators may run.
        on_cpu: Whether the step runs on the CPU.
    """

    def __init__(self, measures: bool, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self.measures = measures
        self.known: dict[Any, Buffers | None] = {}

    def count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Allocates and frees the buffers of an operator.

        Returns:
            The result of the operator, in which fake tensors have the bytes that the kernel allocates.
        """
        if func not in BATCHED:
            _allocate(self._copied(func, args, result), result)
            return self._with_storage(func, args, result)
        key = (func, *(_hashable(arg) for arg in args))
        if key not in self.known:
            self.known[key] = self._measure(func, args) if self.measures else None
        measured = self.known[key]
        results = list(iterate_tensors(result))
        buffers, sizes = measured or (_copies(func, args, result), _workspaces(func, args, results))
        if len(results) == len(sizes) and any(
            size != tensor.untyped_storage().nbytes() for size, tensor in zip(sizes, results, strict=True)
        ):
            pairs = zip(results, sizes, strict=True)
            result = tuple(
                tensor
                if size == tensor.untyped_storage().nbytes()
                else tensor.new_empty(size, dtype=torch.uint8)
                for tensor, size in pairs
            )
        _allocate(buffers, result)
        return result

    def _with_storage(self, func: Any, args: Sequence[Any], result: Any) -> Any:
        """Returns the result of an operator with the storage of its kernel.

        That of a loss is the tensor that it has reduced.
        """
        measured = self.known.get((func, *map(_hashable, args))) if self.measures and _is_loss(func) else None
        if measured is None or not isinstance(result, Tensor):
            return result
        (size,) = measured[1]
        if size <= result.untyped_storage().nbytes():
            return result
        return result.new_empty(size // result.element_size()).as_strided(result.shape, result.stride())

    def _copied(self, func: Any, args: Sequence[Any], result: Any) -> int:
        if self.measures and _is_measured(func) and args[0].numel() <= MAX_ELEMENTS:
            key = (func, *(_hashable(arg) for arg in args))
            if key not in self.known:
                self.known[key] = _run(func, args, 0)
            if (measured := self.known[key]) is not None:
                return round(measured[0])
        if func in COPIED_BYTES:
            return COPIED_BYTES[func](args, result)
        if _is_loss(func) and isinstance(result, Tensor) and not result.ndim:  # before its reduction
            return _input_bytes(args, result)
        if self.on_cpu and torch.Tag.pointwise in func.tags:
            return _promoted_bytes(args)
        return 0

    def _measure(self, func: Any, args: Sequence[Any]) -> Buffers | None:
        """Returns the buffers of an operator, or None if they cannot be measured.

        The buffers of a large batch are extrapolated from those of two small batches.
        """
        size = args[BATCHED[func][0]].shape[0]
        limit = int(size * MAX_MULTIPLICATIONS / max(1, _num_multiplications(func, args)))
        if size <= limit:
            return _run(func, args, size)
        if limit < 2:
            return None
        one, two = (_run(func, args, num_samples) for num_samples in (limit // 2, limit))
        if one is None or two is None:
            return None
        num_steps = (size - limit) / (limit - limit // 2)
        first, second = ((buffers, *sizes) for buffers, sizes in (one, two))
        extrapolated = [b + max(0, b - a) * num_steps for a, b in zip(first, second, strict=True)]
        return extrapolated[0], tuple(round(size) for size in extrapolated[1:])


def _is_measured(func: Any) -> bool:
    return func in MEASURED or _is_loss(func) or _name_of(func).startswith(LINEAR_ALGEBRA)


def _is_loss(func: Any) -> bool:
    return any(part in _name_of(func) for part in LOSSES)


def _name_of(func: Any) -> str:
    return getattr(getattr(func, "overloadpacket", None), "__name__", "")


def _allocate(size: float, result: Any) -> None:
    """Allocates bytes on the device of a result and frees them, so that the memory tracker counts them."""
    if size > 0:
        torch.empty(round(size), dtype=torch.uint8, device=next(iterate_tensors(result)).device)


def _promoted_bytes(args: Sequence[Any]) -> int:
    """Returns the bytes of the arguments after the CPU kernel has converted them to the promoted dtype."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if len({tensor.dtype for tensor in tensors}) < 2:
        return 0
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return sum(t.numel() * dtype.itemsize for t in tensors if t.dtype != dtype and t.ndim)


def _hashable(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype, argument.device.type
    return tuple(argument) if isinstance(argument, (list, tuple)) else argument


def _num_multiplications(func: Any, args: Sequence[Any]) -> int:
    """Returns the approximate number of multiplications, one per weight and position of the input."""
    indices = [index for index in range(1, 5) if index not in BATCHED[func]]
    weights = sum(args[i].numel() for i in indices if isinstance(args[i], Tensor) and args[i].ndim > 1)
    channels: int = args[0].shape[-1 if func in RECURRENT else 1]
    return int(weights * args[0].numel() // channels)


def _copies(func: Any, args: Sequence[Any], result: Any) -> int:
    """Returns the bytes of copies of the batched arguments and of the first result."""
    copied = [*(args[index] for index in BATCHED[func]), next(iterate_tensors(result), None)]
    return sum(value.nbytes for value in copied[:2] if isinstance(value, Tensor))


def _workspaces(func: Any, args: Sequence[Any], results: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the bytes of each result, with the workspace that a recurrent layer saves for backward."""
    sizes = [result.untyped_storage().nbytes() for result in results]
    if func is aten.mkldnn_rnn_layer.default:
        time, batch, inputs = args[0].shape
        hidden = results[0].shape[-1]
        sizes[-1] = time * batch * (WORKSPACE[0] * hidden + WORKSPACE[1] * max(inputs, hidden))
    return tuple(sizes)


def _run(func: Any, args: Sequence[Any], size: int) -> Buffers | None:
    """Runs an operator with zeros, or with random matrices, for a number of samples.

    Returns:
        Its buffers, or None if they cannot be recorded.
    """

    def zeros(index: int, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        shape = (size, *argument.shape[1:]) if index in BATCHED.get(func, ()) else argument.shape
        values = torch.empty_strided(shape, argument.stride(), dtype=argument.dtype)
        is_algebra = _name_of(func).startswith(LINEAR_ALGEBRA) and values.is_floating_point()
        return (
            values.normal_(0.0, 0.002, generator=torch.Generator().manual_seed(0))
            if is_algebra
            else values.zero_()
        )

    def run() -> Any:
        return func(*real)

    with torch_private.no_dispatch():
        real = [zeros(index, argument) for index, argument in enumerate(args)]
        try:
            measured = torch_private.peak_on_cpu(run)
        except RuntimeError:  # zeros may be no lengths or targets of a loss
            return None
        if measured is None:
            return None
        result, peak = measured
        sizes = tuple(tensor.untyped_storage().nbytes() for tensor in iterate_tensors(result))
        return peak - sum(sizes), sizes
