"""Names of a state dict that stand for one tensor: kept once in a file, brought back when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base.errors import wrong_value

RESERVED_NAME = "__metadata__"
"""Where a file of safetensors keeps what is said of it as a whole."""


WITHOUT_ADDRESS = ("xla",)
"""Devices whose tensors do not say where they lie: which of them share memory cannot be told."""


def addressable(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state whose tensors say where they lie: others are brought to the CPU, one tensor once.

    Args:
        state: tensors, and what else there is, by name.
    """
    found = {id(each): each for each in state.values() if isinstance(each, Tensor)}
    copies = {key: each.detach().cpu() for key, each in found.items() if each.device.type in WITHOUT_ADDRESS}
    return {name: copies.get(id(each), each) for name, each in state.items()} if copies else state


def drop_shared(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Separate the first name of each tensor from the others.

    Args:
        state: tensors by name.

    Returns:
        Contiguous tensors, no two of which share memory, by their first names; and for each other name the
        first one. Tensors that overlap without being the same are all kept, those after the first as copies.

    Raises:
        ConfigurationError: something is not a tensor with values that lie in memory one after the other.
    """
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    firsts: dict[tuple[Any, ...], str] = {}
    memory: set[Any] = set()
    for name, tensor in addressable(state).items():
        _check_storable(name, tensor)
        place = (tensor.device, tensor.untyped_storage().data_ptr())
        how = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        identity = (*place, tensor.storage_offset(), *how)
        if tensor.numel() and identity in firsts:
            aliases[name] = firsts[identity]
            continue
        firsts[identity] = name
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        kept[name] = tensor.clone() if tensor.numel() and place in memory else tensor
        memory.add(place)
    return kept, aliases


def _check_storable(name: object, tensor: object) -> None:
    """Refuse what a file of safetensors cannot hold.

    Raises:
        ConfigurationError: with the name, and what to do.
    """
    mend = "pass safe_serialization=False"
    if not isinstance(name, str) or name == RESERVED_NAME:
        raise wrong_value("name", name, "safetensors cannot name a tensor so", "use another text as its name")
    if not isinstance(tensor, Tensor):
        raise wrong_value(name, type(tensor).__name__, "safetensors holds tensors only", mend)
    if tensor.device.type == "meta":
        raise wrong_value(
            name, "a tensor on the meta device", "it has no values to be saved", "load its weights first"
        )
    if tensor.layout != torch.strided:
        raise wrong_value(name, tensor.layout, "safetensors holds dense tensors only", mend)


def restore_shared(state: dict[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """Give each of several names of a tensor that tensor.

    Args:
        state: tensors by their first names; added to.
        aliases: other names with the first one.
    """
    for name, first in aliases.items():
        if first in state:
            state.setdefault(name, state[first])
    return state


def missing_names(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """List what a model has and a state dict lacks; a tensor that has several names needs one.

    Args:
        model: the module that is to be filled.
        state: tensors by name.
    """
    own = model.state_dict()
    filled = {_memory(own[name]) for name in state if name in own}
    return [name for name, tensor in own.items() if name not in state and _memory(tensor) not in filled]


def _memory(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor) or tensor.device.type == "meta" or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
