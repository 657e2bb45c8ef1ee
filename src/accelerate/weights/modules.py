"""The tensors of a module, the blocks of a model, and whole parameters of DeepSpeed's sharded ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import ConfigurationError, as_builtin, is_deepspeed_available, listed


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
    """Return whether a parameter of a model is a distributed tensor of torch.

    Args:
        model: any module.
    """
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
    """Return whether a tensor or module is one of some modules, or inside one.

    Names of modules may be parts of names: "head" matches "decoder.head", too.
    """
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
        module: the module that is searched.
        name: its own dotted name.
        whole: names of classes that are always one block.
        opened: names of modules that are no blocks.
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
