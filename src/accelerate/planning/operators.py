"""Operators that fake tensors refuse, and buffers that they do not count.

A trace has shapes and no values. `Operators` is a dispatch mode above the tracker and the fake tensors: it
keeps the values of small tensors that no weight influences, assumes balanced ones for the rest, and allocates
the buffers of kernels while they would run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from accelerate import torch_private
from accelerate.planning.kernels import Kernels
from accelerate.torch_private import operator

aten: Any = torch.ops.aten
NUMBER = operator("_local_scalar_dense.default")
"""Operator that reads a number from a tensor."""
MOST_INTEGERS, MOST_FLOATS = 2**22, 2**16
"""Elements of the largest tensors whose values are kept."""
MOST_BYTES = 2**28
"""Bytes of arguments that an operator of values is run with."""


def _nonzero(mask: Tensor) -> Tensor:
    return mask.new_empty((mask.numel(), mask.ndim), dtype=torch.long)


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


LARGEST: Mapping[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    operator("_unique2.default"): _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim.default: _unique_along,
    aten.masked_select.default: _masked_select,
    aten.bincount.default: _bincount,
    aten.equal.default: lambda one, other: one is other,
}
"""Operator whose result has a size that depends on values -> the largest result."""


def _grouped_mm(
    first: Tensor, second: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Each group is multiplied by a matrix of its own; torch's rule for shapes refuses float32."""
    if first.ndim == 2:
        groups = () if second.ndim == 3 else (len(offs),)  # type: ignore[arg-type]
    else:
        groups = (first.shape[0],) if second.ndim == 3 else ()
    shape = (*groups, first.shape[-2], second.shape[-1])
    return first.new_empty(shape, dtype=out_dtype or first.dtype)


SHAPES: Mapping[Any, Callable[..., Any]] = {operator("_grouped_mm.default"): _grouped_mm}
"""Operator that runs with arguments for which torch has no rule for shapes -> its result."""

CHOICES = {
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
"""Operators that choose positions by values; tokens are routed to experts by them."""


CONVERSIONS = {Tensor.__format__, Tensor.numpy, Tensor.__array__}
"""Functions of a tensor that need values and are no operators."""


class Operators(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Runs the operators of a trace, those included that need values.

    Args:
        kernels: tells the bytes of buffers inside of operators.
    """

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.values: Any = WeakIdKeyDictionary()
        self.current: Any = None  # the operator that runs

    def learn(self, fake: Tensor, value: Tensor) -> None:
        """Keep the values of a tensor that the trace begins with; those of weights are of no use."""
        if value.is_meta or value.is_floating_point() or value.numel() > MOST_INTEGERS:
            return
        with torch_private.no_dispatch():
            self.values[fake] = value.detach().to("cpu", copy=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.current = func
        if func is NUMBER:
            return self._number(args[0])
        if func is aten.index.Tensor:
            args = (args[0], self._positions(args[1]))
        known = self._is_known(func, args, kwargs)
        if func in LARGEST:
            value = self._compute(func, args, kwargs) if known else None
            if value is None:
                result = LARGEST[func](*args, **kwargs)
            else:
                result = _like(value, args)
        else:
            result = self._run(func, args, kwargs)
            known = known and all(_is_small(tensor) for tensor in _tensors((result,)))
            value = self._compute(func, args, kwargs) if known else None
        self._keep(func, args, kwargs, result, value)
        return self.kernels.count(func, args, kwargs, result)

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on fake tensors; where it needs values, on real ones: ones where none are known."""
        fakes = torch_private.fake_tensors
        try:
            return SHAPES.get(func, func)(*args, **kwargs)
        except (fakes.DynamicOutputShapeException, fakes.DataDependentOutputException):
            unknown = [each for each in _tensors((*args, *kwargs.values())) if self._value(each) is None]
            if sum(tensor.nbytes for tensor in unknown) > MOST_BYTES:
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

    def _number(self, tensor: Tensor) -> bool | int | float:
        value = self.read(tensor)
        with torch_private.no_dispatch():
            number: bool | int | float = value.item()
        return number

    def read(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor on the CPU; ones where none are known."""
        value = self._value(tensor)
        if value is None:
            value = _assumed(NUMBER, tensor)
        if value is None and tensor.nbytes > MOST_BYTES:
            raise torch_private.fake_tensors.DataDependentOutputException(NUMBER)
        with torch_private.no_dispatch():
            return torch.ones(tensor.shape, dtype=tensor.dtype) if value is None else value

    def _positions(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return indices with the positions that masks among them select."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                with self:
                    found += index.nonzero().unbind(1)
            else:
                found.append(index)
        return found

    def _value(self, tensor: Tensor) -> Tensor | None:
        if isinstance(tensor, torch_private.fake_tensors.FakeTensor):
            value: Tensor | None = self.values.get(tensor)
            return value
        return tensor if tensor.is_cpu and _is_small(tensor) else None  # a constant

    def _is_known(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operator has one result, which is that of known values."""
        if any(self._value(tensor) is None for tensor in _tensors((*args, *kwargs.values()))):
            return False
        return torch.Tag.nondeterministic_seeded not in func.tags

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on known values; None if they do not fit."""
        if torch_private.mutated_by(func):
            tensors = _tensors((*args, *kwargs.values()))
            if not all(isinstance(tensor, torch_private.fake_tensors.FakeTensor) for tensor in tensors):
                return None  # constants of the model stay as they are
        real = [self._on_cpu(each) for each in args]
        options = {name: self._on_cpu(each) for name, each in kwargs.items()}
        with torch_private.no_dispatch():
            try:
                result = func(*real, **options)
            except (
                RuntimeError,
                IndexError,
                ValueError,
            ):  # of assumed values: then these are unknown as well
                return None
            if func.overloadpacket.__name__.startswith(("empty", "new_empty")):
                result.zero_()
        return result

    def _on_cpu(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._value(argument)
        if isinstance(argument, (list, tuple)):
            return [self._on_cpu(each) for each in argument]
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    def _keep(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, value: Any
    ) -> None:
        """Keep the values of the results of an operator, and forget those that it overwrites."""
        if value is None and (names := torch_private.mutated_by(func)):
            given = torch_private.arguments_of(func, args, kwargs)
            for tensor in _tensors([given[name] for name in names if name in given]):
                self._forget(tensor)
        results = list(_tensors((result,)))
        values: list[Any] = list(_tensors((value,))) if value is not None else [None] * len(results)
        for tensor, each in zip(results, values, strict=True):
            if each is None and self._value(tensor) is None:
                each = _assumed(func, tensor, torch_private.arguments_of(func, args, kwargs))
            if each is not None:
                self.values[tensor] = each

    def _forget(self, changed: Tensor) -> None:
        if self._value(changed) is None:
            return
        storage = changed.untyped_storage()
        for tensor in list(self.values):
            if tensor.untyped_storage() is storage or tensor is changed:
                del self.values[tensor]


class Conversions(TorchFunctionMode):
    """Gives values to functions that convert tensors to objects of Python and numpy."""

    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self.operators = operators

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in CONVERSIONS or (func is Tensor.__format__ and args[0].ndim):
            return func(*args, **(kwargs or {}))
        value = self.operators.read(args[0].detach())
        with torch_private.no_dispatch():
            return func(value, *args[1:], **(kwargs or {}))


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (MOST_FLOATS if tensor.is_floating_point() else MOST_INTEGERS)


def _like(value: Any, args: Sequence[Any]) -> Any:
    """Return fake tensors of the sizes of real ones."""
    if isinstance(value, (list, tuple)):
        return tuple(_like(each, args) for each in value)
    return args[0].new_empty(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


def _assumed(func: Any, tensor: Tensor, given: Mapping[str, Any] | None = None) -> Tensor | None:
    """Return values for the result of an operator on unknown ones; None for a tensor that needs none.

    Positions that an operator chooses are spread evenly, as those of experts in training are. A single number
    is one; a condition is false, but for those that all elements meet: models raise errors for the others.
    """
    if func in CHOICES and tensor.dtype == torch.long and given and tensor.numel() <= MOST_INTEGERS:
        source = next(_tensors(given.values()))
        dim = given.get("dim")
        extent = source.numel() if dim is None else source.shape[dim] if source.ndim else 1
        with torch_private.no_dispatch():
            return torch.arange(tensor.numel()).remainder_(max(extent, 1)).view(tensor.shape)
    if tensor.ndim or tensor.is_complex():
        return None
    with torch_private.no_dispatch():
        is_true = tensor.dtype != torch.bool or func.overloadpacket is aten.all
        return torch.ones((), dtype=tensor.dtype) if is_true else torch.zeros((), dtype=tensor.dtype)
