"""Compilation of models or repeated blocks, removal of wrappers, and calls in place of torch functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from accelerate import torch_private
from accelerate.base import DynamoBackend

if TYPE_CHECKING:
    from accelerate.plugins import TorchDynamoPlugin

Model = TypeVar("Model", bound=nn.Module)

Compiler = Callable[[nn.Module], nn.Module]

# Module and class of wrappers with the attribute `.module`. A class that is not imported wraps nothing.
PARALLEL_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.nn.parallel", "DataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("deepspeed", "DeepSpeedEngine"),
)


class FunctionMode(TorchFunctionMode):
    """Context in which a function is called in place of the functions of torch.

    Args:
        call: Returns the result of a function of torch for its arguments and keyword arguments.
    """

    def __init__(self, call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._call(func, args, kwargs or {})


def compiler_for(plugin: TorchDynamoPlugin) -> Compiler:
    """Returns a function that compiles a model as a plugin sets, or returns it unchanged."""
    if plugin.backend == DynamoBackend.NO:
        return lambda module: module
    arguments = plugin.to_kwargs()

    def compile_whole(module: nn.Module) -> nn.Module:
        return module if is_compiled_module(module) else cast(nn.Module, torch.compile(module, **arguments))

    return partial(compile_regions, **arguments) if plugin.use_regional_compilation else compile_whole


def is_compiled_module(module: nn.Module) -> bool:
    """Returns whether a module is what `torch.compile(module)` returns, and not compiled in place."""
    return torch_private.is_optimized_module(module)


def has_compiled_regions(module: nn.Module) -> bool:
    """Returns whether a module or one of its submodules is compiled, as a wrapper or in place."""
    return any(map(_is_compiled, module.modules()))


def is_repeated_blocks(module: nn.Module) -> bool:
    """Returns whether a module is a list of blocks of one class."""
    blocks = map(torch_private.uncompiled, module) if isinstance(module, nn.ModuleList) else ()
    return len({type(block) for block in blocks}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Returns whether a module is or contains a list of blocks of one class."""
    return any(is_repeated_blocks(inner) for inner in module.modules())


def compile_regions(module: Model, **compile_kwargs: Any) -> Model:
    """Compiles a model by region, so that blocks of one class share one compilation.

    The first step then starts sooner. The regions are compiled in place, as by `nn.Module.compile`, so that
    the model object and the names in its state dict do not change.

    Args:
        module: The model, which is one region if it has no repeated blocks.
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
    """Compiles by region, in place, a model in a DeepSpeed engine or a model sharded by `fully_shard`.

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


# Removal of wrappers


def extract_model_from_parallel(
    model: Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Model:
    """Returns the model inside its wrappers, which is the same object if there are none.

    Args:
        model: A prepared model, or any other.
        keep_fp32_wrapper: Whether to keep the forward that runs under mixed precision. False removes it from
            the model itself, which also affects its wrappers.
        keep_torch_compile: Whether to keep the compiled module.
        recursive: Whether to replace wrapped submodules by the modules inside them, too.

    Returns:
        The model. If torch.compile wraps another wrapper and is kept, it is a new compiled module with the
        same parameters.
    """
    bare: Any
    bare, compiled = _peel(model)
    if not keep_fp32_wrapper:
        _restore_forward(bare)
    if recursive:
        bare = _unwrap_inside(bare, keep_fp32_wrapper, keep_torch_compile)
    if compiled is not None and keep_torch_compile:
        is_same = torch_private.uncompiled(compiled) is bare
        bare = compiled if is_same else type(compiled)(bare, compiled.dynamo_ctx)
    return bare  # type: ignore[no-any-return]  # of the class that the user gave to `prepare`


def is_peft_model(model: nn.Module) -> bool:
    """Returns whether the model inside all wrappers is a `PeftModel`."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(
        extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel
    )


def _peel(model: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """Returns the bare model and the innermost compiled module around it."""
    known = [(name, kind) for name, kind in PARALLEL_WRAPPERS if name in sys.modules]
    wrappers = tuple(getattr(sys.modules[name], kind) for name, kind in known)
    compiled = None
    while True:
        if is_compiled_module(model):
            compiled, model = model, torch_private.uncompiled(model)
        elif isinstance(model, wrappers):
            model = model.module
        else:
            return model, compiled


def _restore_forward(model: nn.Module) -> None:
    attributes = vars(model)
    if "_original_forward" in attributes:  # stored by programs that wrap the forward
        attributes["forward"] = attributes.pop("_original_forward")
    # The forward of mixed precision or of a recomputation has a method that restores the one before.
    while (restore := getattr(attributes.get("forward"), "restore", None)) is not None:
        restore(model)
    if getattr(attributes.get("forward"), "__func__", None) is type(model).forward:
        del attributes["forward"]


def _unwrap_inside(model: nn.Module, keep_fp32_wrapper: bool, keep_torch_compile: bool) -> nn.Module:
    # A wrapper of any library contains only a submodule with the name `module`.
    while list(model._modules) == ["module"] and not model._parameters and not model._buffers:
        model = model.module  # type: ignore[assignment]
    for name, child in list(model.named_children()):
        inner = extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, recursive=True)
        if inner is not child:
            setattr(model, name, inner)
    return model
