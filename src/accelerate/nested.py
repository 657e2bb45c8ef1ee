"""Functions that apply to tensors in nested lists, tuples, dictionaries and named tuples.

These functions do not communicate. A structure is rebuilt in its own types, and leaves other than tensors are
not changed.
"""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, TypeVar

import torch

from accelerate.base import as_builtin, wrong_value

T = TypeVar("T")

_PLAIN = (list, tuple, dict)
_DEFINED_IN_PYTHON = 1 << 9
"""Flag of a class that is not one of C, such as `torch.Size`, which has to be built by its constructor."""
_SCALARS = frozenset((type(None), bool, int, float, str, bytes))

# Codes of dtypes that are sent to other ranks. The numbers are public.
_FLOATS = (torch.float, torch.double, torch.half, torch.bfloat16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
TENSOR_INT_TO_DTYPE: dict[int, torch.dtype] = dict(enumerate((*_FLOATS, *_INTEGERS), 1))
TENSOR_TYPE_TO_INT: dict[torch.dtype, int] = {dtype: code for code, dtype in TENSOR_INT_TO_DTYPE.items()}


@dataclass
class TensorInformation:
    """Shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: object) -> bool:
    """Returns whether an object is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_torch_xpu_tensor(tensor: object) -> bool:
    """Returns whether an object is a tensor on an Intel XPU."""
    return isinstance(tensor, torch.Tensor) and tensor.is_xpu


def is_tensor_information(tensor_info: object) -> bool:
    """Returns whether an object is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: object) -> bool:
    """Returns whether an object is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: T, generator: Iterable[Any]) -> T:
    """Converts items to the type of a list, tuple or named tuple.

    Subclasses are built without their constructor, which may take other arguments, and keep their attributes.

    Args:
        obj: An object of the target type.
        generator: The items.
    """
    kind: Any = type(obj)
    rebuilt: T
    if kind in _PLAIN or not isinstance(obj, (list, tuple)):
        rebuilt = kind(generator)
    elif isinstance(obj, list):
        rebuilt = copy(obj)
        rebuilt[:] = generator
    else:
        items = tuple(generator)
        is_own = kind.__flags__ & _DEFINED_IN_PYTHON
        if is_namedtuple(obj) and len(items) != len(obj):
            raise TypeError(f"{kind.__name__} takes {len(obj)} items, but there are {len(items)}.")
        rebuilt = tuple.__new__(kind, items) if is_own else kind(items)
        if hasattr(obj, "__dict__"):
            vars(rebuilt).update(vars(obj))
    return rebuilt


def honor_mapping(obj: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Converts items to the type of a mapping that has the same keys.

    A mapping that can be changed is copied without its constructor, which may take other arguments, and keeps
    its attributes.

    Raises:
        TypeError: The type of the mapping cannot be built from the items.
    """
    kind: Any = type(obj)
    if kind in (dict, OrderedDict):
        return kind(items)
    if items.keys() == _arguments_of(kind):
        return kind(**items)
    if isinstance(obj, MutableMapping):
        return _copy_with(obj, items)
    try:
        rebuilt = kind(items)
    except TypeError as error:
        rebuilt, reason = {}, f": {error}"
    else:
        reason = ""
    if rebuilt.keys() != items.keys():
        raise TypeError(
            f"A {kind.__name__} cannot be built from a dictionary{reason}. Let its constructor take one, "
            "derive it from dict, or convert it to a dict."
        )
    return rebuilt


def _arguments_of(kind: object) -> set[str]:
    """Returns the names of the constructor's arguments of a dataclass, and no names for another class."""
    return {field.name for field in fields(kind) if field.init} if is_dataclass(kind) else set()


def _copy_with(obj: MutableMapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Returns a copy of a mapping with other values, also in attributes that repeat them."""
    if isinstance(obj, defaultdict):  # its copy calls the constructor
        rebuilt: Any = defaultdict.__new__(type(obj))
        rebuilt.default_factory = obj.default_factory
        getattr(rebuilt, "__dict__", {}).update(getattr(obj, "__dict__", {}))
    else:
        rebuilt = copy(obj)
    for key, value in items.items():
        rebuilt[key] = value
    attributes = getattr(rebuilt, "__dict__", {})
    for name, value in attributes.items():
        if name in items and value is obj[name]:
            attributes[name] = items[name]
    return rebuilt


def recursively_apply(
    func: Callable[..., Any],
    data: object,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Applies a function to the leaves of a structure.

    Args:
        func: Called as `func(leaf, *args, **kwargs)`.
        data: A leaf, or nested lists, tuples, named tuples and mappings of leaves.
        *args: Further arguments of `func`.
        test_type: Predicate that selects leaves.
        error_on_other_type: Raise an error for any other leaf, instead of keeping it.
        **kwargs: Further keyword arguments of `func`.

    Returns:
        The same structure with the results instead of the leaves.

    Raises:
        TypeError: If there is another leaf and `error_on_other_type`.
    """
    if test_type(data):
        return func(data, *args, **kwargs)
    apply: Callable[..., Any] = partial(
        recursively_apply, func, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
    )
    if isinstance(data, (tuple, list)):
        return honor_type(data, (apply(item, *args) for item in data))
    if isinstance(data, Mapping):
        return honor_mapping(data, {key: apply(value, *args) for key, value in data.items()})
    if error_on_other_type:
        raise TypeError(
            f"`{getattr(func, '__name__', func)}` takes tensors, and lists, tuples and dictionaries of them, "
            f"but was passed a {type(data).__name__}. Convert it to a tensor or leave it out."
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
    """Moves all tensors of a structure to a device, and other objects with a method `to`.

    Args:
        tensor: A tensor, an object with a method `to`, or lists, tuples and mappings of them.
        device: The target device.
        non_blocking: Do not wait for copies from pinned memory.
        skip_keys: Keys of mappings whose values are not moved.

    Returns:
        The same structure. Tensors that are already on the device are the same objects.
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


def get_data_structure(data: object) -> Any:
    """Returns the structure with a `TensorInformation` for each tensor."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: object) -> Any:
    """Returns the structure with the shape of each tensor as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: object) -> Any:
    """Returns the structure with an empty CPU tensor for each `TensorInformation`."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def iterate_tensors(data: object) -> Iterator[torch.Tensor]:
    """Yields the tensors of a structure in order."""
    if isinstance(data, torch.Tensor):
        yield data
        return
    items = data if isinstance(data, (tuple, list)) else data.values() if isinstance(data, Mapping) else ()
    for item in items:  # a generator for each leaf would take most of the time
        if isinstance(item, torch.Tensor):
            yield item
        elif type(item) not in _SCALARS:
            yield from iterate_tensors(item)


def contains_tensor(data: object) -> bool:
    """Returns whether a structure contains a tensor."""
    return next(iterate_tensors(data), None) is not None


def find_batch_size(data: object) -> int:
    """Returns the size of the first dimension of the first tensor that has one.

    Raises:
        ConfigurationError: If the structure is empty.
        TypeError: If it has no such tensor.
    """
    for tensor in iterate_tensors(data):
        if tensor.ndim:
            return int(tensor.size(0))
    if isinstance(data, (tuple, list, Mapping)) and not data:
        raise wrong_value("data", data, "empty, so it has no batch size", "give at least one tensor")
    error = TypeError(
        f"A batch size is the first dimension of a tensor, but this {type(data).__name__} has none. "
        "Give tensors, or lists, tuples and dictionaries of them."
    )
    raise as_builtin(error, IndexError) if contains_tensor(data) else error


def ignorant_find_batch_size(data: Any) -> int | None:
    """Returns the batch size of a structure, or None when it has none."""
    # The usual structures are searched without a generator, because this is called for each batch.
    item = data[0] if type(data) is list and data else data
    if (type(item) is torch.Tensor or (item := _first_tensor(item)) is not None) and item.ndim:
        return item.size(0)  # nested tensors have no shape
    return next((int(tensor.size(0)) for tensor in iterate_tensors(data) if tensor.ndim), None)


def _first_tensor(data: Any) -> torch.Tensor | None:
    """Returns the first leaf of plain lists, tuples and dictionaries if it is a plain tensor."""
    while type(data) in _PLAIN and data:
        data = next(iter(data.values())) if type(data) is dict else data[0]
    return data if type(data) is torch.Tensor else None


def listify(data: object) -> Any:
    """Returns the structure with each tensor as nested lists of Python numbers."""
    return recursively_apply(_as_list, data)


def _as_list(tensor: torch.Tensor) -> Any:
    if tensor.is_nested:
        return [part.tolist() for part in tensor.unbind()]
    if tensor.is_quantized:
        return tensor.dequantize().tolist()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).tolist()


def slice_tensors(
    data: T, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> T:
    """Returns the structure with a slice of the first dimension of each tensor.

    Args:
        data: Tensors, or lists, tuples and mappings of them; a tensor without dimensions is not sliced.
        tensor_slice: The slice.
        process_index: Ignored, for compatibility.
        num_processes: Ignored, for compatibility.
    """
    part: T = recursively_apply(_slice_rows, data, tensor_slice)
    return part


def _slice_rows(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    if tensor.is_nested:
        return torch.nested.as_nested_tensor(list(tensor.unbind()[rows]), layout=tensor.layout)
    if tensor.layout is torch.strided:
        return tensor[rows] if tensor.ndim else tensor
    indices = torch.arange(tensor.size(0), device=tensor.device)[rows]
    return _as_coo(tensor).index_select(0, indices).to_sparse(layout=tensor.layout)


def _as_coo(tensor: torch.Tensor) -> torch.Tensor:
    coo: torch.Tensor = tensor.to_sparse_coo()  # type: ignore[no-untyped-call]
    return coo


def _is_nested(item: object) -> bool:
    return isinstance(item, (torch.Tensor, tuple, list, Mapping))


def concatenate(data: Sequence[T], dim: int = 0) -> T:
    """Concatenates the tensors of structures of the same form.

    Args:
        data: A list or tuple of structures. Lists of plain objects in them, such as strings, become one list.
            A leaf that is the only one to join, of any type, is returned as it is.
        dim: Dimension along which tensors are concatenated.

    Raises:
        ConfigurationError: There is no structure. Also an `IndexError`.
        TypeError: If a leaf cannot be concatenated.
    """
    if not data:
        reason, fix = "there is nothing to concatenate", "Pass at least one structure"
        raise wrong_value("data", data, reason, fix, IndexError)
    joined: T = _join(data, dim)
    return joined


def _join(data: Any, dim: int) -> Any:
    first = data[0]
    if isinstance(first, torch.Tensor):
        return _cat(data, dim)
    if isinstance(first, (tuple, list)):
        if not is_namedtuple(first) and not any(map(_is_nested, first)):
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


def _cat(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    layout = tensors[0].layout
    if layout is torch.jagged and dim == 0:
        return torch.nested.as_nested_tensor(
            [row for each in tensors for row in each.unbind()], layout=layout
        )
    if layout is torch.sparse_csr:
        return torch.cat([_as_coo(tensor) for tensor in tensors], dim=dim).to_sparse_csr()
    return torch.cat(tuple(tensors), dim=dim)


def find_device(data: object) -> torch.device | None:
    """Returns the device of the first tensor of a structure, or None without tensors."""
    return next((tensor.device for tensor in iterate_tensors(data)), None)
