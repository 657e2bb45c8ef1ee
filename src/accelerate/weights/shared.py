"""Names that share one tensor: detected in models and state dicts, stored once in a file, and restored."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base import CheckpointError, describe, wrong_value
from accelerate.devices import of_device
from accelerate.weights.placement import find_owner, mapped_device

RESERVED_NAME = "__metadata__"
"""Name of the metadata in a file of safetensors."""
ALIASES = "aliases"
"""Entry of the metadata: further names of tensors, as JSON."""


def addressable(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state whose tensors have addresses: others are copied to the CPU, each tensor once."""
    given: object = state
    if not isinstance(given, Mapping):
        fix = "pass a state dict, or safe_serialization=False"
        kind = type(given).__name__
        raise wrong_value("state", kind, "safetensors holds tensors by name", fix, AttributeError)
    tensors = {id(tensor): tensor for tensor in state.values() if isinstance(tensor, Tensor)}
    copies = {
        key: tensor.detach().cpu()
        for key, tensor in tensors.items()
        if not of_device(tensor.device).is_addressable
    }
    return {name: copies.get(id(tensor), tensor) for name, tensor in state.items()} if copies else state


def drop_shared(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Separate the first name of each tensor from the others.

    Returns:
        Contiguous tensors, no two of which share memory, by their first names; and for each other name the
        first one. Tensors that overlap without being the same are all kept, those after the first as copies.

    Raises:
        ConfigurationError: something is not a dense tensor with values.
    """
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    firsts: dict[tuple[Any, ...], str] = {}
    memory: set[Any] = set()
    for name, tensor in addressable(state).items():
        _check_storable(name, tensor)
        memory_of = (tensor.device, tensor.untyped_storage().data_ptr())
        layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        identity = (*memory_of, tensor.storage_offset(), *layout)
        if tensor.numel() and identity in firsts:
            aliases[name] = firsts[identity]
            continue
        firsts[identity] = name
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        kept[name] = tensor.clone() if tensor.numel() and memory_of in memory else tensor
        memory.add(memory_of)
    return kept, aliases


def _check_storable(name: object, tensor: object) -> None:
    """Refuse what a file of safetensors cannot hold."""
    fix = "pass safe_serialization=False"
    if not isinstance(name, str) or name == RESERVED_NAME:
        raise wrong_value("name", name, "safetensors cannot name a tensor so", "use another text as its name")
    if not isinstance(tensor, Tensor):
        raise wrong_value(name, type(tensor).__name__, "safetensors holds tensors only", fix, AttributeError)
    if tensor.is_meta:
        value, reason = "a tensor on the meta device", "it has no values to be saved"
        raise wrong_value(name, value, reason, "load its weights first")
    if tensor.layout != torch.strided:
        raise wrong_value(name, tensor.layout, "safetensors holds dense tensors only", fix)


def read_aliases(metadata: Mapping[str, str] | None, names: Collection[str], path: Path) -> dict[str, str]:
    """Return the further names of tensors in a file of safetensors, each with the name that it has there."""
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


def missing_names(own: Mapping[str, Any], state: Collection[str]) -> list[str]:
    """List what a state dict lacks of another one, where a tensor that has several names needs one."""
    filled = {_memory(own[name]) for name in state if name in own}
    return [name for name, tensor in own.items() if name not in state and _memory(tensor) not in filled]


def _memory(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor) or tensor.device.type == "meta" or not tensor.data_ptr():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()


logger = logging.getLogger(__name__)  # also used where no run is set up


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the names of each parameter that has several, as sorted lists.

    Args:
        model: any module, also one on the meta device.
        **kwargs: taken for compatibility.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether the configuration of a model says that it has tied parameters.

    Args:
        model: one of transformers says so by `tie_word_embeddings`, where it has output embeddings, or by
            `tie_encoder_decoder`; others say nothing.
    """
    config = getattr(model, "config", None)
    embeddings = [getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings")]
    if config is None or not all(map(callable, embeddings)):
        return False
    if getattr(config, "tie_word_embeddings", False) and embeddings[1]() is not None:  # type: ignore[misc]
        return True
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    return bool(is_encoder_decoder and getattr(config, "tie_encoder_decoder", False))


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Let each group of names share one parameter again: the first of them that has a value.

    Args:
        model: the module.
        tied_params: groups of names, as `find_tied_parameters` returns them.
    """
    for group in tied_params:
        homes = [find_owner(model, name) for name in group]
        tensors = [owner._parameters[name] for owner, name in homes]
        kept = next((tensor for tensor in tensors if tensor is not None and not tensor.is_meta), tensors[0])
        for owner, name in homes:
            owner._parameters[name] = kept


def retie_on_same_device(model: nn.Module, tied: Iterable[Iterable[str]]) -> None:
    """Let names that shared one parameter do so again, where they have the same device and dtype."""
    for group in tied:
        first: dict[tuple[torch.device, torch.dtype], nn.Parameter] = {}
        for owner, name in (find_owner(model, alias) for alias in group):
            parameter = owner.get_parameter(name)
            owner._parameters[name] = first.setdefault((parameter.device, parameter.dtype), parameter)


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]
) -> None:
    """Warn of parameters that a device map puts on several devices, where they are no longer one.

    Args:
        tied_params: groups of names, as `find_tied_parameters` returns them.
        device_map: devices by module.
    """
    for group in tied_params:
        devices = {name: mapped_device(name, device_map) for name in group}
        if len({str(device) for device in devices.values()}) > 1:
            logger.warning(
                f"Tied parameters are on different devices, where they are no longer one: {devices}. "
                "Put their modules on one device."
            )
