"""Apply a function through lists, tuples, dictionaries and named tuples; move, measure, slice, join.

Nothing here talks to another process. A structure is rebuilt in its own types; other leaves than tensors pass
unchanged.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, TypeVar

import torch

from accelerate.base import as_builtin, wrong_value

T = TypeVar("T")

# Codes with which a dtype is sent to processes that do not know it; the numbers are public.
_FLOATS = (torch.float, torch.double, torch.half, torch.bfloat16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
TENSOR_INT_TO_DTYPE: dict[int, torch.dtype] = dict(enumerate((*_FLOATS, *_INTEGERS), 1))
TENSOR_TYPE_TO_INT: dict[torch.dtype, int] = {dtype: code for code, dtype in TENSOR_INT_TO_DTYPE.items()}


@dataclass
class TensorInformation:
    """The outline of a tensor: enough to build an empty one like it."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether an object is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Return whether an object is a tensor on an Intel XPU."""
    return isinstance(tensor, torch.Tensor) and tensor.is_xpu


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether an object is the outline of a tensor."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Return whether an object is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: T, generator: Iterable[Any]) -> T:
    """Return the items in the type of a list, tuple or named tuple.

    Args:
        obj: An object of the wanted type.
        generator: The items.
    """
    kind: Any = type(obj)
    rebuilt: T = kind(*generator) if is_namedtuple(obj) else kind(generator)
    return rebuilt


def honor_mapping(obj: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return the items in the type of a mapping."""
    if isinstance(obj, defaultdict):
        return type(obj)(obj.default_factory, items)
    return type(obj)(items)  # type: ignore[call-arg]  # every mapping in use takes a dict


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to the leaves of a structure.

    Args:
        func: Called as `func(leaf, *args, **kwargs)`.
        data: A leaf, or lists, tuples, named tuples and mappings of them, in any depth.
        *args: Handed on.
        test_type: Which leaves are meant.
        error_on_other_type: Raise on any other leaf, instead of leaving it as it is.
        **kwargs: Handed on.

    Returns:
        The same structure with the results in place of the leaves.

    Raises:
        TypeError: If there is another leaf and `error_on_other_type`.
    """
    if test_type(data):
        return func(data, *args, **kwargs)
    below: Callable[..., Any] = partial(
        recursively_apply, func, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
    )
    if isinstance(data, (tuple, list)):
        return honor_type(data, (below(item, *args) for item in data))
    if isinstance(data, Mapping):
        return honor_mapping(data, {key: below(value, *args) for key, value in data.items()})
    if error_on_other_type:
        raise TypeError(
            f"`{getattr(func, '__name__', func)}` takes tensors, and lists, tuples and dictionaries of them, "
            f"but was given a {type(data).__name__}. Convert it to a tensor or leave it out."
        )
    return data


@cache
def _takes_non_blocking(kind: type) -> bool:
    parameters = inspect.signature(kind.to).parameters  # type: ignore[attr-defined]  # only called where it exists
    return "non_blocking" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def send_to_device(
    tensor: T,
    device: int | str | torch.device,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> T:
    """Move everything in a structure that can be moved to a device.

    Args:
        tensor: A tensor, an object with a method `to`, or lists, tuples and mappings of them.
        device: Where to.
        non_blocking: Do not wait for copies from pinned memory.
        skip_keys: Keys of mappings whose values stay where they are.

    Returns:
        The same structure; what is there already is the same object.
    """
    moved: T = _send(tensor, device, non_blocking, skip_keys)
    return moved


def _send(tensor: Any, device: Any, non_blocking: bool, skip_keys: str | list[str] | None) -> Any:
    if isinstance(tensor, torch.Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    if hasattr(tensor, "to"):
        if _takes_non_blocking(tensor.__class__):
            return tensor.to(device, non_blocking=non_blocking)
        return tensor.to(device)
    if isinstance(tensor, (tuple, list)):
        return honor_type(tensor, (_send(item, device, non_blocking, skip_keys) for item in tensor))
    if isinstance(tensor, Mapping):
        skipped = (skip_keys,) if isinstance(skip_keys, str) else skip_keys or ()
        moved = {
            key: value if key in skipped else _send(value, device, non_blocking, skip_keys)
            for key, value in tensor.items()
        }
        return honor_mapping(tensor, moved)
    return tensor


def get_data_structure(data: Any) -> Any:
    """Return the structure with a `TensorInformation` in place of each tensor."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Return the structure with the shape of each tensor, as a list, in its place."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return the structure with an empty CPU tensor in place of each `TensorInformation`."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def iterate_tensors(data: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a structure, in order."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, (tuple, list)):
        for item in data:
            yield from iterate_tensors(item)
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from iterate_tensors(item)


def contains_tensor(data: Any) -> bool:
    """Return whether a structure holds at least one tensor."""
    return next(iterate_tensors(data), None) is not None


def find_batch_size(data: Any) -> int:
    """Return the length of the first dimension of the first tensor that has one.

    Raises:
        ConfigurationError: If the structure is empty.
        TypeError: If it has no such tensor.
    """
    for tensor in iterate_tensors(data):
        if tensor.ndim:
            return int(tensor.shape[0])
    if isinstance(data, (tuple, list, Mapping)) and not data:
        raise wrong_value("data", data, "empty, so it has no batch size", "give at least one tensor")
    error = TypeError(
        f"A batch size is the first dimension of a tensor, but this {type(data).__name__} has none. "
        "Give tensors, or lists, tuples and dictionaries of them."
    )
    raise as_builtin(error, IndexError) if contains_tensor(data) else error


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the batch size of a structure, or None when it has none."""
    return next((int(tensor.shape[0]) for tensor in iterate_tensors(data) if tensor.ndim), None)


def listify(data: Any) -> Any:
    """Return the structure with each tensor as nested lists of Python numbers."""
    return recursively_apply(lambda tensor: tensor.tolist(), data)


def slice_tensors(
    data: T, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> T:
    """Return the structure with a slice of each tensor's first dimension.

    Args:
        data: Tensors, or lists, tuples and mappings of them; a tensor without dimensions stays as it is.
        tensor_slice: Which part.
        process_index: Part of the interface; the slice alone decides.
        num_processes: Part of the interface; the slice alone decides.
    """
    part: T = recursively_apply(lambda tensor: tensor[tensor_slice] if tensor.ndim else tensor, data)
    return part


def _joins_deeper(item: Any) -> bool:
    return isinstance(item, (torch.Tensor, tuple, list, Mapping))


def concatenate(data: Sequence[T], dim: int = 0) -> T:
    """Join structures of the same form into one, tensor by tensor.

    Args:
        data: A list or tuple of structures. Lists of plain objects in them, such as strings, become one list.
            A leaf that is the only one to join, of any type, is returned as it is.
        dim: The dimension along which tensors are joined.

    Raises:
        TypeError: If a leaf can be joined in neither way.
    """
    joined: T = _join(data, dim)
    return joined


def _join(data: Any, dim: int) -> Any:
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(tuple(data), dim=dim)
    if isinstance(first, (tuple, list)):
        if not is_namedtuple(first) and not any(map(_joins_deeper, first)):
            return honor_type(first, chain.from_iterable(data))
        return honor_type(first, (_join(items, dim) for items in zip(*data, strict=True)))
    if isinstance(first, Mapping):
        return honor_mapping(first, {key: _join([item[key] for item in data], dim) for key in first})
    if len(data) == 1:
        return first
    raise TypeError(
        f"Only tensors and lists can be joined, but this is a {type(first).__name__}. "
        "Convert it to a tensor or a list, or leave it out."
    )


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor of a structure, or None when it has none."""
    return next((tensor.device for tensor in iterate_tensors(data)), None)
