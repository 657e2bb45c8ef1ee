"""Device maps of models, which are planned, checked, shortened and shown as a table."""

from __future__ import annotations

import logging
import re
import warnings
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from accelerate.base import ConfigurationError, convert_bytes, listed, wrong_value
from accelerate.big_modeling.budget import (
    LAST,
    DeviceName,
    Memory,
    Unit,
    fill,
    get_balanced_memory,
    plan_memory,
    split_into_units,
)
from accelerate.plugins import one_of
from accelerate.weights import (
    Dtype,
    NamedModule,
    all_tensors,
    check_available,
    find_tied_parameters,
    map_entry,
    mapped_device,
    named_module_tensors,
    resolve_device,
    tensor_bytes,
)

logger = logging.getLogger("accelerate.utils.modeling")  # the name by which clients filter it

CPU, DISK = "cpu", "disk"
METHODS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Methods of `plan_device_map`."""


def fill_empty_devices(
    units: Sequence[Unit],
    devices: Sequence[DeviceName | None],
    limits: Mapping[DeviceName, float],
    reserve: float,
) -> list[DeviceName | None]:
    """Assigns the first unassigned units that fit to each accelerator without a unit.

    `reserve` is the number of bytes that the first used accelerator reserves for offloaded units.
    """
    assigned = list(devices)
    for device, limit in limits.items():
        if device in assigned:
            continue
        free = limit if any(entry is not None for entry in assigned) else limit - reserve
        for index, unit in enumerate(units):
            if assigned[index] is None and unit.size <= free:
                assigned[index] = device
                free -= unit.size
            elif device in assigned:
                break
    return assigned


def fallback_allocate(
    modules: Sequence[NamedModule],
    module_sizes: Mapping[str, float],
    size_limit: float,
    no_split_module_classes: Collection[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | Tensor | None, list[NamedModule]]:
    """Finds the first module that fits a device, and splits larger ones until a part fits.

    Args:
        modules: modules or single tensors with their names, in order.
        module_sizes: as `compute_module_sizes` returns them.
        size_limit: free bytes.
        no_split_module_classes: names of classes that are not split.
        tied_parameters: groups of names, each of one parameter. A module is skipped if it has only a
            part of a group, because the rest would be on another device.

    Returns:
        Name and module that fits, or None and None if there is none, and the remaining modules, where a
        module that was split is replaced by its other parts.
    """
    whole = frozenset(no_split_module_classes or ())
    tied = [group for group in tied_parameters or () if len(group) > 1]
    level = [(entry, list(modules[:i]), list(modules[i + 1 :])) for i, entry in enumerate(modules)]
    while level:
        for (name, module), before, after in level:
            if module_sizes.get(name, 0) <= size_limit and not _is_tied_outside(name, tied):
                return name, module, [*before, *after]
        splits = ((_split(name, module, whole), before, after) for (name, module), before, after in level)
        level = [
            (part, [*before, *parts[:i]], [*parts[i + 1 :], *after])
            for parts, before, after in splits
            for i, part in enumerate(parts)
        ]
    return None, None, list(modules)


def _split(name: str, module: nn.Module | Tensor, whole: frozenset[str]) -> list[NamedModule]:
    if isinstance(module, Tensor) or type(module).__name__ in whole:
        return []
    children = list(module.named_children())
    parts: list[NamedModule] = [*named_module_tensors(module), *children] if children else []
    return [(f"{name}.{entry}", part) for entry, part in parts]


def _is_tied_outside(name: str, tied: Sequence[Sequence[str]]) -> bool:
    inside = [[f"{entry}.".startswith(f"{name}.") for entry in group] for group in tied]
    return any(any(group) and not all(group) for group in inside)


NUMBERED = re.compile(r"(.*?)(\d+)((?:\.\D.*)?)")
WIDEST = 60
"""Maximum width of the column of module names, in characters."""


def explain_device_map(
    model: nn.Module,
    device_map: Mapping[str, Any],
    max_memory: Mapping[Any, int] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
) -> str:
    """Formats a device map as a table with a row for each device.

    Args:
        model: the module; it may be on the meta device.
        device_map: device of each module or tensor.
        max_memory: bytes by device, as `get_max_memory` returns them. None leaves that column empty.
        dtype: dtype of the model after it is loaded. None: the current dtype.
        special_dtypes: dtypes of single tensors by name.

    Returns:
        Lines of text. A tensor with several names counts once, under the first.
    """
    limits = max_memory or {}
    names: dict[Any, list[str]] = {device: [] for device in limits}
    for name, device in device_map.items():
        names.setdefault(device, []).append(name)
    measured: dict[Any, list[float]] = {device: [0, 0] for device in (*names, None)}
    tensors = {id(tensor): (name, tensor) for name, tensor in reversed(all_tensors(model).items())}
    for name, tensor in tensors.values():  # under the first name of each
        size = tensor_bytes(name, tensor, dtype, special_dtypes)
        measured[mapped_device(name, device_map)][not isinstance(tensor, nn.Parameter)] += size
    rows = [["device", "parameters", "buffers", "total", "of limit", "modules"]]
    for device, modules in names.items():
        parameters, buffers = measured[device]
        size, limit = parameters + buffers, limits.get(device)
        used = f"{size / limit:.0%}" if limit else ""
        sizes = [convert_bytes(number) for number in (parameters, buffers, size)]
        rows.append([str(device), *sizes, used, shorten(modules)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 0 < index < len(row) - 1 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def shorten(names: list[str]) -> str:
    """Joins names, and combines those that differ in one number into a range, as in "layers.0-11, norm"."""
    runs: list[tuple[str, int, int, str] | str] = []
    for name in names:
        match = NUMBERED.fullmatch(name)
        if match is None:
            runs.append(name or "all")
            continue
        start, number, end = match[1], int(match[2]), match[3]
        previous = runs[-1] if runs else ""
        if isinstance(previous, tuple) and (previous[0], previous[2] + 1, previous[3]) == (
            start,
            number,
            end,
        ):
            runs[-1] = (start, previous[1], number, end)
        else:
            runs.append((start, number, number, end))
    text = ", ".join(
        run if isinstance(run, str) else f"{run[0]}{run[1]}{f'-{run[2]}' if run[2] > run[1] else ''}{run[3]}"
        for run in runs
    )
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 4].rstrip(', ')} ..."


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Memory | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> OrderedDict[str, DeviceName]:
    """Plans the device of each module, filling accelerators first, then the CPU, then the disk.

    Modules keep their order, so that a forward crosses each device boundary once. As much as possible is on
    the accelerators. Where modules are offloaded, the first accelerator reserves memory to load them, which
    is two of their largest blocks (one that computes and one that is prefetched, or a single one where
    nothing would fit beside two) and their buffers.

    Args:
        model: the module; it may be on the meta device.
        max_memory: bytes, or strings such as "10GB", by device (0, 1, ..., "mps", "cpu", "disk"). None is the
            free memory, of which a tenth is reserved for activations.
        no_split_module_classes: names of classes that are not split, such as those with a residual
            connection.
            None: `_no_split_modules` of the model.
        dtype: dtype of the model after it is loaded. None: the current dtype.
        special_dtypes: dtypes of single tensors by name.
        verbose: whether to print the plan as a table.
        clean_result: whether to replace the modules of one device by their common parent.
        offload_buffers: whether to offload the buffers of offloaded modules, too. Otherwise they stay on
            the first accelerator.
        fallback_allocation: whether an accelerator that is too small for the next module takes later
            modules that fit. The forward then crosses more device boundaries.

    Returns:
        Device of each module or tensor in the order of the model. What does not fit goes to "disk".

    Raises:
        ConfigurationError: a limit or name in `max_memory` is invalid, or the limit for "disk" is too low.
    """
    memory = plan_memory(max_memory)
    units = split_into_units(model, no_split_module_classes, dtype, special_dtypes)
    devices = assign_units(units, memory, offload_buffers, fallback_allocation)
    by_name = {name: device for unit, device in zip(units, devices, strict=True) for name in unit.names}
    device_map = OrderedDict((name, by_name[name]) for name in _in_model_order(model, by_name))
    if clean_result:
        clean_device_map(device_map)
    if verbose:
        print(explain_device_map(model, device_map, memory, dtype, special_dtypes))
    return device_map


def plan_device_map(
    model: nn.Module,
    method: str,
    max_memory: Memory | None = None,
    offload_buffers: bool = False,
    **sizes: Any,
) -> Mapping[str, Any]:
    """Plans a device map by one of `METHODS`.

    `sizes` are further arguments of both planning functions.
    """
    if one_of("device_map", method, METHODS) != "sequential":
        max_memory = get_balanced_memory(model, max_memory, low_zero=method == "balanced_low_0", **sizes)
    return infer_auto_device_map(model, max_memory, offload_buffers=offload_buffers, **sizes)


def assign_units(
    units: Sequence[Unit],
    memory: Mapping[DeviceName, int],
    offload_buffers: bool = False,
    fallback: bool = False,
) -> list[DeviceName]:
    """Returns the device of each unit.

    `memory` is in the order in which the devices are filled.
    """
    accelerators = {device: limit for device, limit in memory.items() if device not in (CPU, DISK)}
    devices = _pack(units, accelerators, offload_buffers)
    if fallback:
        reserve = _reserve_for(units, 1, offload_buffers)
        devices = fill_empty_devices(units, devices, accelerators, reserve)
    unassigned = [index for index, device in enumerate(devices) if device is None]
    rest = [units[index] for index in unassigned]
    cpu: dict[DeviceName, float] = {CPU: memory.get(CPU, 0)}
    # the CPU computes, because no accelerator could load modules from the disk
    if len(unassigned) == len(units):
        on_cpu = _pack(rest, cpu, offload_buffers)
    else:
        on_cpu = _spread(rest, cpu, fill(rest, [*cpu.values()]))
    for index, device in zip(unassigned, on_cpu, strict=True):
        devices[index] = device or DISK
    assigned = [device for device in devices if device is not None]
    _check_result(units, assigned, memory, fallback)
    return assigned


def _pack(
    units: Sequence[Unit], limits: Mapping[DeviceName, float], offload_buffers: bool
) -> list[DeviceName | None]:
    """Assigns as many units as possible to the devices that compute, and None to offloaded ones.

    The first device that takes a unit reserves memory for two offloaded blocks, or for one where no unit
    would fit beside two. The reserve depends on the offloaded units. With a larger reserve fewer units fit,
    and with fewer units the reserve does not shrink. So the count decreases from the units that fit without a
    reserve, and the first count that fits with its own reserve is the largest.
    """
    ends: list[int] = []
    for num_blocks in (2, 1):
        count = len(units)
        ends = _fill_with_reserve(units, limits, 0)
        while ends and ends[-1] < count:
            count = ends[-1]
            ends = _fill_with_reserve(units, limits, _reserve_for(units[count:], num_blocks, offload_buffers))
        if ends and ends[-1] > 0:
            break
    return _spread(units, limits, ends)


def _reserve_for(offloaded: Sequence[Unit], num_blocks: int, offload_buffers: bool) -> float:
    """Returns the bytes that the device that computes with offloaded units must reserve."""
    blocks = sorted((unit.block for unit in offloaded), reverse=True)[:num_blocks]
    return sum(blocks) + (0 if offload_buffers else sum(unit.buffers for unit in offloaded))


def _fill_with_reserve(
    units: Sequence[Unit], limits: Mapping[DeviceName, float], reserve: float
) -> list[int]:
    needed = units[0].size + reserve if units else 0
    sizes = list(limits.values())
    first = next((index for index, limit in enumerate(sizes) if limit >= needed), len(sizes))
    if first == len(sizes):
        return [0] * first
    return [0] * first + fill(units, [sizes[first] - reserve, *sizes[first + 1 :]])


def _spread(
    units: Sequence[Unit], limits: Mapping[DeviceName, float], ends: Sequence[int]
) -> list[DeviceName | None]:
    """Returns the device of each unit from the end index of each device."""
    return [
        next((device for device, end in zip(limits, ends, strict=True) if index < end), None)
        for index in range(len(units))
    ]


def _check_result(
    units: Sequence[Unit], devices: Sequence[DeviceName], memory: Mapping[DeviceName, int], fallback: bool
) -> None:
    on_disk = [unit for unit, device in zip(units, devices, strict=True) if device == DISK]
    needed = sum(unit.size for unit in on_disk)
    if DISK in memory and needed > memory[DISK]:
        names = [name for unit in on_disk for name in unit.names]
        raise ConfigurationError(
            f"max_memory leaves {listed(names)} without a device: {convert_bytes(needed)} would go to the "
            f"disk, whose limit is {convert_bytes(memory[DISK])}. Raise a limit."
        )
    unused = [device for device in memory if device not in LAST and memory[device] and device not in devices]
    if unused and on_disk + [unit for unit, device in zip(units, devices, strict=True) if device == CPU]:
        option = "" if fallback else ", or pass fallback_allocation=True"
        logger.warning(
            f"No module is on device {listed([str(device) for device in unused])}: the next one does not "
            "fit beside the memory reserved to load offloaded modules. Raise its limit, or name smaller "
            f"modules in no_split_module_classes{option}."
        )


def _in_model_order(model: nn.Module, names: Mapping[str, Any]) -> list[str]:
    """Returns names of units in the order of the tensors of the model."""
    ordered: dict[str, None] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key in (*module._parameters, *module._buffers):
            if name := map_entry(f"{path}.{key}" if path else key, names):
                ordered.setdefault(name)
    return list(ordered)


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Replaces modules on one device by their common parent, in place.

    Args:
        device_map: device of each module, with all parts of a module.
        module_name: the module in which names are replaced. `""` is the whole model.

    Returns:
        The same map.
    """
    prefix = f"{module_name}." if module_name else ""
    inside = [name for name in device_map if name.startswith(prefix) and name != module_name]
    if len(inside) > 1 and len({device_map[name] for name in inside}) == 1:
        device = device_map[inside[0]]
        for name in inside:
            del device_map[name]
        device_map[module_name] = device
        return device_map
    children = dict.fromkeys(name[len(prefix) :].partition(".")[0] for name in inside)
    for child in children:
        if f"{prefix}{child}" not in device_map:
            clean_device_map(device_map, f"{prefix}{child}")
    return device_map


def check_devices(device_map: Mapping[str, Any]) -> None:
    """Raises an error for a device map that is not a mapping, or names devices this machine lacks."""
    if not isinstance(device_map, Mapping):
        raise wrong_value(
            "device_map",
            device_map,
            "it must map modules to devices",
            "pass a dict, such as {'': 'cpu'}; infer_auto_device_map() plans one",
            TypeError,
            AttributeError,
        )
    for name, device in device_map.items():
        if not isinstance(device, Hashable):
            fix = 'Give a number, such as 0, or a name, such as "cpu" or "disk"'
            raise wrong_value(f"device_map[{name!r}]", device, "it is not a device", fix, TypeError)
    for device in set(device_map.values()) - {"disk", None}:
        check_available(resolve_device(device))


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Raises an error for a map that does not fit a model, before anything is moved.

    Names that the model does not have cause a warning.

    Args:
        model: the module.
        device_map: device of each module or tensor.

    Raises:
        ConfigurationError: parameters or buffers have no device, or tied parameters have different devices.
    """
    tensors = all_tensors(model)
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    unknown = [name for name in device_map if name not in modules and name not in tensors]
    if unknown:
        warnings.warn(
            f"The following device_map keys do not match any submodules in the model: {unknown}. "
            "They have no effect.",
            stacklevel=2,
        )
    unmapped = [name for name in tensors if mapped_device(name, device_map) is None]
    separated = []
    for group in find_tied_parameters(model):
        devices = {name: mapped_device(name, device_map) for name in group}
        if len({device_key(device) for device in devices.values() if device is not None}) > 1:
            separated.append(" and ".join(f"{name} ({device})" for name, device in devices.items()))
    rows = (
        (unmapped, f"it gives no device to {listed(unmapped)}: add their modules, or '' for all others"),
        (separated, f"it separates tied parameters: {listed(separated)}; give them one device"),
    )
    if unmapped or separated:
        problems = "; ".join(text for names, text in rows if names)
        raise ConfigurationError(f"device_map does not fit this {type(model).__name__}: {problems}.")


def device_key(device: DeviceName) -> str:
    """Returns the same string for equal devices, such as "0" for 0 and `torch.device("cuda", 0)`."""
    kind, _, index = str(device).partition(":")
    return kind if kind in (*LAST, "meta") or kind.isdigit() else index or "0"
