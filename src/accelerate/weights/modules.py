"""The tensors of a module, the blocks of a model, and names that share one tensor, also in files."""

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
    """Yield the parameters of a module, then its buffers, with their names.

    Args:
        module: the module.
        include_buffers: whether buffers are yielded.
        recurse: whether those of inner modules are, under dotted names.
        remove_non_persistent: whether buffers that are not part of the state dict are left out.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in left_out:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of buffers that are not part of the state dict.

    Args:
        module: the module.
        recurse: whether inner modules are looked at, too.
        fqns: whether names are dotted ones, as seen from `module`; otherwise those in their own modules.
    """
    return {
        f"{path}.{name}" if fqns and path else name
        for path, inner in (module.named_modules() if recurse else [("", module)])
        for name in torch_private.non_persistent_buffers(inner)
    }


def get_module_leaves(module_sizes: Iterable[str]) -> list[str]:
    """Return the names that have no other names inside: those of tensors, where tensors are named.

    Args:
        module_sizes: dotted names, or a mapping by them such as `compute_module_sizes` returns.
    """
    inner = {name.rpartition(".")[0] for name in module_sizes if name}
    return [name for name in module_sizes if name not in inner]


def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[nn.Module] | list[tuple[str, nn.Module]]:
    """Return the modules of a model, each after those inside it; the model itself is the last.

    Args:
        model: any module.
        return_fqns: whether they come with their dotted names; that of the model is "".
    """
    named = list(_bottom_up("", model))
    return named if return_fqns else [module for _, module in named]


def _bottom_up(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        yield from _bottom_up(f"{name}.{key}" if name else key, child)
    yield name, module


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether a parameter of a model is a distributed tensor of torch."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return how many processes share each layer, as a model says; None: it does not.

    Args:
        model: any module. Models of transformers say it in `tp_size`, or from version 5 on in
            `config.distributed_config.tp_size`, where `distributed_config` is an object or a dictionary.
    """
    size: int | None = getattr(model, "tp_size", None)
    if size is not None:
        return size
    settings = getattr(getattr(model, "config", None), "distributed_config", None)
    return settings.get("tp_size") if isinstance(settings, Mapping) else getattr(settings, "tp_size", None)


def all_tensors(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Return all parameters and buffers of a module by name; those with several names are listed for each."""
    parameters = module.named_parameters(recurse=recurse, remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(recurse=recurse, remove_duplicate=False))}


def check_values(tensors: Mapping[str, Tensor], purpose: str, fix: str) -> None:
    """Refuse tensors on the meta device, which have no values to be moved, kept, filled or saved."""
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        text = f"{listed(empty)} have no values to {purpose}: they are on the meta device. {fix}"
        raise as_builtin(ConfigurationError(text), NotImplementedError)


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Return whether a tensor or module is in one of some modules: "head" matches "decoder.head", too."""
    return any(f".{module}." in f".{name}." for module in modules)


LISTS = (nn.ModuleList, nn.ModuleDict)
CONTAINERS = (*LISTS, nn.Sequential)


def find_blocks(
    module: nn.Module,
    name: str = "",
    whole: Collection[str] = (),
    opened: Collection[str] = (),
    repeated: bool = False,
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the blocks of a module in its order: each tensor belongs to exactly one of them.

    An entry of a list of modules is called through its `forward`, which is not certain of other modules,
    whose parts may be called one by one. So a block is a module of such a list, without lists of its own; one
    of a named class; or, anywhere else, the tensors of one module alone.

    Args:
        whole: names of classes that are always one block; `opened`: of modules that are no blocks.
        repeated: whether the module is part of an entry of a list.

    Yields:
        Name, module, and whether the block has the tensors of all modules inside, too.
    """
    is_block = type(module).__name__ in whole or (repeated and has_forward(module) and not _has_list(module))
    if is_block and name not in opened:
        if next(named_module_tensors(module, recurse=True), None) is not None:
            yield name, module, True
        return
    if next(named_module_tensors(module), None) is not None:
        yield name, module, False
    inside = repeated or isinstance(module, CONTAINERS)
    for child_name, child in module._modules.items():
        if child is None:
            continue
        yield from find_blocks(child, f"{name}.{child_name}" if name else child_name, whole, opened, inside)


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: lists of modules, and bare `nn.Module`s, cannot."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _has_list(module: nn.Module) -> bool:
    return any(isinstance(inner, LISTS) or not has_forward(inner) for inner in module.modules())


def GatheredParameters(
    params: Iterable[nn.Parameter] | nn.Parameter,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[Any]:
    """Return a context in which parameters that ZeRO stage 3 has sharded are whole; called on all ranks.

    Without DeepSpeed parameters are whole anyway, and the context does nothing.

    Args:
        params: the parameters.
        modifier_rank: the rank whose changes are kept and sent to the others; None: changes are lost.
        fwd_module: another module whose forward uses them.
        enabled: whether it does anything.

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
    """Return contiguous tensors without shared memory by their first names, and the first of each other name.

    Tensors that overlap without being the same are all kept, those after the first as copies.
    """
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    firsts: dict[tuple[Any, ...], str] = {}
    memory: set[Any] = set()
    for name, tensor in addressable(state).items():
        _check_storable(name, tensor)
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        identity = (*storage, tensor.storage_offset(), *layout)
        if tensor.numel() and identity in firsts:
            aliases[name] = firsts[identity]
            continue
        firsts[identity] = name
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        kept[name] = tensor.clone() if tensor.numel() and storage in memory else tensor
        memory.add(storage)
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
    filled = {memory_of(own[name]) for name in state if name in own}
    return [name for name, tensor in own.items() if name not in state and memory_of(tensor) not in filled]


def memory_of(tensor: Any) -> Any:
    """Return what identifies the memory of a tensor and how it is read; of anything else its identity."""
    if not isinstance(tensor, Tensor) or not tensor.data_ptr():  # one that wraps others has no address
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


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


def move_module(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Return a module after it was moved to a device; what was tied stays tied.

    torch replaces parameters that are moved to some devices: XLA, and those that other packages register.
    """
    tied = find_tied_parameters(module)
    moved = module.to(device)
    if tied and find_tied_parameters(moved) != tied:
        retie_parameters(moved, tied)
    return moved


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
