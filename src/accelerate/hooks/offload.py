"""Functions that attach hooks to the blocks of a model, and access to tensors of offloaded modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelerate.devices import clear_device_cache, hardware_table, of_device
from accelerate.hooks.align import AlignDevicesHook, Shared, Slot
from accelerate.hooks.base import (
    HOOK,
    Arguments,
    ModelHook,
    add_hook_to_module,
    hooks_of,
    not_traced,
    remove_hook_from_module,
)
from accelerate.hooks.prefetch import Prefetcher
from accelerate.nested import send_to_device
from accelerate.weights import (
    Device,
    OffloadedWeightsLoader,
    PrefixedDataset,
    check_device_same,
    check_values,
    find_blocks,
    has_forward,
    map_entry,
    move_module,
    named_module_tensors,
    resolve_device,
    set_module_tensor_to_device,
)

Keys = str | list[str] | None


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: Keys = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: Shared | None = None,
) -> None:
    """Attaches hooks that move the inputs of a module and its blocks to a device.

    Modules with a hook keep it.

    Args:
        module: the module.
        execution_device: the device.
        skip_keys: keyword arguments that are not moved.
        preload_module_classes: names of classes that are never split.
        tied_params_map: tied parameters by the address of the original and by device.
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
    """Attaches hooks to the blocks of a module that move inputs and load offloaded weights.

    Args:
        module: the module.
        execution_device: device of the forward. None does not move inputs.
        offload: whether weights are offloaded. Those of the next block are prefetched.
        weights_map: values of the weights by their names in the whole model.
        offload_buffers: whether to offload buffers, too.
        module_name: prefix of the names of this module in `weights_map`.
        skip_keys: keyword arguments that are not moved.
        preload_module_classes: names of classes that are never split.
        tied_params_map: tied parameters by the address of the original and by device.
    """
    factory = _HookFactory(
        weights_map, offload_buffers=offload_buffers, skip_keys=skip_keys, tied_params_map=tied_params_map
    )
    for name, block, with_inner in list(find_blocks(module, module_name, preload_module_classes or ())):
        factory.attach(block, name, with_inner, execution_device, offload)


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
    """Attaches hooks to the parts of a model, each with its own device and offloading.

    Args:
        module: the model. Its outputs are moved to the device of its inputs.
        execution_device: device of each module or tensor, where `""` is the model, or one device for all.
        offload: whether to offload weights, by the same names or for all.
        weights_map: values of offloaded weights by name.
        offload_buffers: whether to offload buffers, too.
        module_name: name of `module` if it is a submodule of the model.
        skip_keys: keyword arguments and keys of outputs that are not moved.
        preload_module_classes: names of classes that are never split.
        tied_params_map: tied parameters by the address of the original and by device.
    """
    devices = execution_device if isinstance(execution_device, Mapping) else {module_name: execution_device}
    offloaded = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    factory = _HookFactory(
        weights_map, offload_buffers=offload_buffers, skip_keys=skip_keys, tied_params_map=tied_params_map
    )
    root = AlignDevicesHook(devices.get(module_name), io_same_device=True, skip_keys=skip_keys)
    paths = [name.split(".") for name in devices if name]
    split_modules = {".".join(path[:count]) for path in paths for count in range(len(path))}
    blocks = list(find_blocks(module, module_name, preload_module_classes or (), split_modules))
    for name, block, with_inner in blocks:
        entries = _entries_of(block, name, with_inner, devices)
        is_offloaded = any(offloaded.get(entry, False) for entry in entries)
        if block is not module:
            factory.attach(block, name, with_inner, devices.get(entries[0]), is_offloaded)
        elif is_offloaded:
            root.execution_device = None  # otherwise it would move offloaded tensors
            add_hook_to_module(module, root)
            factory.attach(block, name, with_inner, devices.get(entries[0]), True)
        else:
            root.place_submodules = with_inner
    if not hasattr(module, HOOK):
        add_hook_to_module(module, root)
    for name, inner in module.named_modules(prefix=module_name):
        if name in devices and not hasattr(inner, HOOK) and has_forward(inner):
            add_hook_to_module(inner, AlignDevicesHook(devices[name], skip_keys=skip_keys))


def _entries_of(block: nn.Module, name: str, with_inner: bool, devices: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a device map for the tensors of a block."""
    prefix = f"{name}." if name else ""
    tensors = named_module_tensors(block, recurse=with_inner)
    names = dict.fromkeys(map_entry(f"{prefix}{tensor}", devices) for tensor, _ in tensors)
    return [entry for entry in names if entry is not None] or [""]


class _HookFactory:
    """Factory of the hooks of one model, with their common arguments and a prefetcher for each device."""

    def __init__(self, weights_map: Mapping[str, Tensor] | None, **arguments: Any) -> None:
        self.weights_map = weights_map
        self.make_hook: Callable[..., AlignDevicesHook] = partial(AlignDevicesHook, **arguments)
        self.prefetchers: dict[torch.device, Prefetcher] = {}

    def attach(
        self, block: nn.Module, name: str, with_inner: bool, device: Device | None, offload: bool
    ) -> None:
        """Attaches a hook to a block, and hooks to its submodules for calls outside of its forward."""
        weights, prefix = self.weights_map, f"{name}." if name else ""
        block_weights = PrefixedDataset(weights, prefix) if offload and weights is not None else None
        hook = self.make_hook(device, offload, weights_map=block_weights, place_submodules=with_inner)
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
        """Returns the prefetcher of a device, or None if the weights are already in its memory."""
        target = torch.device("cpu") if device is None else resolve_device(device)
        is_in_files = isinstance(self.weights_map, OffloadedWeightsLoader) and bool(self.weights_map.index)
        if of_device(target).is_host and not is_in_files:
            return None
        return self.prefetchers.setdefault(target, Prefetcher(target))


class CpuOffload(ModelHook):
    """Hook that moves a model to an accelerator when it is called, where it stays until it is offloaded.

    Args:
        execution_device: device of the forward. None: the accelerator of this process, or the CPU.
        prev_module_hook: hook of the previous model, which is offloaded first.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device: Device = (
            hardware_table.detect().device() if execution_device is None else execution_device
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        return move_module(module, "cpu")

    @not_traced
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        device = resolve_device(self.execution_device)
        first = next(module.parameters(), None)
        is_there = first is not None and check_device_same(first.device, device)
        if self.prev_module_hook is not None and not is_there:
            self.prev_module_hook.offload()
            clear_device_cache()
        move_module(module, device)
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """Handle of a model with a `CpuOffload` hook, which offloads it explicitly.

    Args:
        model: the model.
        hook: its hook.
    """

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Moves the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Removes the hook of the model."""
        remove_hook_from_module(self.model)


def has_offloaded_params(module: nn.Module) -> bool:
    """Returns whether the single hook of a module loads its tensors for each forward.

    Args:
        module: the module.
    """
    hooks = hooks_of(module)
    return len(hooks) == 1 and isinstance(hooks[0], AlignDevicesHook) and hooks[0].offload


def align_hooks(model: nn.Module) -> list[AlignDevicesHook]:
    """Returns the `AlignDevicesHook`s of all modules of a model."""
    hooks = (hook for module in model.modules() for hook in hooks_of(module))
    return [hook for hook in hooks if isinstance(hook, AlignDevicesHook)]


def is_any_offloaded(model: nn.Module) -> bool:
    """Returns whether weights of a model are loaded for each forward."""
    return any(hook.offload for hook in align_hooks(model))


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Moves the direct tensors of a module to a device inside the context.

    Args:
        module: the module, offloaded or not. Its submodules are not moved, unless its hook loads their
            tensors, too.
        execution_device: the device. None is the execution device of an offloaded module, and does not move
            others.
    """
    with _aligned(module, execution_device) as slots:
        yield
        for slot in slots:
            slot.find_change()


@contextmanager
def _aligned(module: nn.Module, execution_device: Device | None) -> Iterator[Sequence[Slot]]:
    """Moves the direct tensors of a module to a device inside the context, and yields those it offloads."""
    hook: Any = getattr(module, "_hf_hook", None)
    if has_offloaded_params(module):
        previous = hook.execution_device
        hook.execution_device = previous if execution_device is None else execution_device
        try:
            hook.pre_forward(module)
            yield hook.slots
        finally:
            hook.post_forward(module, ())
            hook.execution_device = previous
        return
    tensors = {} if execution_device is None else dict(named_module_tensors(module))
    try:
        for name in tensors:
            set_module_tensor_to_device(module, name, execution_device or "cpu")
        yield ()
    finally:
        moved = dict(named_module_tensors(module))
        for name, tensor in tensors.items():
            value = tensor if moved[name].is_meta else None  # values are lost on the meta device
            set_module_tensor_to_device(module, name, tensor.device, value)


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Device = "cpu"
) -> dict[str, Any]:
    """Updates a state dict with the tensors of an offloaded module.

    Args:
        module: the module.
        module_name: dotted name of one of its tensors, which begins with the name of the module.
        state_dict: state dict whose entries of the module are replaced.
        device_to_put_offload: device of the tensors.

    Returns:
        The same state dict.
    """
    root = module_name.rpartition(".")[0]
    prefix = f"{root}." if root else ""
    with _aligned(module, device_to_put_offload):  # reads each value once
        loaded = {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}
    state_dict.update((name, tensor) for name, tensor in loaded.items() if name in state_dict)
    return state_dict


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Returns the state dict of a model with offloaded parts, with all values on the CPU.

    Args:
        model: the module.

    Raises:
        ConfigurationError: tensors have no value, and no hook loads it.
    """
    slots, state = _slots_by_name(model), model.state_dict()
    values = {id(slot): slot.read(torch.device("cpu")) for slot in slots.values()}  # once for tied names
    tensors = {
        name: values[id(slots[name])] if tensor.is_meta and name in slots else tensor
        for name, tensor in state.items()
        if isinstance(tensor, Tensor)
    }
    check_values(tensors, "save", "No hook loads them. Load the model first.")
    return {**state, **{name: tensor.detach().to("cpu") for name, tensor in tensors.items()}}


class StoredWeight(NamedTuple):
    """Weight of a model with offloaded or partitioned parts."""

    shape: torch.Size  # shape of the weight
    dtype: torch.dtype  # dtype of its values
    read: Callable[[], Tensor]  # returns the values


def stored_weights(model: nn.Module) -> tuple[dict[str, Any], Callable[[Any], Tensor]]:
    """Returns the weights of a model with offloaded parts, and a function that reads one of them.

    Offloaded weights are read to the CPU, and others are returned on their device.
    """
    slots, state = _slots_by_name(model), model.state_dict(keep_vars=True)
    stored = {
        id(slot): StoredWeight(slot.empty.shape, slot.empty.dtype, partial(slot.read, torch.device("cpu")))
        for slot in slots.values()
    }
    offloaded = {name for name, tensor in state.items() if isinstance(tensor, Tensor) and tensor.is_meta}
    weights = {
        name: stored[id(slots[name])] if name in offloaded and name in slots else value
        for name, value in state.items()
    }
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    check_values(tensors, "read", "No hook loads them. Load the model first.")
    return weights, read_weight


def read_weight(weight: Any) -> Tensor:
    """Returns the values of a weight from `stored_weights`, without its graph."""
    return (weight.read() if isinstance(weight, StoredWeight) else weight).detach()


def _slots_by_name(model: nn.Module) -> dict[str, Slot]:
    """Returns the slots of offloaded tensors by name, where tied names get the same slot."""
    by_slot: dict[tuple[int, str], Slot] = {}
    for slot in (slot for hook in align_hooks(model) for slot in hook.slots):
        entries = [(id(tensors), key) for tensors, key in ((slot.tensors, slot.key), *slot.tied)]
        by_slot.update(dict.fromkeys(entries, slot))
    return {
        f"{path}.{key}" if path else key: by_slot[id(tensors), key]
        for path, module in model.named_modules(remove_duplicate=False)
        for tensors in (module._parameters, module._buffers)
        for key in tensors
        if (id(tensors), key) in by_slot
    }
