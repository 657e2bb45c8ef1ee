"""Choose the hooks of a whole tree of modules: one for each block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.devices import of_device
from accelerate.hooks.align import AlignDevicesHook, Shared
from accelerate.hooks.base import HOOK, add_hook_to_module
from accelerate.hooks.prefetch import Prefetcher
from accelerate.weights import (
    Device,
    OffloadedWeightsLoader,
    PrefixedDataset,
    find_blocks,
    has_forward,
    map_entry,
    named_module_tensors,
    resolve_device,
)

Keys = str | list[str] | None


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: Keys = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: Shared | None = None,
) -> None:
    """Let a module, and each block in it, compute on a device; modules that have a hook keep it.

    Args:
        module: the module.
        execution_device: the device.
        skip_keys: keyword arguments that stay where they are.
        preload_module_classes: names of classes that are always one block.
        tied_params_map: parameters that several modules share, by the address of the original and by device.
    """
    blocks = find_blocks(module, whole=preload_module_classes or ())
    for target, with_inner in [(module, False), *((block, inner) for _, block, inner in blocks)]:
        if not hasattr(target, HOOK) and has_forward(target):
            hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
            hook.place_submodules = with_inner
            add_hook_to_module(target, hook)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Keys = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: Shared | None = None,
) -> None:
    """Let each block of a module compute on a device, and load its weights there where they are offloaded.

    Args:
        module: the module.
        execution_device: the device; None leaves inputs where they are.
        offload: whether weights are offloaded; those of the next block are prefetched while one computes.
        weights_map: their values by name, as seen from the whole model.
        offload_buffers: whether buffers are offloaded, too.
        module_name: what names in `weights_map` begin with for this module.
        skip_keys: keyword arguments that stay where they are.
        preload_module_classes: names of classes that are always one block.
        tied_params_map: parameters that several modules share, by the address of the original and by device.
    """
    attaching = _Attaching(
        weights_map, offload_buffers=offload_buffers, skip_keys=skip_keys, tied_params_map=tied_params_map
    )
    for name, block, with_inner in list(find_blocks(module, module_name, preload_module_classes or ())):
        attaching.attach(block, name, with_inner, execution_device, offload)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Keys = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: Shared | None = None,
) -> None:
    """Let each part of a model compute on its device, and load its weights there where they are offloaded.

    Args:
        module: the model. What it returns goes back to the device that its inputs came from.
        execution_device: devices by module or tensor, with `""` for the model itself; or one for all.
        offload: whether weights are offloaded, by the same names; or one answer for all.
        weights_map: the values of offloaded weights, by name.
        offload_buffers: whether buffers are offloaded, too.
        module_name: name of `module`, where it is a part of the model that the names belong to.
        skip_keys: keyword arguments and keys of outputs that stay where they are.
        preload_module_classes: names of classes that are always one block.
        tied_params_map: parameters that several modules share, by the address of the original and by device.
    """
    devices = execution_device if isinstance(execution_device, Mapping) else {module_name: execution_device}
    offloaded = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    attaching = _Attaching(
        weights_map, offload_buffers=offload_buffers, skip_keys=skip_keys, tied_params_map=tied_params_map
    )
    root = AlignDevicesHook(devices.get(module_name), io_same_device=True, skip_keys=skip_keys)
    paths = [name.split(".") for name in devices if name]
    opened = {".".join(path[:count]) for path in paths for count in range(len(path))}
    for name, block, with_inner in list(
        find_blocks(module, module_name, preload_module_classes or (), opened)
    ):
        entries = _entries_of(block, name, with_inner, devices)
        is_offloaded = any(offloaded.get(entry, False) for entry in entries)
        if block is not module:
            attaching.attach(block, name, with_inner, devices.get(entries[0]), is_offloaded)
        elif is_offloaded:
            root.execution_device = None  # or it would move offloaded tensors
            add_hook_to_module(module, root)
            attaching.attach(block, name, with_inner, devices.get(entries[0]), True)
        else:
            root.place_submodules = with_inner
    if not hasattr(module, HOOK):
        add_hook_to_module(module, root)
    for name, inner in module.named_modules(prefix=module_name):
        if name in devices and not hasattr(inner, HOOK) and has_forward(inner):
            add_hook_to_module(inner, AlignDevicesHook(devices[name], skip_keys=skip_keys))


def _entries_of(block: nn.Module, name: str, with_inner: bool, devices: Mapping[str, Any]) -> list[str]:
    """Return the entries of a map that say where the tensors of a block go."""
    prefix = f"{name}." if name else ""
    tensors = named_module_tensors(block, recurse=with_inner)
    names = dict.fromkeys(map_entry(f"{prefix}{tensor}", devices) for tensor, _ in tensors)
    return [entry for entry in names if entry is not None] or [""]


class _Attaching:
    """What the hooks of one model have in common: arguments, and the prefetcher of each device."""

    def __init__(self, weights_map: Mapping[str, Tensor] | None, **arguments: Any) -> None:
        self.weights_map = weights_map
        self.make_hook: Callable[..., AlignDevicesHook] = partial(AlignDevicesHook, **arguments)
        self.prefetchers: dict[torch.device, Prefetcher] = {}

    def attach(
        self, block: nn.Module, name: str, with_inner: bool, device: Device | None, offload: bool
    ) -> None:
        """Give a block its hook, and the modules inside theirs.

        Those run where a module inside is called from outside of the block's forward. Clients look for them,
        and call them by hand.
        """
        weights, prefix = self.weights_map, f"{name}." if name else ""
        own = PrefixedDataset(weights, prefix) if offload and weights is not None else None
        hook = self.make_hook(device, offload, weights_map=own, place_submodules=with_inner)
        if offload:
            hook.prefetcher = self._prefetcher_for(device)
        add_hook_to_module(block, hook, append=True)
        if not (with_inner and offload):
            return
        if weights is None:
            weights, prefix = hook.weights_map or {}, ""
        for path, inner in block.named_modules():
            if path and not hasattr(inner, HOOK) and next(named_module_tensors(inner), None) is not None:
                values = PrefixedDataset(weights, f"{prefix}{path}.")
                member = self.make_hook(device, offload, weights_map=values)
                member.join(hook, inner)
                add_hook_to_module(inner, member)

    def _prefetcher_for(self, device: Device | None) -> Prefetcher | None:
        """Prefetch weights, unless they are in the memory in which they are used."""
        target = torch.device("cpu") if device is None else resolve_device(device)
        is_in_files = isinstance(self.weights_map, OffloadedWeightsLoader) and bool(self.weights_map.index)
        if of_device(target).is_host and not is_in_files:
            return None
        return self.prefetchers.setdefault(target, Prefetcher(target))
