"""The units of a model that are assigned to devices, and the memory that each device has for them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from torch import Tensor, nn

from accelerate.base import convert_file_size_to_int, wrong_value
from accelerate.devices import hardware_table
from accelerate.weights import Dtype, all_tensors, find_blocks, tensor_bytes


@dataclass(frozen=True)
class Unit:
    """One or several modules, or single tensors, that go to one device."""

    names: tuple[str, ...]
    size: float  # bytes of all their tensors that no unit before has
    buffers: float  # bytes of the buffers among them
    # Bytes of the largest block that one of their tensors is part of: what a device must have free to compute
    # with them when they are offloaded.
    block: float


class _Part(NamedTuple):
    name: str
    tensors: Mapping[str, Tensor]


def split_into_units(
    model: nn.Module,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    join_tied: bool = True,
) -> list[Unit]:
    """Return the units of a model in the order of its modules; with `join_tied` tied parts are one unit."""
    parts = list(_walk(model, "", whole_classes(model, no_split_module_classes)))
    blocks = _block_sizes(model, dtype, special_dtypes)
    counted: set[int] = set()
    units = []
    for group in _join_tied(parts) if join_tied else [[part] for part in parts]:
        sizes = []
        for name, tensor in chain.from_iterable(part.tensors.items() for part in group):
            if id(tensor) not in counted:
                sizes.append((tensor_bytes(name, tensor, dtype, special_dtypes), tensor))
            counted.add(id(tensor))
        units.append(
            Unit(
                names=tuple(part.name for part in group),
                size=sum(size for size, _ in sizes),
                buffers=sum(size for size, tensor in sizes if not isinstance(tensor, nn.Parameter)),
                block=max(blocks[name] for part in group for name in part.tensors),
            )
        )
    return units


def whole_classes(model: nn.Module, named: str | Collection[str] | None) -> frozenset[str]:
    """Return the names of the classes that stay whole; None leaves it to the model's `_no_split_modules`."""
    chosen = getattr(model, "_no_split_modules", None) if named is None else named
    return frozenset([chosen] if isinstance(chosen, str) else chosen or ())


def _walk(module: nn.Module, name: str, whole: frozenset[str]) -> Iterator[_Part]:
    children = {key: child for key, child in module._modules.items() if child is not None}
    is_unit = bool(name) and (not children or type(module).__name__ in whole)
    prefix = f"{name}." if name else ""
    own = {f"{prefix}{key}": tensor for key, tensor in all_tensors(module, recurse=is_unit).items()}
    if is_unit:
        yield from [_Part(name, own)] if own else []
        return
    yield from (_Part(key, {key: tensor}) for key, tensor in own.items())
    for key, child in children.items():
        yield from _walk(child, f"{prefix}{key}", whole)


def _join_tied(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Group parts that share a parameter; a group is at the position of its first part."""
    groups = list(range(len(parts)))
    owner: dict[int, int] = {}
    for index, part in enumerate(parts):
        shared = [id(tensor) for tensor in part.tensors.values() if isinstance(tensor, nn.Parameter)]
        joined = {groups[owner[key]] for key in shared if key in owner} | {index}
        if len(joined) > 1:
            groups = [min(joined) if group in joined else group for group in groups]
        owner.update(dict.fromkeys(shared, index))
    joined_parts: dict[int, list[_Part]] = defaultdict(list)
    for group, part in zip(groups, parts, strict=True):
        joined_parts[group].append(part)
    return [joined_parts[group] for group in sorted(joined_parts)]


def _block_sizes(
    model: nn.Module, dtype: Dtype | None, special_dtypes: Mapping[str, Dtype] | None
) -> dict[str, float]:
    """Return, for each tensor, the bytes of the block that it is part of."""
    sizes: dict[str, float] = {}
    for path, module, with_inner in find_blocks(model):
        prefix = f"{path}." if path else ""
        named = {f"{prefix}{name}": tensor for name, tensor in all_tensors(module, with_inner).items()}
        total = sum(tensor_bytes(name, tensor, dtype, special_dtypes) for name, tensor in named.items())
        sizes.update(dict.fromkeys(named, total))
    return sizes


DeviceName = int | str
"""Number of an accelerator, or "mps", "cpu", "disk"."""
Memory = Mapping[DeviceName, float | str]

LAST = ("mps", "cpu", "disk")
"""Places without a number, in the order in which they are filled after those that have one."""
OFFLOAD_DEVICES = ("cpu", "disk")
"""Places that keep weights for the accelerators and do not work with them."""
ROOM = 0.1
"""Part of the free memory that is left to activations where the user gives no numbers."""


def get_max_memory(max_memory: Memory | None = None) -> dict[DeviceName, int]:
    """Return how many bytes each device has for a model, in the order in which they are filled.

    Args:
        max_memory: bytes, or texts such as "10GB", by device; None takes what is free on all devices now.
            In a dict texts are replaced by their bytes.

    Raises:
        ConfigurationError: a size cannot be read, or a device is called otherwise than 0, 1, ..., "mps",
            "cpu" or "disk".
    """
    limits: Memory = _free_memory() if max_memory is None else max_memory
    if not isinstance(limits, Mapping):
        raise wrong_value(
            "max_memory", limits, "sizes by device are needed", 'pass a dict, like {0: "5GB"}', TypeError
        )
    for device in limits:
        is_number = isinstance(device, int) and not isinstance(device, bool) and device >= 0
        if not is_number and device not in LAST:
            fix = f"name devices 0, 1, ... or {', '.join(LAST)}"
            raise wrong_value("max_memory", device, "this is no device", fix)
    sizes = {device: _read_size(device, limits[device]) for device in sorted(limits, key=_position)}
    if isinstance(max_memory, dict):  # clients read numbers from the dict in which they passed texts
        max_memory.update({device: size for device, size in sizes.items() if isinstance(limits[device], str)})
    return sizes


def plan_memory(max_memory: Memory | None) -> dict[DeviceName, int]:
    """Return the memory for a plan: what the user says, or what is free without the room for activations."""
    bytes_ = get_max_memory(max_memory)
    return bytes_ if max_memory is not None else {device: int(b * (1 - ROOM)) for device, b in bytes_.items()}


def get_balanced_memory(
    model: nn.Module,
    max_memory: Memory | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[DeviceName, int]:
    """Return limits under which a model that fits the accelerators is spread evenly over them.

    Modules that stay whole keep their order. The largest share is as small as that allows, then the largest
    on the devices behind it, and so on. The last accelerator keeps all of its memory; where the model does
    not fit, all keep theirs, as nothing can be spared.

    Args:
        model: the module; it may be on the meta device.
        max_memory: as in `get_max_memory`; None leaves a tenth of what is free to activations.
        no_split_module_classes: names of classes that stay whole; None: `_no_split_modules` of the model.
        dtype: of the model once it is loaded; None: as it is.
        special_dtypes: those of single tensors, by name.
        low_zero: whether accelerator 0 takes as little as possible, as it is used for other things.
    """
    memory = plan_memory(max_memory)
    workers = [device for device in memory if device not in OFFLOAD_DEVICES]
    limits = [memory[device] for device in workers]
    units = split_into_units(model, no_split_module_classes, dtype, special_dtypes)
    if not fits(units, limits):
        return memory
    kept = least_for_first(units, limits) if low_zero else 0
    shares = [total(units[:kept])] if low_zero else []
    shares += even_shares(units[kept:], limits[len(shares) :])
    return {**memory, **dict(zip(workers[:-1], shares, strict=False))}


def even_shares(units: Sequence[Unit], limits: Sequence[int]) -> list[int]:
    """Return the bytes of units that each device gets, in their order, so that the largest share is least.

    A device takes what the smallest share lets it take; those behind it divide the rest in the same way.
    The units fit the limits.
    """
    shares = []
    for index, limit in enumerate(limits):
        share = min(limit, smallest_share(units, limits[index:]))
        (taken,) = fill(units, [share])
        shares.append(total(units[:taken]))
        units = units[taken:]
    return shares


def least_for_first(units: Sequence[Unit], limits: Sequence[int]) -> int:
    """Return how many units the first device must take for the rest to fit the others."""
    return bisect_left(range(len(units)), True, key=lambda count: fits(units[count:], limits[1:]))


def smallest_share(units: Sequence[Unit], limits: Sequence[int]) -> int:
    """Return the smallest limit under which units fit; more than all units take if there is none."""

    def is_enough(share: int) -> bool:
        return fits(units, [min(limit, share) for limit in limits])

    return bisect_left(range(total(units) + 1), True, key=is_enough)


def total(units: Sequence[Unit]) -> int:
    """Return the bytes of units, rounded up: packed formats take parts of one."""
    return math.ceil(sum(unit.size for unit in units))


def fits(units: Sequence[Unit], limits: Sequence[float]) -> bool:
    """Return whether units fit devices that are filled one after the other."""
    return fill(units, limits)[-1:] == [len(units)] or not units


def fill(units: Sequence[Unit], limits: Sequence[float]) -> list[int]:
    """Return, for each device, behind which unit it is full when they are filled one after the other."""
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
        raise wrong_value(f"max_memory[{device!r}]", size, "not a size", 'write bytes, or a text like "5GB"')
    return convert_file_size_to_int(size if isinstance(size, str) else int(size))


def _position(device: DeviceName) -> tuple[int, int]:
    return (0, device) if isinstance(device, int) else (1, LAST.index(device))
