"""Sizes in bytes of dtypes, tensors, modules and the largest layer of a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from accelerate.base import CustomDtype, listed, wrong_value
from accelerate.weights.placement import read_dtype

Dtype = str | torch.dtype | CustomDtype
NamedModule = tuple[str, nn.Module | Tensor]
"""Dotted name in the model of a module or tensor, and the module or tensor."""

BITS_PER_BYTE = 8
PACKED_BYTES: Mapping[CustomDtype, float] = {
    CustomDtype.FP8: 1,
    CustomDtype.INT4: 0.5,
    CustomDtype.INT2: 0.25,
}


def dtype_byte_size(dtype: Dtype) -> float:
    """Returns the bytes that the bits of one number take, as an `int`, or as a fraction.

    A bool counts as one bit, and packed formats as their bits. `memory_size` returns the size of a bool in
    memory.

    Args:
        dtype: a torch dtype or its name, or a `CustomDtype`.

    Raises:
        ConfigurationError: there is no such dtype.
    """
    size = memory_size(dtype)
    is_bool = not isinstance(dtype, CustomDtype) and read_dtype(dtype) == torch.bool
    return size / BITS_PER_BYTE if is_bool else size


def memory_size(dtype: Dtype) -> float:
    """Returns the bytes that one number takes in memory, as an `int`, or as a fraction for packed formats."""
    return PACKED_BYTES[dtype] if isinstance(dtype, CustomDtype) else read_dtype(dtype).itemsize


def tensor_bytes(
    name: str,
    tensor: Tensor,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    size_of: Callable[[Dtype], float] = memory_size,
) -> float:
    """Returns the bytes that a tensor takes after a model is converted.

    With `dtype`, floating-point tensors with a smaller dtype, integers and complex tensors keep theirs.
    `special_dtypes`, by the names of tensors, take precedence. `size_of` returns the bytes of a dtype.
    """
    current = size_of(tensor.dtype)
    if special_dtypes is not None and name in special_dtypes:
        return tensor.numel() * size_of(special_dtypes[name])
    if dtype is None or not tensor.is_floating_point():
        return tensor.numel() * current
    return tensor.numel() * min(size_of(dtype), current)


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> defaultdict[str, float]:
    """Returns the bytes of each tensor and module by name, where `""` is the whole model.

    A shared tensor counts once, under its first name. Sizes are those of `dtype_byte_size`, where a bool
    counts as one bit.

    Args:
        model: the module; it may be on the meta device.
        dtype: dtype to which it will be converted (`tensor_bytes`).
        special_dtypes: dtypes of single tensors by name.
        buffers_only: whether to skip parameters.
    """
    sizes: defaultdict[str, float] = defaultdict(int)
    parameters = [] if buffers_only else list(model.named_parameters())
    for name, tensor in (*parameters, *model.named_buffers()):
        num_bytes = tensor_bytes(name, tensor, dtype, special_dtypes, dtype_byte_size)
        for prefix in ("", *accumulate(name.split("."), "{}.{}".format)):
            sizes[prefix] += num_bytes
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> float:
    """Returns the bytes of all buffers of a model.

    Args:
        model: the module.
        dtype: dtype to which it will be converted.
        special_dtypes: dtypes of single tensors by name.
    """
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_max_layer_size(
    modules: Iterable[NamedModule],
    module_sizes: Mapping[str, float],
    no_split_module_classes: Collection[str],
) -> tuple[float, list[str]]:
    """Returns the bytes of the largest layer of some modules, and the names of all layers of that size.

    A layer is a module that is not split, because its class is one of the named, or it has no submodules.

    Args:
        modules: modules, or single tensors, by name.
        module_sizes: as `compute_module_sizes` returns them.
        no_split_module_classes: names of classes that are never split.
    """
    sizes = {name: module_sizes.get(name, 0) for name in _layers(modules, no_split_module_classes)}
    largest = max(sizes.values(), default=0)
    return largest, [name for name, size in sizes.items() if size == largest and size]


def _layers(modules: Iterable[NamedModule], whole: Collection[str]) -> Iterable[str]:
    for name, module in modules:
        inner = [] if isinstance(module, Tensor) else list(module.named_children())
        if not inner or type(module).__name__ in whole:
            yield name
        else:
            yield from _layers([(f"{name}.{child}", layer) for child, layer in inner], whole)


def calculate_maximum_sizes(model: nn.Module) -> tuple[float, tuple[float, list[str]]]:
    """Returns the bytes of a model, and the bytes and names of its largest layers.

    Args:
        model: the module; classes in its `_no_split_modules` are layers.
    """
    sizes = compute_module_sizes(model)
    whole = getattr(model, "_no_split_modules", None) or ()
    return sizes[""], get_max_layer_size(model.named_children(), sizes, whole)


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: float,
    module_sizes: Mapping[str, float],
    modules_to_treat: Sequence[NamedModule],
) -> tuple[float, list[str], list[nn.Module | Tensor]]:
    """Returns the bytes of a module and of all modules with tied parameters, which need the same device.

    Args:
        tied_params: names, in other modules, of the parameters that are tied to those of the module.
        module_size: bytes of the module alone.
        module_sizes: as `compute_module_sizes` returns them, where a shared parameter counts once.
        modules_to_treat: candidates for the other modules.

    Returns:
        Total bytes, and the names and modules of the others without duplicates.

    Raises:
        ConfigurationError: a parameter is in none of the modules.
    """
    owners = {name: _owner_of(name, modules_to_treat) for name in tied_params}
    others = dict(owners.values())
    return module_size + sum(module_sizes[name] for name in others), list(others), list(others.values())


def _owner_of(tensor: str, modules: Sequence[NamedModule]) -> NamedModule:
    for name, module in modules:
        if tensor == name or tensor.startswith(f"{name}."):
            return name, module
    raise wrong_value(
        "tied_params",
        tensor,
        f"it is in none of {listed([name for name, _ in modules])}",
        "pass the module that has it in modules_to_treat",
    )
