"""Tensor without values in place of an offloaded weight, which reads the values where they are used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, SupportsIndex, TypeAlias, cast

import torch
from torch import Tensor, nn

from accelerate.base import StateError, as_builtin
from accelerate.nested import recursively_apply

Function: TypeAlias = Callable[..., Any]

_PROPERTIES_WITH_VALUES = frozenset(("T", "mT", "H", "mH", "real", "imag"))
_WITHOUT_VALUES = frozenset(
    (
        *("dim", "ndimension", "size", "stride", "storage_offset", "numel", "nelement", "element_size"),
        *("is_floating_point", "is_complex", "is_contiguous", "is_signed", "is_conj", "is_neg", "is_pinned"),
        *("is_inference", "is_shared", "is_same_size", "get_device", "has_names", "__len__", "__hash__"),
        *("__repr__", "__format__", "data_ptr", "untyped_storage", "backward", "retain_grad"),
        *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "as_subclass"),
        *("_has_compatible_shallow_copy_type", "__setstate__", "is_set_to"),
    )
)
"""Methods that need no values, or change none."""
_CONVERSIONS = frozenset(
    ("detach", "to", "type", "half", "float", "double", "bfloat16", "cpu", "cuda", "xpu", "npu", "hpu", "mps")
)
"""Methods whose result is offloaded, too."""
_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
_ASSIGNMENTS = frozenset(("__setitem__", *(f"__i{name}__" for name in (*_OPERATORS, "lshift", "rshift"))))
"""Methods of operators that change a tensor in place."""


class UnloadedTensor(Tensor):
    """Meta tensor in place of an offloaded weight between two forwards of its module.

    A forward reads its own weights after its hook has loaded them. Code outside of this forward, such as a
    module that reads the weight of another module, reads this tensor. A function of torch that receives it
    therefore receives the values instead, because kernels of torch may return uninitialized memory for a
    meta tensor. Shapes and dtypes are read without values, and a change in place is refused.
    """

    __slots__ = ("_is_detached", "_is_weight", "_read")

    _is_weight: bool  # whether it is a parameter of a module
    _is_detached: bool  # whether it is an entry of a state dict, and not a tensor of a module
    _read: Callable[[], Tensor] | None

    @property
    def _is_param(self) -> bool:  # read by isinstance(..., nn.Parameter)
        return getattr(self, "_is_weight", False)

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self._is_weight = value

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            if getattr(getattr(func, "__self__", None), "__name__", "") not in _PROPERTIES_WITH_VALUES:
                result = _as_tensor(func, args, kwargs)
                return _linked(result, args[0]) if isinstance(result, UnloadedTensor) else result
        elif name in _WITHOUT_VALUES:
            return _as_tensor(func, args, kwargs)
        elif name in _CONVERSIONS and isinstance(args[0], UnloadedTensor):
            return _convert(func, args, kwargs)
        _refuse_change(name, args, kwargs)
        return func(*_with_values(args), **_with_values(kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> UnloadedTensor:
        if self._has_own_values:
            return copy.deepcopy(values_of(self), memo)  # type: ignore[return-value]
        copied = as_unloaded(_as_meta(self))  # the copy of its slot sets the values
        memo[id(self)] = copied
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self._has_own_values:
            return cast("Any", values_of(self)).__reduce_ex__(protocol)
        return _rebuild, (_as_meta(self), vars(self).copy())

    @property
    def _has_own_values(self) -> bool:
        """Property of an entry of a state dict, whose copies and files have the values."""
        return getattr(self, "_is_detached", False) and getattr(self, "_read", None) is not None


def is_unloaded(tensor: object) -> bool:
    """Returns whether a tensor is in place of an offloaded weight."""
    return isinstance(tensor, UnloadedTensor)


def as_unloaded(meta: Tensor) -> UnloadedTensor:
    """Returns a tensor without values that has the attributes of a meta tensor, a parameter or a buffer."""
    is_parameter = isinstance(meta, nn.Parameter)
    tensor = meta.detach().as_subclass(UnloadedTensor)
    tensor.requires_grad_(meta.requires_grad)
    vars(tensor).update(vars(meta))
    tensor._is_weight, tensor._is_detached, tensor._read = is_parameter, False, None
    return tensor


def values_of(tensor: UnloadedTensor) -> Tensor:
    """Returns the values of a tensor, as a leaf of the graph.

    Raises:
        StateError: A copy of the tensor without its module has no values.
    """
    read = getattr(tensor, "_read", None)
    if read is None:
        raise as_builtin(
            StateError(
                f"A copy of an offloaded weight of shape {tuple(tensor.shape)} has no values. Copy the "
                "module, or copy the weight inside of align_module_device(module)."
            ),
            NotImplementedError,
        )
    values: Tensor = read().detach()
    return values.requires_grad_() if tensor.requires_grad else values


def _rebuild(meta: Tensor, attributes: Mapping[str, Any]) -> UnloadedTensor:
    tensor = as_unloaded(meta)
    vars(tensor).update(attributes)
    return tensor


def _as_meta(tensor: UnloadedTensor) -> Tensor:
    meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, tensor.requires_grad) if tensor._is_param else meta


def _linked(result: UnloadedTensor, source: UnloadedTensor) -> UnloadedTensor:
    read = getattr(source, "_read", None)
    if result is not source:
        is_converted = read is not None and result.dtype != source.dtype
        result._is_weight, result._is_detached = False, True
        result._read = partial(_read_as, source, result.dtype) if is_converted else read
    return result


def _read_as(source: UnloadedTensor, dtype: torch.dtype) -> Tensor:
    return values_of(source).detach().to(dtype)


def _as_tensor(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function of torch with meta tensors, and returns its tensors in the same class."""
    function: Any = super(UnloadedTensor, UnloadedTensor).__torch_function__
    return function(func, (UnloadedTensor,), args, kwargs)


def _convert(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a weight in another dtype without values, or an entry of a state dict on another device."""
    source: UnloadedTensor = args[0]
    try:
        result = _as_tensor(func, args, kwargs)
    except NotImplementedError:  # a copy to a device that has values
        if not source._has_own_values:
            raise
        return func(*_with_values(args), **_with_values(kwargs))
    return _linked(result, source) if isinstance(result, UnloadedTensor) else result


def _refuse_change(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises an error for a function that changes an offloaded weight in place."""
    changed = [kwargs.get("out")]
    is_inplace = name.endswith("_") and not name.endswith("__")
    if is_inplace or name in _ASSIGNMENTS:
        changed += [args[0] if args else next(iter(kwargs.values()), None)]
    tensors = [item for each in changed for item in (each if isinstance(each, (list, tuple)) else [each])]
    weight = next((tensor for tensor in tensors if isinstance(tensor, UnloadedTensor)), None)
    if weight is not None:
        raise as_builtin(
            StateError(
                f"{name} changes an offloaded weight of shape {tuple(weight.shape)} in place, and the change "
                "would be lost. Change the weight before the model is offloaded."
            ),
            NotImplementedError,
        )


def _with_values(arguments: object) -> Any:
    return recursively_apply(values_of, arguments, test_type=lambda item: isinstance(item, UnloadedTensor))
