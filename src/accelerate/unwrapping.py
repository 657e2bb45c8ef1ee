"""Take every wrapper off a model."""

from __future__ import annotations

import sys
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import nn

from accelerate import torch_private
from accelerate.compilation import is_compiled_module

Model = TypeVar("Model", bound=nn.Module)

# Module and class of what wraps a model and keeps it as `.module`; one that was never imported wraps nothing.
PARALLEL_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.nn.parallel", "DataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("deepspeed", "DeepSpeedEngine"),
)


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
