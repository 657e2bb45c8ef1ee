"""Walk the tensors of a module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from accelerate import torch_private


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
    if not recurse:
        return set(torch_private.non_persistent_buffers(module))
    return {
        f"{path}.{name}" if fqns and path else name
        for path, inner in module.named_modules()
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
    for child_name, child in module.named_children():
        yield from _bottom_up(f"{name}.{child_name}" if name else child_name, child)
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


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a module by name; one with several names is there several times.

    Args:
        module: the module.
    """
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}
