"""Units of a model that are assigned to devices, and the memory limits of the devices."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from types import NoneType
from typing import TypeAlias

from torch import Tensor, nn

from accelerate.base import convert_file_size_to_int, wrong_value
from accelerate.devices import hardware_table
from accelerate.weights import Dtype, all_tensors, find_blocks, tensor_bytes


@dataclass(frozen=True)
class Unit:
    """One or several modules or tensors that are assigned to the same device."""

    names: tuple[str, ...]
    size: float  # bytes of all their tensors that are in no earlier unit
    buffers: float  # bytes of the buffers among them
    # Bytes of the largest block with one of their tensors. A device needs this memory to compute with them
    # when they are offloaded.
    block: float


_Part: TypeAlias = tuple[str, Mapping[str, Tensor]]
"""Name of a module or tensor, and its tensors by name."""


def split_into_units(
    model: nn.Module,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    join_tied: bool = True,
) -> list[Unit]:
    """Returns the units of a model in the order of its modules.

    With `join_tied`, parts with tied parameters form one unit.
    """
    parts = list(_walk(model, "", unsplit_classes(model, no_split_module_classes)))
    blocks = _block_sizes(model, dtype, special_dtypes)
    counted: set[int] = set()
    units = []
    for group in _join_tied(parts) if join_tied else [[part] for part in parts]:
        sizes = []
        for name, tensor in chain.from_iterable(tensors.items() for _, tensors in group):
            if id(tensor) not in counted:
                sizes.append((tensor_bytes(name, tensor, dtype, special_dtypes), tensor))
            counted.add(id(tensor))
        units.append(
            Unit(
                names=tuple(name for name, _ in group),
                size=sum(size for size, _ in sizes),
                buffers=sum(size for size, tensor in sizes if not isinstance(tensor, nn.Parameter)),
                block=max(blocks[name] for _, tensors in group for name in tensors),
            )
        )
    return units


def unsplit_classes(model: nn.Module, names: str | Collection[str] | None) -> frozenset[str]:
    """Returns the names of classes that are not split, by default the `_no_split_modules` of the model."""
    chosen = getattr(model, "_no_split_modules", None) if names is None else names
    if not isinstance(chosen, (str, Iterable, NoneType)):
        fix = 'Pass their names, such as ["LlamaDecoderLayer"]'
        raise wrong_value("no_split_module_classes", chosen, "it does not name classes", fix, TypeError)
    return frozenset([chosen] if isinstance(chosen, str) else chosen or ())


def _walk(module: nn.Module, name: str, whole: frozenset[str]) -> Iterator[_Part]:
    children = {key: child for key, child in module._modules.items() if child is not None}
    is_unit = bool(name) and (not children or type(module).__name__ in whole)
    prefix = f"{name}." if name else ""
    direct = {f"{prefix}{key}": tensor for key, tensor in all_tensors(module, recurse=is_unit).items()}
    if is_unit:
        yield from [(name, direct)] if direct else []
        return
    yield from ((key, {key: tensor}) for key, tensor in direct.items())
    for key, child in children.items():
        yield from _walk(child, f"{prefix}{key}", whole)


def _join_tied(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Groups parts that share a parameter, and keeps each group at the position of its first part."""
    groups = list(range(len(parts)))
    owner: dict[int, int] = {}
    for index, (_, tensors) in enumerate(parts):
        shared = [id(tensor) for tensor in tensors.values() if isinstance(tensor, nn.Parameter)]
        tied_groups = {groups[owner[key]] for key in shared if key in owner} | {index}
        if len(tied_groups) > 1:
            groups = [min(tied_groups) if group in tied_groups else group for group in groups]
        owner.update(dict.fromkeys(shared, index))
    joined_parts: dict[int, list[_Part]] = defaultdict(list)
    for group, part in zip(groups, parts, strict=True):
        joined_parts[group].append(part)
    return [joined_parts[group] for group in sorted(joined_parts)]


def _block_sizes(
    model: nn.Module, dtype: Dtype | None, special_dtypes: Mapping[str, Dtype] | None
) -> dict[str, float]:
    """Returns the bytes of the block of each tensor."""
    sizes: dict[str, float] = {}
    for path, module, with_inner in find_blocks(model):
        prefix = f"{path}." if path else ""
        named = {f"{prefix}{name}": tensor for name, tensor in all_tensors(module, with_inner).items()}
        total = sum(tensor_bytes(name, tensor, dtype, special_dtypes) for name, tensor in named.items())
        sizes.update(dict.fromkeys(named, total))
    return sizes


DeviceName = int | str
"""Index of an accelerator, or "mps", "cpu", "disk"."""
Memory = Mapping[DeviceName, float | str]

LAST = ("mps", "cpu", "disk")
"""Devices without an index, in the order in which they are filled after those with an index."""
OFFLOAD_DEVICES = ("cpu", "disk")
"""Devices that store offloaded weights and do not compute with them."""
RESERVED_FRACTION = 0.1
"""Fraction of the free memory reserved for activations where the user sets no limits."""


def get_max_memory(max_memory: Memory | None = None) -> dict[DeviceName, int]:
    """Returns the memory limit of each device in bytes, in the order in which the devices are filled.

    Args:
        max_memory: bytes, or strings such as "10GB", by device. None is the free memory of all devices.
            Strings in a dict are replaced by their bytes.

    Raises:
        ConfigurationError: a size is invalid, or a device is not 0, 1, ..., "mps", "cpu" or "disk".
    """
    limits: Memory = _free_memory() if max_memory is None else max_memory
    if not isinstance(limits, Mapping):
        raise wrong_value(
            "max_memory", limits, "it must map devices to sizes", 'pass a dict, like {0: "5GB"}', TypeError
        )
    for device in limits:
        is_number = isinstance(device, int) and not isinstance(device, bool) and device >= 0
        if not is_number and device not in LAST:
            fix = f"name devices 0, 1, ... or {', '.join(LAST)}"
            raise wrong_value("max_memory", device, "it is not a device", fix)
    sizes = {device: _read_size(device, limits[device]) for device in sorted(limits, key=_position)}
    if isinstance(max_memory, dict):  # clients read numbers from the dict in which they passed strings
        max_memory.update({device: size for device, size in sizes.items() if isinstance(limits[device], str)})
    return sizes


def plan_memory(max_memory: Memory | None) -> dict[DeviceName, int]:
    """Returns the memory limits for a plan.

    They are those of the user, or the free memory without the reserve for activations.
    """
    bytes_ = get_max_memory(max_memory)
    return (
        bytes_
        if max_memory is not None
        else {device: int(b * (1 - RESERVED_FRACTION)) for device, b in bytes_.items()}
    )


def get_balanced_memory(
    model: nn.Module,
    max_memory: Memory | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[DeviceName, int]:
    """Returns memory limits that distribute a model evenly over the accelerators.

    Modules that are not split keep their order. The largest load is minimized, then the largest load of the
    devices after it, and so on. The last accelerator keeps its full limit. If the model does not fit, all
    devices keep their full limits.

    Args:
        model: the module; it may be on the meta device.
        max_memory: as in `get_max_memory`. None reserves a tenth of the free memory for activations.
        no_split_module_classes: names of classes that are not split. None: `_no_split_modules` of the model.
        dtype: dtype of the model after it is loaded. None: the current dtype.
        special_dtypes: dtypes of single tensors by name.
        low_zero: whether to put as little as possible on accelerator 0, which is used for other things.
    """
    memory = plan_memory(max_memory)
    workers = [device for device in memory if device not in OFFLOAD_DEVICES]
    limits = [memory[device] for device in workers]
    units = split_into_units(model, no_split_module_classes, dtype, special_dtypes)
    if not fits(units, limits):
        return memory
    first_count = min_units_on_first(units, limits) if low_zero else 0
    new_limits = [total(units[:first_count])] if low_zero else []
    new_limits += even_limits(units[first_count:], limits[len(new_limits) :])
    return {**memory, **dict(zip(workers[:-1], new_limits, strict=False))}


def even_limits(units: Sequence[Unit], limits: Sequence[int]) -> list[int]:
    """Returns the bytes of units for each device, in order, such that the largest load is minimal.

    Each device takes as much as the minimal limit allows, and the devices after it divide the rest in the
    same way. The units must fit the limits.
    """
    loads = []
    for index, limit in enumerate(limits):
        minimal = min(limit, smallest_limit(units, limits[index:]))
        (count,) = fill(units, [minimal])
        loads.append(total(units[:count]))
        units = units[count:]
    return loads


def min_units_on_first(units: Sequence[Unit], limits: Sequence[int]) -> int:
    """Returns the minimal number of units on the first device for which the rest fits the others."""
    return bisect_left(range(len(units)), True, key=lambda count: fits(units[count:], limits[1:]))


def smallest_limit(units: Sequence[Unit], limits: Sequence[int]) -> int:
    """Returns the smallest limit per device under which the units fit.

    If there is none, the result is larger than all units.
    """

    def is_enough(size: int) -> bool:
        return fits(units, [min(limit, size) for limit in limits])

    return bisect_left(range(total(units) + 1), True, key=is_enough)


def total(units: Sequence[Unit]) -> int:
    """Returns the bytes of units, rounded up because packed formats take fractions of bytes."""
    return math.ceil(sum(unit.size for unit in units))


def fits(units: Sequence[Unit], limits: Sequence[float]) -> bool:
    """Returns whether units fit devices that are filled in order."""
    return fill(units, limits)[-1:] == [len(units)] or not units


def fill(units: Sequence[Unit], limits: Sequence[float]) -> list[int]:
    """Returns, for each device, the index after its last unit when devices are filled in order."""
    sums = [0, *accumulate(unit.size for unit in units)]
    first, ends = 0, []
    for limit in limits:
        first = max(first, bisect_right(sums, sums[first] + limit) - 1)
        ends.append(first)
    return ends


def _free_memory() -> dict[DeviceName, int]:
    backend = hardware_table.detect()
    cpu: dict[DeviceName, int] = {"cpu": hardware_table.CPU.free_memory()}
    if backend.is_host:
        return cpu
    if backend.shares_host_memory:
        return {backend.name: backend.free_memory()}
    return {**{index: backend.free_memory(index) for index in range(backend.count())}, **cpu}


def _read_size(device: DeviceName, size: float | str) -> int:
    if not isinstance(size, (int, float, str)) or size != size or size == math.inf:
        raise wrong_value(
            f"max_memory[{device!r}]", size, "not a size", 'write bytes, or a string like "5GB"'
        )
    return convert_file_size_to_int(size if isinstance(size, str) else int(size))


def _position(device: DeviceName) -> tuple[int, int]:
    return (0, device) if isinstance(device, int) else (1, LAST.index(device))
