"""torch.compile, over a whole model or over its repeated blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from accelerate import torch_private
from accelerate.base import DynamoBackend

if TYPE_CHECKING:
    from accelerate.plugins import TorchDynamoPlugin

Model = TypeVar("Model", bound=nn.Module)

Compiler = Callable[[nn.Module], nn.Module]


def compiler_for(plugin: TorchDynamoPlugin) -> Compiler:
    """Return what compiles a model the way a plugin says; without a backend it returns the model as it is."""
    if plugin.backend == DynamoBackend.NO:
        return lambda module: module
    arguments = plugin.to_kwargs()

    def compile_whole(module: nn.Module) -> nn.Module:
        return module if is_compiled_module(module) else cast(nn.Module, torch.compile(module, **arguments))

    return partial(compile_regions, **arguments) if plugin.use_regional_compilation else compile_whole


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module is what `torch.compile(module)` returns, and not compiled in place."""
    # No module is compiled before dynamo is imported, and importing it takes a second.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a module or any module inside it is compiled, as a wrapper or in place."""
    return any(map(_is_compiled, module.modules()))


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is a list of blocks that are all of one class."""
    blocks = map(torch_private.uncompiled, module) if isinstance(module, nn.ModuleList) else ()
    return len({type(block) for block in blocks}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is or holds a list of blocks of one class."""
    return any(is_repeated_blocks(inner) for inner in module.modules())


def compile_regions(module: Model, **compile_kwargs: Any) -> Model:
    """Compile a model by region: blocks of one class share one compilation, so the first step starts sooner.

    The regions are compiled in place, as by `nn.Module.compile`: the model stays the same object, and the
    names in its state dict stay as they are.

    Args:
        module: The model; without repeated blocks it is one region.
        **compile_kwargs: Arguments of torch.compile.

    Returns:
        The same model.
    """
    if is_repeated_blocks(module):
        for block in module.children():
            _compile_once(block, compile_kwargs)
    elif has_repeated_blocks(module):
        for child in module.children():
            compile_regions(child, **compile_kwargs)
    else:
        _compile_once(module, compile_kwargs)
    return module


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile by region, in place, the model inside a DeepSpeed engine or one that `fully_shard` shards.

    Args:
        module: The engine or its model, or the model.
        **compile_kwargs: Arguments of torch.compile.
    """
    compile_regions(module, **compile_kwargs)


compile_regions_fsdp2 = compile_regions_deepspeed


def _compile_once(module: nn.Module, compile_kwargs: dict[str, Any]) -> None:
    if not _is_compiled(module):
        module.compile(**compile_kwargs)


def _is_compiled(module: nn.Module) -> bool:
    return is_compiled_module(module) or torch_private.is_compiled_in_place(module)
