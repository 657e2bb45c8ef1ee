"""Hook that moves inputs and offloaded tensors of a module to its execution device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.hooks.base import Arguments, ModelHook, not_traced
from accelerate.hooks.prefetch import Copy, Prefetcher
from accelerate.hooks.ties import TIE, OffloadedSteps, Tie, tie_of
from accelerate.hooks.unloaded import UnloadedTensor, as_unloaded
from accelerate.nested import find_device, send_to_device
from accelerate.state import services
from accelerate.weights import (
    Device,
    drop_values,
    get_non_persistent_buffers,
    is_derived_parameter,
    named_module_tensors,
    replacement_for,
    resolve_device,
    scales_name,
    set_module_tensor_to_device,
)

META = torch.device("meta")
Tensors = dict[str, Any]
Shared = dict[int, dict[torch.device, Tensor]]
TYPES_WITHOUT_DEVICE = (int, float, bool, str, type(None))
"""Types of arguments that have no device."""


@dataclass
class Slot:
    """One offloaded tensor, as an entry of the parameters or buffers of a module."""

    owner: nn.Module
    tensors: Tensors  # the parameters or the buffers of the owner
    key: str  # name of the tensor in `tensors`
    source: Any  # object whose `weights_map` has the values
    name: str  # name of the values in `weights_map`
    original_device: torch.device
    empty: Tensor  # meta tensor between forwards, with dtype and `requires_grad`
    tie: Tie
    tied: list[tuple[Tensors, str]] = field(default_factory=list)  # other entries with the same parameter
    filled: Tensor | None = None  # tensor with the values, reused if they stay in memory
    address: int | None = None  # of the reused values
    version: int = 0  # of `filled` before the forward

    def read(self, device: torch.device, copy: Copy = Tensor.to) -> Tensor:
        values: Tensor = self.source.weights_map[self.name]
        if is_derived_parameter(self.empty) or (values.device == device and values.dtype == self.empty.dtype):
            return values
        return copy(values, device, self._dtype_for(values))

    def _dtype_for(self, values: Tensor) -> torch.dtype:
        is_integer = not (values.is_floating_point() or values.is_complex())
        return values.dtype if is_integer or is_derived_parameter(self.empty) else self.empty.dtype

    def load(self, device: torch.device) -> None:
        """Reads the values and fills the slot.

        Values at the same address are wrapped once.
        """
        empty, filled = self.empty, self.filled
        values: Tensor = self.source.weights_map[self.name]
        with torch_private.without_torch_functions():  # attributes of an UnloadedTensor take longer with them
            is_kept = (
                self.address is not None
                and filled is not None
                and values.data_ptr() == self.address
                and self.tensors.get(self.key) is empty
                and filled.dtype == empty.dtype
                and filled.requires_grad is empty.requires_grad
            )
        if is_kept and filled is not None:
            self._put(filled)
            return
        self.keep_changes()
        on_device = self.read(device)
        self.fill(on_device, device)
        is_reusable = on_device is values and values.numel() and not is_derived_parameter(empty)
        self.address = values.data_ptr() if is_reusable else None

    def load_prefetched(self, values: Tensor, device: torch.device) -> None:
        """Fills the slot with prefetched values, or with others if it was converted since the prefetch."""
        is_current = values.dtype == self._dtype_for(values)
        self.fill(values if is_current else self.read(device), device)

    def fill(self, values: Tensor, device: torch.device) -> Tensor:
        """Fills the slot with values that `read` returned, and returns its tensor."""
        self.address = None
        self.filled = tensor = self._make(values, device)
        self.version = 0 if tensor.is_inference() else tensor._version
        self._put(tensor)
        return tensor

    def restore(self) -> None:
        """Fills the slot for good, with the tensor of the entries that were tied to it and are filled."""
        tied = None if self.tie.restored is None else self.tie.restored()
        is_derived = is_derived_parameter(self.empty)
        if tied is None or is_derived:
            filled = self.fill(self.read(self.original_device), self.original_device)
            tied = filled if is_derived else self.tie.refill(filled)
        self._put(tied)
        self.tie.restore(tied)

    def is_changed(self) -> bool:
        """Returns whether a forward has changed the values in place, and nothing else has the change."""
        filled = self.filled
        if self.address is not None or filled is None or filled.is_inference():
            return False
        return filled._version != self.version

    def find_change(self) -> None:
        """Compares the values with the stored ones, because torch does not count changes of `tensor.data`."""
        filled = self.filled
        if self.address is not None or filled is None or filled.is_meta or is_derived_parameter(self.empty):
            return
        now, stored = (t.reshape(-1).view(torch.uint8) for t in (filled.detach(), self.read(filled.device)))
        if not torch.equal(now, stored):
            self.version = -1

    def clear(self, stays: bool = False) -> None:
        """Replaces the values by the meta tensor, unless they stay and are no longer offloaded."""
        if self.address is None and self.filled is not None:
            if stays:
                self.filled.__dict__.pop(TIE, None)
            self.filled = None
        if is_derived_parameter(self.empty):
            drop_values(self.owner)
        self._put(self.empty)

    def keep_changes(self) -> None:
        """Keeps the current meta tensor, which users may have replaced since the last forward."""
        current = self.tensors.get(self.key)
        if current is not None and current is not self.empty and current.device.type == "meta":
            self.set_empty(current)

    def set_empty(self, meta: Tensor) -> None:
        """Sets the tensor between forwards, which reads the values if other code than the forward uses it."""
        self.empty = meta
        if not (is_derived_parameter(meta) or isinstance(meta, UnloadedTensor)):
            self.empty = as_unloaded(meta)
            self._link()

    def _link(self) -> None:
        if isinstance(self.empty, UnloadedTensor):
            self.empty._read = self._read_for_others

    def _read_for_others(self) -> Tensor:
        return self.read(self.source._target() or torch.device("cpu"))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._link()  # of a copy

    def _put(self, tensor: Tensor) -> None:
        for tensors, key in ((self.tensors, self.key), *self.tied):
            if not self._is_replaced(tensors.get(key)):
                tensors[key] = tensor

    def _is_replaced(self, current: Tensor | None) -> bool:
        """Returns whether other code has set or removed an entry, which is then no longer offloaded."""
        if current is self.empty or is_derived_parameter(self.empty):
            return False
        return current is None or not (current.__dict__.get(TIE) is self.tie or current.device.type == "meta")

    def _make(self, values: Tensor, device: torch.device) -> Tensor:
        if is_derived_parameter(self.empty):
            statistics = self.source.weights_map.get(scales_name(self.name))
            dtype = None if statistics is None else values.dtype
            set_module_tensor_to_device(self.owner, self.key, device, values, dtype, statistics)
            quantized: Tensor = self.tensors[self.key]
            return quantized
        tensor = replacement_for(self.empty, values)
        tensor = values.detach() if tensor is values else tensor  # a buffer, whose values have no tie
        tensor.__dict__[TIE] = self.tie
        return tensor


def find_slots(
    module: nn.Module, source: AlignDevicesHook, with_buffers: bool, with_inner: bool
) -> tuple[list[Slot], dict[str, Tensor]]:
    """Returns a slot for each offloaded tensor of a module, and the other tensors by name."""
    slots: dict[int, Slot] = {}
    resident: dict[str, Tensor] = {}
    non_persistent = get_non_persistent_buffers(module, recurse=with_inner, fqns=True)
    for path, owner in module.named_modules() if with_inner else [("", module)]:
        for tensors in (cast("Tensors", owner._parameters), cast("Tensors", owner._buffers)):
            for key, tensor in tensors.items():
                name = f"{path}.{key}" if path else key
                if tensor is None:
                    continue
                if tensors is owner._buffers and (not with_buffers or name in non_persistent):
                    resident[name] = tensor
                elif id(tensor) in slots:
                    slots[id(tensor)].tied.append((tensors, key))
                else:
                    slots[id(tensor)] = Slot(
                        *(owner, tensors, key, source, name, tensor.device, tensor), tie_of(tensor)
                    )
    return list(slots.values()), resident


_internal = partial(field, init=False, repr=False)


@dataclass(eq=False)
class AlignDevicesHook(ModelHook):
    """Hook that moves inputs and tensors of a module to a device before its forward.

    Args:
        execution_device: device of the forward. None does not move inputs.
        offload: whether the tensors of the module are offloaded, and loaded for the forward only.
        io_same_device: whether outputs are moved to the device of the inputs.
        weights_map: values of the offloaded tensors by name. None copies them to the CPU.
        offload_buffers: whether to offload buffers, too.
        place_submodules: whether to include the tensors of all submodules.
        skip_keys: keyword arguments and keys of outputs that are not moved.
        tied_params_map: tied parameters by the address of the original and by device.

    Attributes:
        input_device: device of the inputs of the last call.
        original_devices: previous devices of offloaded tensors by name. "meta" means without a value.
        prefetcher: prefetches offloaded tensors one block ahead. None loads them when they are used.
        block: hook of the enclosing block that loads the tensors. None if this hook loads them.
        is_loaded: whether the offloaded tensors are loaded.
    """

    execution_device: Device | None = None
    offload: bool = False
    io_same_device: bool = False
    weights_map: Mapping[str, Tensor] | None = field(default=None, repr=False)
    offload_buffers: bool = False
    place_submodules: bool = False
    skip_keys: str | list[str] | None = None
    tied_params_map: Shared | None = field(default=None, repr=False)
    tied_params_names: set[str] = _internal(default_factory=set)
    param_original_devices: dict[str, torch.device] = _internal(default_factory=dict)
    buffer_original_devices: dict[str, torch.device] = _internal(default_factory=dict)
    original_devices: dict[str, torch.device] = _internal()
    input_device: torch.device | None = _internal(default=None)
    prefetcher: Prefetcher | None = _internal(default=None)
    block: AlignDevicesHook | None = _internal(default=None)
    is_loaded: bool = _internal(default=False)
    slots: list[Slot] = _internal(default_factory=list)
    _members: dict[int, tuple[AlignDevicesHook, nn.Module]] = _internal(default_factory=dict)
    _device: tuple[Any, torch.device | None] = _internal(default=(None, None))

    @property
    def is_loaded_by_block(self) -> bool:
        """True while the hook of the enclosing block has loaded the tensors."""
        return self.block is not None and self.block.is_loaded

    def init_hook(self, module: nn.Module) -> nn.Module:
        if self.block is not None:
            return module
        if self.offload:
            self._empty(module)
        elif self.execution_device is not None:
            for name, _ in list(named_module_tensors(module, recurse=self.place_submodules)):
                set_module_tensor_to_device(
                    module, name, self.execution_device, tied_params_map=self.tied_params_map
                )
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for slot in self.slots:
            if slot.original_device.type != "meta":
                slot.restore()
        if self.block is not None:  # the hook of the block may remain
            removed = {id(slot) for slot in self.slots}
            self.block.slots = [slot for slot in self.block.slots if id(slot) not in removed]
            self.block._members.pop(id(self), None)
        self.prefetcher, self.block, self.is_loaded, self.slots = None, None, False, []
        return module

    def join(self, block: AlignDevicesHook, module: nn.Module) -> None:
        """Makes this the hook of a submodule of a block, whose hook loads the tensors of `weights_map`.

        Outside of the forward of the block, this hook loads and frees them when its module is called.
        """
        tables = (module._parameters, module._buffers)
        self.slots = [slot for slot in block.slots if any(slot.tensors is value for value in tables)]
        self.original_devices = {slot.key: slot.original_device for slot in self.slots}
        for slot in self.slots:
            slot.source, slot.name = self, slot.key
        self.block = block
        block._members[id(self)] = (self, module)

    def _empty(self, module: nn.Module) -> None:
        named = dict(named_module_tensors(module, recurse=self.place_submodules))
        self.original_devices = {name: tensor.device for name, tensor in named.items()}
        self.slots, resident = find_slots(module, self, self.offload_buffers, self.place_submodules)
        services.of_process(OffloadedSteps)
        if self.weights_map is None:
            self.weights_map = {slot.name: slot.empty.detach().to("cpu") for slot in self.slots}
        for slot in self.slots:
            if slot.empty.device.type != "meta":
                set_module_tensor_to_device(slot.owner, slot.key, META, clear_cache=False)
            slot.set_empty(slot.tensors[slot.key])
            slot.clear()
        for member, inner in list(self._members.values()):
            member.join(self, inner)
        if self.execution_device is not None:
            for name, tensor in resident.items():
                if tensor.device.type != "meta":
                    set_module_tensor_to_device(module, name, self.execution_device, clear_cache=False)

    def fetch(self, copy: Copy = Tensor.to) -> list[Tensor]:
        """Returns the values of all offloaded tensors on the execution device, copied by a function."""
        device = self._target() or torch.device("cpu")
        return [slot.read(device, copy) for slot in self.slots]

    def count_bytes(self) -> int:
        return sum(slot.empty.nbytes for slot in self.slots)

    @not_traced
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload and not self.is_loaded and not self.is_loaded_by_block:
            self._load()
        device = self._target()
        if device is None or all_on_device(args, kwargs, device):
            return args, kwargs
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    @not_traced
    def post_forward(self, module: nn.Module, output: object) -> Any:
        if self.is_loaded:
            # torch does not count changes of running statistics, but those of `num_batches_tracked`.
            changed = {id(slot.owner) for slot in self.slots if slot.is_changed()}
            for slot in self.slots:
                slot.clear(stays=id(slot.owner) in changed)
            self.is_loaded = False
        if self.io_same_device and self.input_device is not None:
            return send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def _load(self) -> None:
        device = self._target() or torch.device("cpu")
        if self.prefetcher is None:
            for slot in self.slots:
                slot.load(device)
        else:
            for slot in self.slots:
                slot.keep_changes()
            for slot, values in zip(self.slots, self.prefetcher.take(self), strict=True):
                slot.load_prefetched(values, device)
        self.is_loaded = True

    def _target(self) -> torch.device | None:
        """Returns the execution device, which users may change at any time."""
        current = self.execution_device
        if current is not self._device[0]:
            self._device = (current, None if current is None else resolve_device(current))
        return self._device[1]


def all_on_device(args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Returns whether no argument of a forward needs to be moved to a device.

    False if this is not certain.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.device != device:
                return False
        elif not isinstance(value, TYPES_WITHOUT_DEVICE):
            return False
    return True
