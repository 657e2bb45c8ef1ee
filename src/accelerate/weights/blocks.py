"""Blocks of a model: the parts that are brought to a device, and leave it, as a whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from accelerate.weights.modules import named_module_tensors

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

    What stands in a list of modules is called through its `forward`, which is not certain of other modules,
    whose parts may be called one by one. So a block is a module of such a list, without lists of its own; one
    of a named class; or, anywhere else, the tensors of one module alone.

    Args:
        module: where to look.
        name: its own dotted name.
        whole: names of classes that are always one block.
        opened: names of modules that are none.
        repeated: whether the module is part of one that stands in a list.

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
    """Whether a module can be called: lists of modules, and bare `nn.Module`s, cannot.

    Args:
        module: any module.
    """
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _has_list(module: nn.Module) -> bool:
    return any(isinstance(inner, LISTS) or not has_forward(inner) for inner in module.modules())
