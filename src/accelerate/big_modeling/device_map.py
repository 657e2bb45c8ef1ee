"""Which module of a model goes where: plan it, shorten it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from accelerate.base import ConfigurationError, convert_bytes, listed
from accelerate.big_modeling.budget import LAST, Memory, Place, ends_of, fill, plan_memory
from accelerate.big_modeling.explain import explain_device_map
from accelerate.big_modeling.fallback import place_in_gaps
from accelerate.big_modeling.units import Unit, find_units
from accelerate.weights import Dtype

logger = logging.getLogger(__name__)  # also used where no run is set up

CPU, DISK = "cpu", "disk"


# Planning


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
) -> OrderedDict[str, Place]:
    """Plan where each module goes: accelerators are filled first, then the CPU, then the disk.

    Modules keep their order, so that a forward crosses from device to device once. As much as possible lies
    on the accelerators: where something lies elsewhere, the first of them keeps room for it to come in, which
    is two of its largest blocks (one at work, one on its way; one where nothing would fit beside two) and its
    buffers, and for nothing more.

    Args:
        model: the module; it may lie on the meta device.
        max_memory: bytes, or texts such as "10GB", by device (0, 1, ..., "mps", "cpu", "disk"); None takes
            what is free now, and leaves a tenth of it to activations.
        no_split_module_classes: names of classes that stay whole, as those with a residual connection must;
            None: `_no_split_modules` of the model.
        dtype: of the model once it is loaded; None: as it is.
        special_dtypes: those of single tensors, by name.
        verbose: whether the plan is printed as a table.
        clean_result: whether modules of one device are named by the module around them.
        offload_buffers: whether buffers of modules that lie elsewhere come in with the weights; otherwise
            they stay on the first accelerator.
        fallback_allocation: whether an accelerator that would stay empty, because the next module is too
            large, takes later ones that fit. The forward then crosses more often.

    Returns:
        Devices by module, or by tensor, in the order of the model. What fits nowhere goes to "disk".

    Raises:
        ConfigurationError: a limit or name in `max_memory` cannot work, or a limit for "disk" is too low.
    """
    memory = plan_memory(max_memory)
    units = find_units(model, no_split_module_classes, dtype, special_dtypes)
    places = place_units(units, memory, offload_buffers, fallback_allocation)
    by_name = {name: place for unit, place in zip(units, places, strict=True) for name in unit.names}
    in_order = OrderedDict((name, by_name[name]) for name in _ordered(_names_in_order(model), by_name))
    found = clean_device_map(in_order) if clean_result else in_order
    if verbose:
        print(explain_device_map(model, found, memory, dtype, special_dtypes))
    return OrderedDict(found)


def place_units(
    units: Sequence[Unit],
    memory: Mapping[Place, int],
    offload_buffers: bool = False,
    fallback: bool = False,
) -> list[Place]:
    """Return the place of each unit.

    Args:
        units: in the order of the model.
        memory: bytes by device, in the order in which they are filled.
        offload_buffers: whether buffers come in with the weights.
        fallback: whether an accelerator that would stay empty takes later units that fit.

    Raises:
        ConfigurationError: there is a limit for the disk, and it is too low.
    """
    accelerators: dict[Place, float] = {
        place: limit for place, limit in memory.items() if place not in (CPU, DISK)
    }
    places = _pack(units, accelerators, offload_buffers)
    if fallback:
        room = _Plan(units, offload_buffers, blocks=1).reserve(0)
        places = place_in_gaps(units, places, accelerators, room)
    left = [index for index, place in enumerate(places) if place is None]
    rest = [units[index] for index in left]
    cpu: dict[Place, float] = {CPU: memory.get(CPU, 0)}
    works = len(left) == len(units)  # then there is no accelerator that modules on the disk could come to
    on_cpu = _pack(rest, cpu, offload_buffers) if works else _Plan(rest).fill_one(cpu)
    for index, place in zip(left, on_cpu, strict=True):
        places[index] = place or DISK
    found = [place for place in places if place is not None]
    _check_result(units, found, memory, fallback)
    return found


def _pack(units: Sequence[Unit], limits: Mapping[Place, float], offload_buffers: bool) -> list[Place | None]:
    """Bring as many units as possible to the devices that work with them; None is for those elsewhere."""
    packed = _Plan(units, offload_buffers).pack(limits)
    return (
        packed
        if any(place is not None for place in packed)
        else _Plan(units, offload_buffers, blocks=1).pack(limits)
    )


@dataclass(frozen=True)
class _Plan:
    """Units in their order, and what the device that works must keep free for those that lie elsewhere."""

    units: Sequence[Unit]
    offload_buffers: bool = False
    blocks: int = 2

    def pack(self, limits: Mapping[Place, float]) -> list[Place | None]:
        """Fill devices that work; the first that takes something keeps the room for what lies elsewhere.

        The room depends on what lies elsewhere. With more room, fewer units fit; with fewer units, no less
        room is needed. So the count goes down from what fits without room, and the first count that fits with
        its own room is the largest one.
        """
        count = len(self.units)
        edges = self._fill_with_room(limits, 0)
        while edges and edges[-1] < count:
            count = edges[-1]
            edges = self._fill_with_room(limits, self.reserve(count))
        return self._spread(limits, edges)

    def fill_one(self, limits: Mapping[Place, float]) -> list[Place | None]:
        """Fill devices that keep units and do not work with them."""
        return self._spread(limits, fill(ends_of(self.units), list(limits.values())))

    def reserve(self, count: int) -> float:
        """Return the bytes that must stay free when only the first units lie on the devices that work."""
        elsewhere = self.units[count:]
        blocks = sorted((unit.block for unit in elsewhere), reverse=True)[: self.blocks]
        buffers = 0 if self.offload_buffers else sum(unit.buffers for unit in elsewhere)
        return sum(blocks) + buffers

    def _fill_with_room(self, limits: Mapping[Place, float], room: float) -> list[int]:
        needed = self.units[0].size + room if self.units else 0
        sizes = list(limits.values())
        first = next((index for index, limit in enumerate(sizes) if limit >= needed), len(sizes))
        if first == len(sizes):
            return [0] * first
        return [0] * first + fill(ends_of(self.units), [sizes[first] - room, *sizes[first + 1 :]])

    def _spread(self, limits: Mapping[Place, float], edges: Sequence[int]) -> list[Place | None]:
        """Return the place of each unit, from the unit behind which each device is full."""
        return [
            next((place for place, edge in zip(limits, edges, strict=True) if index < edge), None)
            for index in range(len(self.units))
        ]


def _check_result(
    units: Sequence[Unit], places: Sequence[Place], memory: Mapping[Place, int], fallback: bool
) -> None:
    on_disk = [unit for unit, place in zip(units, places, strict=True) if place == DISK]
    needed = sum(unit.size for unit in on_disk)
    if DISK in memory and needed > memory[DISK]:
        names = [name for unit in on_disk for name in unit.names]
        raise ConfigurationError(
            f"max_memory leaves {listed(names)} without a place: {convert_bytes(needed)} would go to the "
            f"disk, which may take {convert_bytes(memory[DISK])}. Raise a limit."
        )
    unused = [place for place in memory if place not in LAST and memory[place] and place not in places]
    if unused and on_disk + [unit for unit, place in zip(units, places, strict=True) if place == CPU]:
        further = "" if fallback else ", or pass fallback_allocation=True"
        logger.warning(
            f"No module goes to device {listed([str(place) for place in unused])}: what comes next does not "
            "fit, with the room that modules elsewhere need to come in. Raise its limit, or name smaller "
            f"modules in no_split_module_classes{further}."
        )


def _names_in_order(model: nn.Module) -> Iterable[str]:
    """Yield the names of a model's tensors module by module, buffers with the parameters beside them."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name in (*module._parameters, *module._buffers):
            yield f"{path}.{name}" if path else name


def _ordered(tensors: Iterable[str], names: Mapping[str, Any]) -> list[str]:
    """Return the names of units in the order of the model's tensors."""
    found: dict[str, None] = {}
    for tensor in tensors:
        name = tensor
        while name and name not in names:
            name = name.rpartition(".")[0]
        if name:
            found.setdefault(name)
    return list(found)


# Shortening


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Name modules of one device by the module around them, in place.

    Args:
        device_map: devices by module; all parts of a module are named.
        module_name: the module in which names are shortened; `""` is the whole model.

    Returns:
        The same map.
    """
    prefix = f"{module_name}." if module_name else ""
    inside = [name for name in device_map if name.startswith(prefix) and name != module_name]
    if len(inside) > 1 and len({device_map[name] for name in inside}) == 1:
        place = device_map[inside[0]]
        for name in inside:
            del device_map[name]
        device_map[module_name] = place
        return device_map
    children = dict.fromkeys(name[len(prefix) :].partition(".")[0] for name in inside)
    for child in children:
        if f"{prefix}{child}" not in device_map:
            clean_device_map(device_map, f"{prefix}{child}")
    return device_map
