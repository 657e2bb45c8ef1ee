"""Dispatch modes that run operators on fake tensors if their results depend on values.

A trace has shapes and no values. `planning.tracing` enters `OperatorMode` above the memory tracker and the
fake tensors. It stores the values of small tensors that do not depend on weights, assumes balanced values for
other tensors, and adds the workspaces of recurrent layers and the elements of reduced losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from accelerate import torch_private
from accelerate.nested import iterate_tensors
from accelerate.torch_private import operator

aten: Any = torch.ops.aten
NUMBER = operator("_local_scalar_dense.default")
"""Operator of `Tensor.item`, which reads a number from a tensor."""
PACK = operator("_pack_padded_sequence.default")
"""Operator of `pack_padded_sequence`, whose results have sizes that depend on the lengths."""
MAX_INTEGERS, MAX_FLOATS = 2**22, 2**16
"""Elements of the largest integer and floating-point tensors whose values are stored."""
LINEAR_ALGEBRA, MAX_MEASURED = ("linalg_", "_linalg_"), 64
"""Beginnings of the names of operators with intermediate matrices, and the largest size that is measured."""
MAX_BYTES = 2**28
"""Most bytes of the arguments without known values for which an operator runs with ones."""


def _unique(values: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    size = (values.numel(),)
    flat = values.new_empty(size)
    return flat, values.new_empty(values.shape, dtype=torch.long), flat.new_empty(size, dtype=torch.long)


def _unique_along(values: Tensor, dim: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    positions = values.new_empty((values.shape[dim],), dtype=torch.long)
    return torch.empty_like(values), positions, torch.empty_like(positions)


def _masked_select(values: Tensor, mask: Tensor) -> Tensor:
    return values.new_empty((torch.logical_and(values, mask).numel(),))


def _bincount(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    dtype = torch.long if weights is None else weights.dtype
    return values.new_empty((max(minlength, values.numel()),), dtype=dtype)


LARGEST_RESULTS: Mapping[Any, Callable[..., Any]] = {
    aten.nonzero.default: lambda mask: mask.new_empty((mask.numel(), mask.ndim), dtype=torch.long),
    operator("_unique2.default"): _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim.default: _unique_along,
    aten.masked_select.default: _masked_select,
    aten.bincount.default: _bincount,
    aten.equal.default: lambda one, other: one is other,
}
"""Operator whose result has a size that depends on values -> function that returns the largest result."""


def _grouped_mm(
    first: Tensor,
    second: Tensor,
    offs: Tensor | None = None,
    bias: object = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the result of a product of groups of rows, each with its own matrix.

    The meta kernel of torch does not accept float32.
    """
    if first.ndim == 2:
        groups = () if second.ndim == 3 else (len(offs),)  # type: ignore[arg-type]
    else:
        groups = (first.shape[0],) if second.ndim == 3 else ()
    shape = (*groups, first.shape[-2], second.shape[-1])
    return first.new_empty(shape, dtype=out_dtype or first.dtype)


CHANNELS_LAST = {4: [torch.channels_last], 5: [torch.channels_last_3d]}
"""Number of dimensions -> memory formats with channels in the last dimension."""


def _batch_norm(values: Tensor, weight: Tensor | None, *others: Any) -> Any:
    """Returns the results of batch normalization, which are contiguous or in the channels-last format.

    The meta kernel of torch returns the strides of the input.
    """
    formats = [torch.contiguous_format, *CHANNELS_LAST.get(values.ndim, ())]
    if any(values.is_contiguous(memory_format=memory_format) for memory_format in formats):
        return aten.native_batch_norm.default(values, weight, *others)
    is_training = others[3]
    saved = values if weight is None else weight
    means = [saved.new_empty(values.shape[1] if is_training else 0) for _ in range(2)]
    return (values.new_empty(values.shape), *means)


def _recurrent_layer(values: Tensor, *others: Any) -> Any:
    """Returns the results of a recurrent layer, with the workspace that it saves for backward.

    The meta kernel of torch returns an empty workspace.
    """
    outputs, *rest, _ = aten.mkldnn_rnn_layer.default(values, *others)
    hidden = outputs.shape[-1]
    per_step = WORKSPACE[0] * hidden + WORKSPACE[1] * max(values.shape[-1], hidden)
    workspace = values.new_empty(values.shape[0] * values.shape[1] * per_step, dtype=torch.uint8)
    return (outputs, *rest, workspace)


WORKSPACE = 40, 25
"""Bytes in the workspace of a recurrent layer per unit of its hidden size, and of its larger size."""

META_KERNELS: Mapping[Any, Callable[..., Any]] = {
    operator("_grouped_mm.default"): _grouped_mm,
    aten.native_batch_norm.default: _batch_norm,
    aten.mkldnn_rnn_layer.default: _recurrent_layer,
}
"""Operator whose meta kernel differs from its other kernels -> replacement."""

INDEX_OPERATORS = {
    aten.topk.default,
    aten.sort.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.max.dim,
    aten.min.dim,
    aten.kthvalue.default,
    aten.multinomial.default,
}
"""Operators that return indices chosen by values, for example to route tokens to experts."""


CONVERSIONS = {Tensor.__format__, Tensor.numpy, Tensor.__array__}
"""Tensor methods that need values and are not operators."""


class OperatorMode(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Dispatch mode that runs the operators of a trace, including those that need values."""

    def __init__(self) -> None:
        super().__init__()
        self.values: Any = WeakIdKeyDictionary()
        self.intermediates: dict[Any, float] = {}  # of linear algebra, relative to the bytes of arguments
        self.current: Any = None  # the operator that runs
        self.before_each: Callable[[], None] = lambda: None

    def store(self, fake: Tensor, value: Tensor) -> None:
        """Stores the values of a buffer or input of the trace.

        Large tensors and floating-point tensors, such as weights, are not stored.
        """
        if value.is_meta or value.is_floating_point() or value.numel() > MAX_INTEGERS:
            return
        with torch_private.no_dispatch():
            self.values[fake] = value.detach().to("cpu", copy=True)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.current = func
        self.before_each()
        if func is NUMBER:
            return self._number(args[0])
        if func is aten.index.Tensor:
            args = (args[0], self._expand_masks(args[1]))
        known = self._is_known(func, args, kwargs)
        result: Any
        if func is PACK:
            result, value = self._pack(*args), None
        elif func in LARGEST_RESULTS:
            value = self._compute(func, args, kwargs) if known else None
            if value is None:
                result = LARGEST_RESULTS[func](*args, **kwargs)
            else:
                result = _like(value, args)
        else:
            result = self._run(func, args, kwargs)
            known = known and all(_is_small(tensor) for tensor in iterate_tensors((result,)))
            value = self._compute(func, args, kwargs) if known else None
        if _is_loss(func) and isinstance(result, Tensor) and not result.ndim:  # keeps what it has reduced
            result = args[0].new_empty(args[0].numel()).as_strided((), ())
        if _name_of(func).startswith(LINEAR_ALGEBRA):
            self._allocate_intermediates(func, args)
        self._store_results(func, args, kwargs, result, value)
        return result

    def _allocate_intermediates(self, func: Callable[..., Any], args: Sequence[Any]) -> None:
        """Allocates and frees the matrices that an operator of linear algebra has besides its results.

        Those of other devices are the same, and are measured once with small matrices on the CPU.
        """
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        key = (func, *((tensor.dtype, tensor.ndim) for tensor in tensors))
        if key not in self.intermediates:
            self.intermediates[key] = _measure_intermediates(func, args)
        if size := round(self.intermediates[key] * sum(tensor.nbytes for tensor in tensors)):
            tensors[0].new_empty(size, dtype=torch.uint8)

    def _run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operator on fake tensors.

        An operator that needs values runs on the known values, with ones for tensors without known values.
        """
        fakes = torch_private.fake_tensors
        try:
            return META_KERNELS.get(func, func)(*args, **kwargs)
        except (fakes.DynamicOutputShapeException, fakes.DataDependentOutputException):
            unknown = [arg for arg in iterate_tensors((*args, *kwargs.values())) if self._value(arg) is None]
            if sum(tensor.nbytes for tensor in unknown) > MAX_BYTES:
                raise
            with torch_private.no_dispatch():
                for tensor in unknown:
                    self.values[tensor] = torch.ones(tensor.shape, dtype=tensor.dtype)
            try:
                value = self._compute(func, args, kwargs)
            finally:
                for tensor in unknown:
                    self.values.pop(tensor, None)
            if value is None:
                raise
            return _like(value, args)

    def _pack(self, values: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """Returns packed sequences and their batch sizes, a real tensor because recurrent layers read it."""
        known = self._value(lengths)
        with torch_private.no_dispatch():
            steps = torch.arange(values.shape[1 if batch_first else 0])
            sizes = torch.full(lengths.shape, len(steps)) if known is None else known
            batch_sizes = (sizes[:, None] > steps[: int(sizes.max())]).sum(0)
            size = int(sizes.sum())
        return values.new_empty((size, *values.shape[2:])), batch_sizes

    def _number(self, tensor: Tensor) -> bool | int | float:
        value = self.read(tensor)
        with torch_private.no_dispatch():
            number: bool | int | float = value.item()
        return number

    def read(self, tensor: Tensor) -> Tensor:
        """Returns the values of a tensor on the CPU, or ones if they are not known."""
        value = self._value(tensor)
        if value is None:
            value = _assumed(NUMBER, tensor)
        if value is None and tensor.nbytes > MAX_BYTES:
            raise torch_private.fake_tensors.DataDependentOutputException(NUMBER)
        with torch_private.no_dispatch():
            return torch.ones(tensor.shape, dtype=tensor.dtype) if value is None else value

    def _expand_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns indices in which each mask is replaced by the positions that it selects."""
        expanded: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                with self:
                    expanded += index.nonzero().unbind(1)
            else:
                expanded.append(index)
        return expanded

    def _value(self, tensor: Tensor) -> Tensor | None:
        if torch_private.is_fake(tensor):
            value: Tensor | None = self.values.get(tensor)
            return value
        return tensor if tensor.is_cpu and _is_small(tensor) else None  # constant

    def _is_known(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether an operator is deterministic and the values of all its arguments are known."""
        if any(self._value(tensor) is None for tensor in iterate_tensors((*args, *kwargs.values()))):
            return False
        return torch.Tag.nondeterministic_seeded not in func.tags

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of an operator on known values, or None if it raises an error for them."""
        if torch_private.mutated_by(func):
            tensors = iterate_tensors((*args, *kwargs.values()))
            if not all(map(torch_private.is_fake, tensors)):
                return None  # constants of the model are not modified
        real = [self._on_cpu(arg) for arg in args]
        options = {name: self._on_cpu(arg) for name, arg in kwargs.items()}
        with torch_private.no_dispatch():
            try:
                result = func(*real, **options)
            except (RuntimeError, IndexError, ValueError):
                return None  # the assumed values are not valid arguments, so the result is unknown as well
            if func.overloadpacket.__name__.startswith(("empty", "new_empty")):
                result.zero_()
        return result

    def _on_cpu(self, argument: object) -> Any:
        if isinstance(argument, Tensor):
            return self._value(argument)
        if isinstance(argument, (list, tuple)):
            return [self._on_cpu(element) for element in argument]
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    def _store_results(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: object,
        value: object,
    ) -> None:
        """Stores the values of the results of an operator, and removes those of modified tensors."""
        if value is None and (names := torch_private.mutated_by(func)):
            arguments = torch_private.arguments_of(func, args, kwargs)
            for tensor in iterate_tensors([arguments[name] for name in names if name in arguments]):
                self._remove(tensor)
        results = list(iterate_tensors((result,)))
        values: list[Any] = list(iterate_tensors((value,))) if value is not None else [None] * len(results)
        for tensor, stored in zip(results, values, strict=True):
            if stored is None and self._value(tensor) is None:
                stored = _assumed(func, tensor, torch_private.arguments_of(func, args, kwargs))
            if stored is not None:
                self.values[tensor] = stored

    def _remove(self, changed: Tensor) -> None:
        if self._value(changed) is None:
            return
        storage = changed.untyped_storage()
        for tensor in list(self.values):
            if tensor.untyped_storage() is storage or tensor is changed:
                del self.values[tensor]

    def convert(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a function of torch, and converts fake tensors to text and arrays by their known values."""
        if getattr(func, "__name__", "") == "_pad_packed_sequence":
            return _pad_packed(*args, **kwargs)
        if func is Tensor.data_ptr:  # of which code reads the alignment
            return 0
        if func not in CONVERSIONS or (func is Tensor.__format__ and args[0].ndim):
            return func(*args, **kwargs)
        value = self.read(args[0].detach())
        with torch_private.no_dispatch():
            return func(value, *args[1:], **kwargs)


def _pad_packed(
    values: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Returns padded sequences and their lengths, with operators that read no fake tensor."""
    with torch_private.no_dispatch():
        sizes: list[int] = batch_sizes.tolist()
        lengths = (batch_sizes > torch.arange(sizes[0])[:, None]).sum(1)
    padded = values.new_full((max(total_length, len(sizes)), sizes[0], *values.shape[1:]), padding_value)
    first = row = 0
    for size, steps in ((size, len(list(steps))) for size, steps in groupby(sizes)):
        rows = values[row : row + size * steps].view(steps, size, *values.shape[1:])
        padded[first : first + steps, :size].copy_(rows)
        first, row = first + steps, row + size * steps
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _measure_intermediates(func: Callable[..., Any], args: Sequence[Any]) -> float:
    """Returns the bytes of the intermediate tensors of an operator, relative to those of its arguments."""

    def small(argument: object) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        shape = [min(size, MAX_MEASURED) for size in argument.shape]
        values = torch.zeros(shape, dtype=argument.dtype)
        if not values.is_floating_point():
            return values
        # The norm of a matrix decides the degree of its exponential: it is that of a common initialization.
        return values.normal_(0.0, 0.5 / max(shape, default=1), generator=torch.Generator().manual_seed(0))

    with torch_private.no_dispatch():
        real = [small(argument) for argument in args]
        try:
            measured = torch_private.peak_on_cpu(lambda: func(*real))
        except RuntimeError:  # such as for a matrix that is not positive definite
            return 0.0
    if measured is None:
        return 0.0
    result, peak = measured
    inside = peak - sum(tensor.untyped_storage().nbytes() for tensor in iterate_tensors(result))
    return inside / max(sum(tensor.nbytes for tensor in iterate_tensors(real)), 1)


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(getattr(func, "overloadpacket", None), "__name__", "")


def _is_loss(func: Callable[..., Any]) -> bool:
    name = _name_of(func)
    return name.endswith("_loss") or name == "binary_cross_entropy"


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (MAX_FLOATS if tensor.is_floating_point() else MAX_INTEGERS)


def _like(value: object, args: Sequence[Any]) -> Any:
    """Returns fake tensors with the shapes and dtypes of real ones."""
    if isinstance(value, (list, tuple)):
        return tuple(_like(element, args) for element in value)
    return args[0].new_empty(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


def _assumed(func: Any, tensor: Tensor, arguments: Mapping[str, Any] | None = None) -> Tensor | None:
    """Returns assumed values for the result of an operator on unknown values, or None if it needs none.

    Indices chosen by values are spread evenly, like those of experts in training. A scalar is one. A
    condition is false, except for `all`, because models raise errors if other conditions are true.
    """
    if (
        func in INDEX_OPERATORS
        and tensor.dtype == torch.long
        and arguments
        and tensor.numel() <= MAX_INTEGERS
    ):
        source = next(iterate_tensors(arguments))
        dim = arguments.get("dim")
        extent = source.numel() if dim is None else source.shape[dim] if source.ndim else 1
        with torch_private.no_dispatch():
            return torch.arange(tensor.numel()).remainder_(max(extent, 1)).view(tensor.shape)
    if tensor.ndim or tensor.is_complex():
        return None
    with torch_private.no_dispatch():
        is_true = tensor.dtype != torch.bool or func.overloadpacket is aten.all
        return torch.ones((), dtype=tensor.dtype) if is_true else torch.zeros((), dtype=tensor.dtype)
