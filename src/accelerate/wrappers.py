"""The wrappers of a model: put torch.compile on it or on its repeated blocks, and take every wrapper off."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import nn

from accelerate import torch_private
from accelerate.base import DynamoBackend

if TYPE_CHECKING:
    from accelerate.plugins import TorchDynamoPlugin

Model = TypeVar("Model", bound=nn.Module)

Compiler = Callable[[nn.Module], nn.Module]

# Module and class of what wraps a model and keeps it as `.module`; one that was never imported wraps nothing.
PARALLEL_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.nn.parallel", "DataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("deepspeed", "DeepSpeedEngine"),
)


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


# Taking them off


@runtime_checkable
class WrappedForward(Protocol):
    """A callable in a model's `__dict__` as `forward`, which can be removed again."""

    def restore(self, module: nn.Module) -> None:
        """Restore the forward that the module had before."""


def extract_model_from_parallel(
    model: Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Model:
    """Return the model inside its wrappers: the very same object when there are none.

    Args:
        model: A model as `prepare` returns it, or any other.
        keep_fp32_wrapper: Whether its forward still runs under mixed precision; False takes that off the
            model itself, also for those who hold it wrapped.
        keep_torch_compile: Whether what was compiled is returned compiled.
        recursive: Whether the modules inside the model are unwrapped too, and put in the place of their
            wrappers.

    Returns:
        The model. Only where torch.compile is outside another wrapper, and is kept, it is a new compiled
        module around the model, which shares its parameters.
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
    """Return whether the model inside all wrappers is one of the peft package."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(
        extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel
    )


def _peel(model: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """Return the bare model and the innermost compiled module around it."""
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
    own = vars(model)
    if "_original_forward" in own:  # kept there by programs that wrap forward themselves
        own["forward"] = own.pop("_original_forward")
    while isinstance(forward := own.get("forward"), WrappedForward):
        forward.restore(model)
    if getattr(forward, "__func__", None) is type(model).forward:
        del own["forward"]


def _unwrap_inside(model: nn.Module, keep_fp32_wrapper: bool, keep_torch_compile: bool) -> nn.Module:
    # Wrappers of any library hold nothing but another module, called `module`.
    while list(model._modules) == ["module"] and not model._parameters and not model._buffers:
        model = model.module  # type: ignore[assignment]
    for name, child in list(model.named_children()):
        inner = extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, recursive=True)
        if inner is not child:
            setattr(model, name, inner)
    return model
