"""Slots of a module's tensors, which are filled for its forward and empty in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from accelerate.weights import (
    STATISTICS,
    beside,
    get_non_persistent_buffers,
    is_own_class,
    let_go,
    set_module_tensor_to_device,
)

META = torch.device("meta")
Tensors = dict[str, Any]


@dataclass
class Slot:
    """One offloaded tensor: an entry of a module's parameters or buffers.

    Attributes:
        owner: the module that has it.
        tensors: its parameters, or its buffers.
        key: the tensor's name in them.
        source: what has a `weights_map` with its values.
        name: of the values there.
        home: where the tensor was before; "meta" where it had no values.
        empty: the tensor without values that is there in between; gives dtype and `requires_grad`.
        twins: other entries with the same parameter.
        filled: what was made of the values; where those stay in memory anyway, it is used again.
        address: of the values that are used again; None: they are not.
    """

    owner: nn.Module
    tensors: Tensors
    key: str
    source: Any
    name: str
    home: torch.device
    empty: Tensor
    twins: list[tuple[Tensors, str]] = field(default_factory=list)
    filled: Tensor | None = None
    address: int | None = None

    def read(self, device: torch.device, non_blocking: bool = False) -> Tensor:
        """Return its values, on a device."""
        values: Tensor = self.source.weights_map[self.name]
        if is_own_class(self.empty) or (values.device == device and values.dtype == self.empty.dtype):
            return values
        return values.to(device, _dtype_after(values, self.empty), non_blocking=non_blocking)

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
        is_used_again = ready is values and values.numel() and not is_own_class(empty)
        self.address = values.data_ptr() if is_used_again else None

    def fill(self, values: Tensor, device: torch.device) -> None:
        """Fill the slot.

        Args:
            values: as `read` returned them.
            device: they are on.
        """
        self.address = None
        self._put(self._make(values, device))

    def clear(self) -> None:
        """Take the values out again."""
        if self.address is None:
            self.filled = None
        if is_own_class(self.empty):
            let_go(self.owner)
        self.tensors[self.key] = self.empty
        for tensors, key in self.twins:
            tensors[key] = self.empty

    def is_empty(self) -> bool:
        """Whether the slot has no values."""
        current = self.tensors[self.key]
        return current is not None and current.device.type == "meta"

    def keep_changes(self) -> None:
        """Keep the empty tensor that is there: users may have replaced it in between."""
        if self.is_empty():
            self.empty = self.tensors[self.key]

    def _put(self, filled: Tensor) -> None:
        self.filled = self.tensors[self.key] = filled
        for tensors, key in self.twins:
            tensors[key] = filled

    def _make(self, values: Tensor, device: torch.device) -> Tensor:
        if is_own_class(self.empty):
            statistics = self.source.weights_map.get(beside(self.name, STATISTICS))
            dtype = None if statistics is None else values.dtype
            set_module_tensor_to_device(self.owner, self.key, device, values, dtype, statistics)
            own: Tensor = self.tensors[self.key]
            return own
        if not isinstance(self.empty, nn.Parameter):
            return values
        made = nn.Parameter(values, requires_grad=self.empty.requires_grad)
        if vars(self.empty):
            vars(made).update(vars(self.empty))
        return made


def _dtype_after(values: Tensor, empty: Tensor) -> torch.dtype:
    counts = not (values.is_floating_point() or values.is_complex())
    return values.dtype if counts else empty.dtype


def find_slots(
    module: nn.Module, source: Any, with_buffers: bool, with_inner: bool
) -> tuple[list[Slot], dict[str, Tensor]]:
    """Find the slots of a module's tensors.

    Args:
        module: the module.
        source: what has a `weights_map` with their values.
        with_buffers: whether buffers are offloaded as parameters are; non-persistent ones stay.
        with_inner: whether tensors of the modules inside are among them.

    Returns:
        A slot for each tensor; and those that stay, by name.
    """
    slots: dict[int, Slot] = {}
    stay: dict[str, Tensor] = {}
    left_out = get_non_persistent_buffers(module, recurse=with_inner, fqns=True)
    for path, owner in module.named_modules() if with_inner else [("", module)]:
        for tensors in (owner._parameters, owner._buffers):
            for key, tensor in cast("Mapping[str, Tensor | None]", tensors).items():
                name = f"{path}.{key}" if path else key
                if tensor is None:
                    continue
                if tensors is owner._buffers and (not with_buffers or name in left_out):
                    stay[name] = tensor
                elif id(tensor) in slots:
                    slots[id(tensor)].twins.append((cast("Tensors", tensors), key))
                else:
                    own = cast("Tensors", tensors)
                    slots[id(tensor)] = Slot(owner, own, key, source, name, tensor.device, tensor)
    return list(slots.values()), stay
