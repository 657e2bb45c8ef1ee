"""Tensors of a module, blocks of a model, and parameters with several names."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import (
    CheckpointError,
    ConfigurationError,
    as_builtin,
    describe,
    is_deepspeed_available,
    listed,
    wrong_value,
)
from accelerate.devices import of_device
from accelerate.weights.placement import find_owner, mapped_device


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters of a module and then its buffers, with their names.

    Args:
        module: the module.
        include_buffers: whether to yield buffers.
        recurse: whether to yield the tensors of submodules, with dotted names.
        remove_non_persistent: whether to skip buffers that are not part of the state dict.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    skipped = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in skipped:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Returns the names of buffers that are not part of the state dict.

    Args:
        module: the module.
        recurse: whether to include submodules.
        fqns: whether names are relative to `module`, instead of those within each submodule.
    """
    return {
        f"{path}.{name}" if fqns and path else name
        for path, inner in (module.named_modules() if recurse else [("", module)])
        for name in torch_private.non_persistent_buffers(inner)
    }


def get_module_leaves(module_sizes: Iterable[str]) -> list[str]:
    """Returns the names without submodules, which are those of tensors where tensors are named.

    Args:
        module_sizes: dotted names, or a mapping with such keys as `compute_module_sizes` returns.
    """
    inner = {name.rpartition(".")[0] for name in module_sizes if name}
    return [name for name in module_sizes if name not in inner]


def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[nn.Module] | list[tuple[str, nn.Module]]:
    """Returns the modules of a model, each after its submodules.

    Args:
        model: any module.
        return_fqns: whether to return dotted names, too. The name of the model is "".
    """
    named = list(_bottom_up("", model))
    return named if return_fqns else [module for _, module in named]


def _bottom_up(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        yield from _bottom_up(f"{name}.{key}" if name else key, child)
    yield name, module


def model_has_dtensor(model: nn.Module) -> bool:
    """Returns whether a parameter of a model is a `DTensor`."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """Returns the tensor-parallel size that a model declares, or None.

    Args:
        model: any module. Models of transformers declare it in `tp_size`, or from version 5 on in
            `config.distributed_config.tp_size`, where `distributed_config` is an object or a dictionary.
    """
    size: int | None = getattr(model, "tp_size", None)
    if size is not None:
        return size
    settings = getattr(getattr(model, "config", None), "distributed_config", None)
    return settings.get("tp_size") if isinstance(settings, Mapping) else getattr(settings, "tp_size", None)


def all_tensors(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Returns all parameters and buffers of a module by name.

    Those with several names are listed under each.
    """
    parameters = module.named_parameters(recurse=recurse, remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(recurse=recurse, remove_duplicate=False))}


def check_values(tensors: Mapping[str, Tensor], purpose: str, fix: str) -> None:
    """Raises an error for tensors on the meta device, which have no values to move, offload or save."""
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        text = f"{listed(empty)} have no values to {purpose}: they are on the meta device. {fix}"
        raise as_builtin(ConfigurationError(text), NotImplementedError)


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Returns whether a tensor or module is inside one of the modules, as "decoder.head" is in "head"."""
    return any(f".{module}." in f".{name}." for module in modules)


LISTS = (nn.ModuleList, nn.ModuleDict)
CONTAINERS = (*LISTS, nn.Sequential)


def find_blocks(
    module: nn.Module,
    name: str = "",
    whole: Collection[str] = (),
    split: Collection[str] = (),
    repeated: bool = False,
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yields the blocks of a module in order, such that each tensor belongs to exactly one block.

    An entry of a module list is called through its `forward`. Other modules may not be, because their
    submodules may be called one by one. So a block is an entry of a list that contains no list, a module of a
    named class, or otherwise the direct tensors of one module.

    Args:
        whole: names of classes that are always one block.
        split: names of modules that are not blocks.
        repeated: whether the module is part of an entry of a list.

    Yields:
        Name, module, and whether the block includes the tensors of all submodules.
    """
    is_block = type(module).__name__ in whole or (
        repeated and all(has_forward(inner) and not isinstance(inner, LISTS) for inner in module.modules())
    )
    if is_block and name not in split:
        if next(named_module_tensors(module, recurse=True), None) is not None:
            yield name, module, True
        return
    if next(named_module_tensors(module), None) is not None:
        yield name, module, False
    inside = repeated or isinstance(module, CONTAINERS)
    for child_name, child in module._modules.items():
        if child is None:
            continue
        yield from find_blocks(child, f"{name}.{child_name}" if name else child_name, whole, split, inside)


def has_forward(module: nn.Module) -> bool:
    """Returns whether a module can be called, which lists of modules and bare `nn.Module`s cannot."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def GatheredParameters(
    params: Iterable[nn.Parameter] | nn.Parameter,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[Any]:
    """Returns a context manager that gathers parameters sharded by ZeRO stage 3.

    Called on all ranks. Without DeepSpeed the parameters are not sharded, and the context has no effect.

    Args:
        params: the parameters.
        modifier_rank: the rank whose changes are broadcast to the others. None discards changes.
        fwd_module: another module whose forward uses them.
        enabled: whether to gather the parameters.

    Source: https://deepspeed.readthedocs.io/en/latest/zero3.html
    """
    if not is_deepspeed_available():
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        params, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled
    )
    return gathered


RESERVED_NAME = "__metadata__"
"""Name of the metadata in a file of safetensors."""
ALIASES = "aliases"
"""Key of the metadata entry with the aliases of tensors as JSON."""


def addressable(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a state dict whose tensors have data pointers.

    Tensors of other devices are copied to the CPU, each once.
    """
    untyped: object = state
    if not isinstance(untyped, Mapping):
        fix = "pass a state dict, or safe_serialization=False"
        kind = type(untyped).__name__
        raise wrong_value("state", kind, "safetensors holds tensors by name", fix, AttributeError)
    tensors = {id(tensor): tensor for tensor in state.values() if isinstance(tensor, Tensor)}
    on_cpu = {
        key: tensor.detach().cpu()
        for key, tensor in tensors.items()
        if not of_device(tensor.device).is_addressable
    }
    return {name: on_cpu.get(id(tensor), tensor) for name, tensor in state.items()} if on_cpu else state


def drop_shared(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns contiguous tensors by their first names, and the first name of each alias.

    Tensors that overlap without being equal are all returned, those after the first as copies.
    """
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[tuple[Any, ...], str] = {}
    memory: set[Any] = set()
    for name, tensor in addressable(state).items():
        check_storable(name, tensor)
        identity = identity_of(tensor)
        first = first_names.setdefault(identity, name)
        if first != name and tensor.numel():
            aliases[name] = first
            continue
        storage = identity[:2]
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        kept[name] = tensor.clone() if tensor.numel() and storage in memory else tensor
        memory.add(storage)
    return kept, aliases


def identity_of(tensor: Tensor) -> tuple[Any, ...]:
    """Returns a key of the elements of a dense tensor in memory, which begins with device and storage."""
    layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), *layout)


def check_storable(name: object, tensor: object) -> None:
    """Raises an error for an entry that a safetensors file cannot store."""
    fix = "pass safe_serialization=False"
    if not isinstance(name, str) or name == RESERVED_NAME:
        raise wrong_value("name", name, "safetensors does not support this name", "use another string")
    if not isinstance(tensor, Tensor):
        raise wrong_value(name, type(tensor).__name__, "safetensors holds tensors only", fix, AttributeError)
    if tensor.is_meta:
        value, reason = "a tensor on the meta device", "it has no values to be saved"
        raise wrong_value(name, value, reason, "load its weights first")
    if tensor.layout != torch.strided:
        raise wrong_value(name, tensor.layout, "safetensors holds dense tensors only", fix)


def read_aliases(metadata: Mapping[str, str] | None, names: Collection[str], path: Path) -> dict[str, str]:
    """Returns the aliases of tensors in a safetensors file, each with the name under which it is stored."""
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
    """Returns the names that a state dict lacks, where one name of a shared tensor is enough."""
    filled = {memory_of(own[name]) for name in state if name in own}
    return [name for name, tensor in own.items() if name not in state and memory_of(tensor) not in filled]


def memory_of(tensor: object) -> Any:
    """Returns a key for the memory and layout of a tensor, or the identity of any other object."""
    if not isinstance(tensor, Tensor) or not tensor.data_ptr():  # a wrapper subclass has no address
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


logger = logging.getLogger("accelerate.utils.modeling")  # the name by which clients filter it


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Returns the names of each parameter with several names as sorted lists.

    Args:
        model: any module, also one on the meta device.
        **kwargs: ignored, for compatibility.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Returns whether the configuration of a model declares tied parameters.

    Args:
        model: a model of transformers declares them by `tie_word_embeddings`, where it has output embeddings,
            or by `tie_encoder_decoder`. Others declare nothing.
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
    """Ties each group of names to the first of their parameters that has a value.

    Args:
        model: the module.
        tied_params: groups of names, as `find_tied_parameters` returns them.
    """
    for group in tied_params:
        owners = [find_owner(model, name) for name in group]
        tensors = [owner._parameters[name] for owner, name in owners]
        tied = next((tensor for tensor in tensors if tensor is not None and not tensor.is_meta), tensors[0])
        for owner, name in owners:
            owner._parameters[name] = tied


def move_module(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Moves a module to a device, and keeps its tied parameters tied.

    torch replaces parameters that are moved to some devices, such as XLA and those that other packages
    register.
    """
    tied = find_tied_parameters(module)
    moved = module.to(device)
    if tied and find_tied_parameters(moved) != tied:
        retie_parameters(moved, tied)
    return moved


def retie_on_same_device(model: nn.Module, tied: Iterable[Iterable[str]]) -> None:
    """Ties each group of names again where their parameters have the same device and dtype."""
    for group in tied:
        first: dict[tuple[torch.device, torch.dtype], nn.Parameter] = {}
        for owner, name in (find_owner(model, alias) for alias in group):
            parameter = owner.get_parameter(name)
            owner._parameters[name] = first.setdefault((parameter.device, parameter.dtype), parameter)


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]
) -> None:
    """Warns about tied parameters that a device map places on several devices.

    Args:
        tied_params: groups of names, as `find_tied_parameters` returns them.
        device_map: device of each module.
    """
    for group in tied_params:
        devices = {name: mapped_device(name, device_map) for name in group}
        if len({str(device) for device in devices.values()}) > 1:
            logger.warning(
                f"Tied parameters are on different devices and are no longer tied: {devices}. "
                "Put their modules on one device."
            )
