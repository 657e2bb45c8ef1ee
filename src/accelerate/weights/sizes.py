"""How many bytes a number format, a tensor, a module or its largest layer takes."""

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
"""A module, or a single tensor, and its dotted name in the model."""

BITS_PER_BYTE = 8
PACKED_BYTES: Mapping[CustomDtype, float] = {
    CustomDtype.FP8: 1,
    CustomDtype.INT4: 0.5,
    CustomDtype.INT2: 0.25,
}


def dtype_byte_size(dtype: Dtype) -> float:
    """Return how many bytes the bits of one number take: an `int`, or a part of one.

    A bool counts as one bit, and formats that are packed as their bits. `memory_size` counts what a bool of
    torch takes in memory.

    Args:
        dtype: one of torch, also by its name, or a `CustomDtype`.

    Raises:
        ConfigurationError: there is none of that name.
    """
    size = memory_size(dtype)
    is_bool = not isinstance(dtype, CustomDtype) and read_dtype(dtype) == torch.bool
    return size / BITS_PER_BYTE if is_bool else size


def memory_size(dtype: Dtype) -> float:
    """Return how many bytes one number takes in memory: an `int`, or a part of one for packed formats."""
    return PACKED_BYTES[dtype] if isinstance(dtype, CustomDtype) else read_dtype(dtype).itemsize


def tensor_bytes(
    name: str,
    tensor: Tensor,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    size_of: Callable[[Dtype], float] = memory_size,
) -> float:
    """Return how many bytes a tensor takes once a model is converted.

    With `dtype` floating-point tensors that take less as they are stay so, and integers stay always; the
    dtypes in `special_dtypes`, by the names of tensors, come before it. `size_of` gives bytes by dtype.
    """
    own = size_of(tensor.dtype)
    if special_dtypes is not None and name in special_dtypes:
        return tensor.numel() * size_of(special_dtypes[name])
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.numel() * own
    return tensor.numel() * min(size_of(dtype), own)


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> defaultdict[str, float]:
    """Return the bytes of each tensor and of each module, by name; `""` is the whole model.

    A tensor that several modules share counts once, under its first name. Bytes are those of
    `dtype_byte_size`: a bool counts as one bit.

    Args:
        model: the module; it may be on the meta device.
        dtype: it will be converted to; see `tensor_bytes`.
        special_dtypes: those of single tensors, by name.
        buffers_only: whether parameters are left out.
    """
    sizes: defaultdict[str, float] = defaultdict(int)
    parameters = [] if buffers_only else list(model.named_parameters())
    for name, tensor in (*parameters, *model.named_buffers()):
        taken = tensor_bytes(name, tensor, dtype, special_dtypes, dtype_byte_size)
        for around in ("", *accumulate(name.split("."), "{}.{}".format)):
            sizes[around] += taken
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> float:
    """Return the bytes of all buffers of a model.

    Args:
        model: the module.
        dtype: it will be converted to.
        special_dtypes: those of single tensors, by name.
    """
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_max_layer_size(
    modules: Iterable[NamedModule],
    module_sizes: Mapping[str, float],
    no_split_module_classes: Collection[str],
) -> tuple[float, list[str]]:
    """Return the bytes of the largest layer among some modules, and the names of all layers of that size.

    A layer is a module that is not split: one of the named classes, or one without inner modules.

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
    """Return the bytes of a model, and those of its largest layer with the names of all that are as large.

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
    """Return what a module takes with all those that must be on its device, as they share parameters with it.

    Args:
        tied_params: names, in other modules, of the parameters that it shares.
        module_size: bytes of the module alone.
        module_sizes: as `compute_module_sizes` returns them: a shared parameter counts once.
        modules_to_treat: where the others are looked for.

    Returns:
        Bytes of all together, and names and modules of the others, each once.

    Raises:
        ConfigurationError: a parameter is in none of the modules.
    """
    owners = {name: _owner_of(name, modules_to_treat) for name in tied_params}
    joined = dict(owners.values())
    return module_size + sum(module_sizes[name] for name in joined), list(joined), list(joined.values())


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
