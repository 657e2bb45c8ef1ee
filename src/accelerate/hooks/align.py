"""Move the tensors of a module, and its inputs, to the device that computes; prefetch and free them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from accelerate.base import populate_pages
from accelerate.devices import hardware_table, of_device
from accelerate.hooks.base import Arguments, ModelHook, not_traced
from accelerate.nested import find_device, send_to_device
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

PAGE = 4096


class Transfer:
    """How a thread loads weights on the CPU: it maps them from their files, with all pages."""

    def fetch(self, block: AlignDevicesHook) -> Any:
        """Return weights, or None where there is no room for them; called in a thread of its own."""
        weights = block.fetch()
        for weight in weights:
            if not weight.is_cpu or not weight.is_contiguous():
                continue
            # Else the block would wait for each page.
            if not populate_pages(weight.data_ptr(), weight.nbytes):
                weight.reshape(-1).view(torch.uint8)[::PAGE].sum()
        return weights

    def receive(self, fetched: Any) -> Any:
        """Return the weights that `fetch` loaded, ready for the thread that computes."""
        return fetched


class StreamTransfer(Transfer):
    """How a thread loads weights to an accelerator: from pinned memory, over a stream of its own."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self.device = device
        self.module = module
        self.stream = module.Stream(device=device)

    def fetch(self, block: AlignDevicesHook) -> Any:
        if not self._has_room(block.count_bytes()):
            return None
        try:
            with self.module.stream(self.stream):
                weights = block.fetch(non_blocking=True)
                return weights, self.stream.record_event()
        except torch.OutOfMemoryError:
            return None  # the block loads them itself, when the one before is freed

    def receive(self, fetched: Any) -> Any:
        weights, arrived = fetched
        current = self.module.current_stream(self.device)
        current.wait_event(arrived)
        for weight in weights:
            if weight.device == self.device:
                weight.record_stream(current)  # their memory is not used again before the block is done
        return weights

    def _has_room(self, needed: int) -> bool:
        free = self.module.mem_get_info(self.device)[0]
        held = self.module.memory_reserved(self.device) - self.module.memory_allocated(self.device)
        return bool(free + held >= needed)


def transfer_to(device: torch.device) -> Transfer:
    """Return the transfer to a device: over a stream where its torch module has them."""
    backend = of_device(device)
    if backend.is_host or device.type == "meta":
        return Transfer()
    module = hardware_table.named(device.type).torch_module()
    return StreamTransfer(device, module) if hasattr(module, "Stream") else Transfer()


class Prefetcher:
    """Load the weights of a model's blocks, one block ahead.

    It records which block follows which. While one computes, a thread loads the weights of the one that
    followed it before; so there are never more than two on the device. Another order than before is slower,
    and becomes the one that is expected.
    """

    def __init__(
        self, device: torch.device, transfer: Callable[[torch.device], Transfer] = transfer_to
    ) -> None:
        self.device = device
        self._make_transfer = transfer
        self._following: dict[int, AlignDevicesHook] = {}
        self._last: AlignDevicesHook | None = None
        self._coming: tuple[AlignDevicesHook, Future[Any]] | None = None

    def __reduce__(self) -> Any:
        return Prefetcher, (self.device, self._make_transfer)  # a copy of the model begins anew

    @cached_property
    def _worker(self) -> tuple[Transfer, ThreadPoolExecutor]:
        # The thread ends when this object does.
        return self._make_transfer(self.device), ThreadPoolExecutor(1, "accelerate-prefetch")

    def take(self, block: AlignDevicesHook) -> list[Tensor]:
        """Return the weights of a block, and prefetch those of the one that followed it before."""
        weights = self._claim(block)
        if weights is None:
            weights = block.fetch()
        if self._last is not None:
            self._following[id(self._last)] = block
        self._last = block
        following = self._following.get(id(block))
        if following is not None and following is not block:
            transfer, thread = self._worker
            self._coming = following, thread.submit(transfer.fetch, following)
        return weights

    def _claim(self, block: AlignDevicesHook) -> list[Tensor] | None:
        """Return the prefetched weights, if they are those of this block."""
        if self._coming is None:
            return None
        expected, coming = self._coming
        self._coming = None
        if expected is not block:
            wait([coming])  # else three blocks would be on the device
            return None
        fetched = coming.result()
        return None if fetched is None else self._worker[0].receive(fetched)


META = torch.device("meta")
Tensors = dict[str, Any]
Shared = dict[int, dict[torch.device, Tensor]]
TYPES_WITHOUT_DEVICE = (int, float, bool, str, type(None))
"""Types of arguments that have no device."""


@dataclass
class Slot:
    """One offloaded tensor: an entry of a module's parameters or buffers."""

    owner: nn.Module
    tensors: Tensors  # the parameters of the owner, or its buffers
    key: str  # the tensor's name there
    source: Any  # has a `weights_map` of its values
    name: str  # their name there
    original_device: torch.device
    empty: Tensor  # without values, is there in between; gives dtype and `requires_grad`
    tied: list[tuple[Tensors, str]] = field(default_factory=list)  # other entries with the same parameter
    filled: Tensor | None = None  # made of the values; where those stay in memory anyway, it is used again
    address: int | None = None  # of the values that are used again

    def read(self, device: torch.device, non_blocking: bool = False) -> Tensor:
        values: Tensor = self.source.weights_map[self.name]
        if is_derived_parameter(self.empty) or (values.device == device and values.dtype == self.empty.dtype):
            return values
        is_integer = not (values.is_floating_point() or values.is_complex())
        dtype = values.dtype if is_integer else self.empty.dtype
        return values.to(device, dtype, non_blocking=non_blocking)

    def load(self, device: torch.device) -> None:
        """Read values and fill the slot; values in the same memory are wrapped once."""
        empty, filled = self.empty, self.filled
        values: Tensor = self.source.weights_map[self.name]
        if (
            self.address is not None
            and filled is not None
            and values.data_ptr() == self.address
            and self.tensors[self.key] is empty
            and filled.dtype == empty.dtype
            and filled.requires_grad is empty.requires_grad
        ):
            self._put(filled)
            return
        self.keep_changes()
        ready = self.read(device)
        self.fill(ready, device)
        is_used_again = ready is values and values.numel() and not is_derived_parameter(empty)
        self.address = values.data_ptr() if is_used_again else None

    def fill(self, values: Tensor, device: torch.device) -> None:
        """Fill the slot with values as `read` returned them."""
        self.address = None
        self.filled = self._make(values, device)
        self._put(self.filled)

    def clear(self) -> None:
        """Take the values out again."""
        if self.address is None:
            self.filled = None
        if is_derived_parameter(self.empty):
            drop_values(self.owner)
        self._put(self.empty)

    def is_empty(self) -> bool:
        current = self.tensors[self.key]
        return current is not None and current.device.type == "meta"

    def keep_changes(self) -> None:
        """Keep the empty tensor that is there: users may have replaced it in between."""
        if self.is_empty():
            self.empty = self.tensors[self.key]

    def _put(self, tensor: Tensor) -> None:
        self.tensors[self.key] = tensor
        for tensors, key in self.tied:
            tensors[key] = tensor

    def _make(self, values: Tensor, device: torch.device) -> Tensor:
        if is_derived_parameter(self.empty):
            statistics = self.source.weights_map.get(scales_name(self.name))
            dtype = None if statistics is None else values.dtype
            set_module_tensor_to_device(self.owner, self.key, device, values, dtype, statistics)
            own: Tensor = self.tensors[self.key]
            return own
        return replacement_for(self.empty, values)


def find_slots(
    module: nn.Module, source: Any, with_buffers: bool, with_inner: bool
) -> tuple[list[Slot], dict[str, Tensor]]:
    """Return a slot for each tensor of a module that is offloaded; and the others, by name, that stay."""
    slots: dict[int, Slot] = {}
    stay: dict[str, Tensor] = {}
    left_out = get_non_persistent_buffers(module, recurse=with_inner, fqns=True)
    for path, owner in module.named_modules() if with_inner else [("", module)]:
        for tensors in (cast("Tensors", owner._parameters), cast("Tensors", owner._buffers)):
            for key, tensor in tensors.items():
                name = f"{path}.{key}" if path else key
                if tensor is None:
                    continue
                if tensors is owner._buffers and (not with_buffers or name in left_out):
                    stay[name] = tensor
                elif id(tensor) in slots:
                    slots[id(tensor)].tied.append((tensors, key))
                else:
                    slots[id(tensor)] = Slot(owner, tensors, key, source, name, tensor.device, tensor)
    return list(slots.values()), stay


_internal = partial(field, init=False, repr=False)


@dataclass(eq=False)
class AlignDevicesHook(ModelHook):
    """Inputs, and the module's own tensors, are on the right device when it computes.

    Args:
        execution_device: that computes; None leaves inputs where they are.
        offload: whether the module's tensors are offloaded, and loaded for the forward only.
        io_same_device: whether outputs go back to the device that the inputs came from.
        weights_map: values of the offloaded tensors by name; None takes them from the module to the CPU.
        offload_buffers: whether buffers are offloaded, too.
        place_submodules: whether the tensors of all modules inside are meant, too.
        skip_keys: keyword arguments and keys of outputs that stay where they are.
        tied_params_map: parameters that several modules share, by the address of the original and by device.

    Attributes:
        input_device: that the inputs of the last call came from.
        original_devices: where offloaded tensors were before, by name; "meta" where they had no value.
        prefetcher: loads offloaded tensors one block ahead; None: they are loaded when they are used.
        block: the hook of the module around this one that loads its tensors; None: it does so itself.
        is_loaded: whether offloaded tensors are there now.
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
        """Whether the hook of the module around has loaded the tensors."""
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
            if slot.original_device.type != "meta" and (self.is_loaded or slot.is_empty()):
                slot.fill(slot.read(slot.original_device), slot.original_device)
        if self.block is not None:  # which may stay
            own = {id(slot) for slot in self.slots}
            self.block.slots = [slot for slot in self.block.slots if id(slot) not in own]
            self.block._members.pop(id(self), None)
        self.prefetcher, self.block, self.is_loaded, self.slots = None, None, False, []
        return module

    def join(self, block: AlignDevicesHook, module: nn.Module) -> None:
        """Become the hook of a module inside a block, whose hook loads the tensors from this `weights_map`.

        Outside of the block's forward this hook loads and frees them by itself, when its module is called.
        """
        own = (module._parameters, module._buffers)
        self.slots = [slot for slot in block.slots if any(slot.tensors is value for value in own)]
        self.original_devices = {slot.key: slot.original_device for slot in self.slots}
        for slot in self.slots:
            slot.source, slot.name = self, slot.key
        self.block = block
        block._members[id(self)] = (self, module)

    def _empty(self, module: nn.Module) -> None:
        named = dict(named_module_tensors(module, recurse=self.place_submodules))
        self.original_devices = {name: tensor.device for name, tensor in named.items()}
        self.slots, stay = find_slots(module, self, self.offload_buffers, self.place_submodules)
        if self.weights_map is None:
            self.weights_map = {slot.name: slot.empty.detach().to("cpu") for slot in self.slots}
        for slot in self.slots:
            if slot.empty.device.type != "meta":
                set_module_tensor_to_device(slot.owner, slot.key, META, clear_cache=False)
                slot.empty = slot.tensors[slot.key]
            slot.clear()
        for member, inner in list(self._members.values()):
            member.join(self, inner)
        if self.execution_device is not None:
            for name, tensor in stay.items():
                if tensor.device.type != "meta":
                    set_module_tensor_to_device(module, name, self.execution_device, clear_cache=False)

    def fetch(self, non_blocking: bool = False) -> list[Tensor]:
        """Return the values of all offloaded tensors there; those of `non_blocking` may be incomplete."""
        device = self._target() or torch.device("cpu")
        return [slot.read(device, non_blocking) for slot in self.slots]

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
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.is_loaded:
            for slot in self.slots:
                slot.clear()
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
                slot.fill(values, device)
        self.is_loaded = True

    def _target(self) -> torch.device | None:
        """Return the device that computes; users may assign another at any time."""
        written = self.execution_device
        if written is not self._device[0]:
            self._device = (written, None if written is None else resolve_device(written))
        return self._device[1]


def all_on_device(args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Whether nothing among the arguments of a forward needs to be moved to a device; False in doubt."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.device != device:
                return False
        elif not isinstance(value, TYPES_WITHOUT_DEVICE):
            return False
    return True
