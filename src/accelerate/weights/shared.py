"""Names of a state dict that stand for one tensor: kept once in a file, brought back when it is read."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base import CheckpointError, describe, wrong_value
from accelerate.devices import of_device

RESERVED_NAME = "__metadata__"
"""Where a file of safetensors keeps what is said of it as a whole."""

ALIASES = "aliases"
"""Entry of the metadata: further names of tensors, as JSON."""


def addressable(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state whose tensors say where they lie: others are brought to the CPU, one tensor once.

    Args:
        state: tensors, and what else there is, by name.

    Raises:
        ConfigurationError: it is no dictionary.
    """
    given: object = state
    if not isinstance(given, Mapping):
        fix = "pass a state dict, or safe_serialization=False"
        kind = type(given).__name__
        raise wrong_value("state", kind, "safetensors holds tensors by name", fix, AttributeError)
    found = {id(each): each for each in state.values() if isinstance(each, Tensor)}
    copies = {
        key: each.detach().cpu() for key, each in found.items() if not of_device(each.device).is_addressable
    }
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
    fix = "pass safe_serialization=False"
    if not isinstance(name, str) or name == RESERVED_NAME:
        raise wrong_value("name", name, "safetensors cannot name a tensor so", "use another text as its name")
    if not isinstance(tensor, Tensor):
        raise wrong_value(name, type(tensor).__name__, "safetensors holds tensors only", fix, AttributeError)
    if tensor.device.type == "meta":
        raise wrong_value(
            name, "a tensor on the meta device", "it has no values to be saved", "load its weights first"
        )
    if tensor.layout != torch.strided:
        raise wrong_value(name, tensor.layout, "safetensors holds dense tensors only", fix)


def read_aliases(metadata: Mapping[str, str] | None, names: Collection[str], path: Path) -> dict[str, str]:
    """Return the further names of tensors that the metadata of a file gives.

    Args:
        metadata: of a file of safetensors; None where it has none.
        names: of the tensors in the file.
        path: the file, for messages.

    Returns:
        Further name -> the name of the tensor in the file.

    Raises:
        CheckpointError: they are not JSON of that form, or do not belong to the tensors in the file.
    """
    try:
        aliases = json.loads((metadata or {}).get(ALIASES, "{}"))
    except (ValueError, RecursionError) as error:
        raise _wrong_aliases(path, f"is not JSON ({describe(error)})") from error
    if not isinstance(aliases, dict):
        raise _wrong_aliases(path, f"holds a {type(aliases).__name__} instead of a dictionary of names")
    for name, first in aliases.items():
        if not isinstance(first, str):
            raise _wrong_aliases(path, f"gives {name!r} a {type(first).__name__} instead of a name")
        if name in names:
            raise _wrong_aliases(path, f"names {name!r}, and there is a tensor of that name already")
        if first not in names:
            raise _wrong_aliases(path, f"says that {name!r} is {first!r}, and no tensor has that name")
    return aliases


def _wrong_aliases(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: the entry {ALIASES!r} of its metadata {reason}. Save the weights again."
    )


def restore_shared(state: dict[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """Give each of several names of a tensor that tensor.

    Args:
        state: tensors by their first names.
        aliases: other names with the first one, as `read_aliases` returns them.
    """
    return {**state, **{name: state[first] for name, first in aliases.items()}}


def missing_names(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """List what a model has and a state dict lacks; a tensor that has several names needs one.

    Args:
        model: the module that is to be filled.
        state: tensors by name.
    """
    return lacking_names(model.state_dict(), state)


def lacking_names(own: Mapping[str, Any], state: Collection[str]) -> list[str]:
    """List what a state dict lacks of another one, where a tensor that has several names needs one.

    Args:
        own: what is needed by name, tensors of a module among it.
        state: the names that there are.
    """
    filled = {_memory(own[name]) for name in state if name in own}
    return [name for name, tensor in own.items() if name not in state and _memory(tensor) not in filled]


def _memory(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor) or tensor.device.type == "meta" or not tensor.data_ptr():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
