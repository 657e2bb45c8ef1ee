"""Interface of hooks around the forward of a module, and functions that attach and remove them."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from accelerate.base import wrong_value
from accelerate.devices import BACKENDS
from accelerate.weights import read_dtype

Model = TypeVar("Model", bound=nn.Module)

Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a forward."""
HOOK = "_hf_hook"
"""Attribute of a module with its hook."""
FORWARD = "_old_forward"
"""Attribute of a module with its original forward."""

METHODS_THAT_MOVE = ["to", *(backend.name for backend in BACKENDS)]
"""Methods of a module that `dispatch_model` replaces, to which packages of vendors add theirs."""


class ModelHook:
    """Base class of hooks around a forward, which change nothing by default.

    Attributes:
        no_grad: whether the forward runs without gradients.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepares a module when the hook is attached to it.

        Args:
            module: the module.

        Returns:
            The module that replaces it, usually the same.
        """
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Runs before a forward.

        Args:
            module: the module.
            *args: positional arguments of the forward.
            **kwargs: keyword arguments of the forward.

        Returns:
            The arguments that are passed to the forward.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> Any:
        """Runs after a forward.

        Args:
            module: the module.
            output: output of the forward.

        Returns:
            The output that is returned to the caller.
        """
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undoes `init_hook` when the hook is removed.

        Args:
            module: the module.
        """
        return module


class SequentialHook(ModelHook):
    """Chain of hooks that run in order, both before and after the forward.

    Args:
        *hooks: hooks in the order in which they run.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: Model, hook: ModelHook, append: bool = False) -> Model:
    """Attaches a hook around the forward of a module.

    Args:
        module: the module.
        hook: the hook, or any object with the methods of a hook.
        append: whether it runs after the existing hook, instead of replacing it.

    Returns:
        The module, or what `init_hook` returned instead.
    """
    if append and hasattr(module, HOOK):
        existing = module._hf_hook
        remove_hook_from_module(module)
        hook = SequentialHook(existing, hook)  # type: ignore[arg-type]
    old = module._old_forward if hasattr(module, FORWARD) else module.forward
    module = hook.init_hook(module)  # type: ignore[assignment]  # most hooks return the same module
    setattr(module, HOOK, hook)
    setattr(module, FORWARD, old)
    # A partial object, unlike a nested function, is copied and pickled with its module.
    wrapped = functools.partial(_run_around, module)
    module.forward = functools.update_wrapper(wrapped, old)  # type: ignore[arg-type]
    return module


def remove_hook_from_module(module: Model, recurse: bool = False) -> Model:
    """Removes the hook of a module and restores its forward.

    Args:
        module: the module, with a hook or without.
        recurse: whether to remove the hooks of all submodules, too.
    """
    hook = module.__dict__.pop(HOOK, None)
    if hook is not None:
        hook.detach_hook(module)
    old = module.__dict__.pop(FORWARD, None)
    if old is not None:
        del module.forward
        if old != module.forward:  # it was not that of the class
            module.forward = old
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Removes the hooks of a module and of all submodules.

    Args:
        module: the module.
    """
    remove_hook_from_module(module, recurse=True)


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """Returns the hooks of a module, where those of a chain are separate."""
    hook = getattr(module, HOOK, None)
    if hook is None:
        return ()
    return tuple(hook.hooks) if isinstance(hook, SequentialHook) else (hook,)


def not_traced(function: Function) -> Function:
    """Excludes a method of a hook from tracing by `torch.compile`.

    `torch.compiler.disable` imports the compiler, which is slow. So it is called only after another module
    has imported the compiler.
    """
    untraced: list[Any] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not untraced:
            untraced.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return untraced[0](*args, **kwargs)

    return cast("Function", call)


def _run_around(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook: Any = module._hf_hook
    if getattr(hook, "is_loaded_by_block", False):
        return module._old_forward(*args, **kwargs)
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    with torch.no_grad() if hook.no_grad else nullcontext():
        output = module._old_forward(*args, **kwargs)
    return hook.post_forward(module, output)


class LayerwiseCastingHook(ModelHook):
    """Hook that stores the weights of a layer in a smaller dtype between forwards.

    Args:
        storage_dtype: dtype of the weights between forwards.
        compute_dtype: dtype of the weights during the forward.
        non_blocking: whether conversions may be asynchronous.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)

    @not_traced
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @not_traced
    def post_forward(self, module: nn.Module, output: object) -> Any:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
READ_BY_OTHERS = (NonDynamicallyQuantizableLinear, nn.TransformerEncoderLayer)
"""Output projection of attention, and module whose fast path uses the weights of its layers directly."""


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: str | torch.dtype,
    compute_dtype: str | torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Stores the weights of linear and convolutional layers in a smaller dtype between forwards.

    Layers that share weights with modules of other types, such as embeddings, are not changed, because those
    modules would compute in the smaller dtype. The output projection of `nn.MultiheadAttention` and the
    layers of `nn.TransformerEncoderLayer` are not changed, because torch uses their weights without their
    forward.

    Args:
        module: the model.
        storage_dtype: dtype of the weights between forwards, such as torch.float8_e4m3fn.
        compute_dtype: dtype of the weights during the forward.
        skip_modules_pattern: regular expressions. Modules whose names match one, and their submodules, are
            not changed.
        skip_modules_classes: classes whose modules and submodules are not changed.
        non_blocking: whether conversions may be asynchronous.

    Raises:
        ConfigurationError: a pattern is not a regular expression, or torch has no dtype of that name.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    pattern = "|".join(f"(?:{pattern})" for pattern in patterns)
    try:
        skipped = re.compile(pattern) if patterns else None
    except re.error as error:
        reason = f"it is not a regular expression: {error}"
        raise wrong_value("skip_modules_pattern", pattern, reason, "correct the pattern") from error
    hook = LayerwiseCastingHook(read_dtype(storage_dtype), read_dtype(compute_dtype), non_blocking)
    layers = list(_select_layers(module, "", skipped, skip_modules_classes or ()))
    chosen = set(map(id, layers))
    others = [inner for inner in module.modules() if id(inner) not in chosen]
    shared = {id(parameter) for inner in others for parameter in inner.parameters(recurse=False)}
    for layer in layers:
        if shared.isdisjoint(map(id, layer.parameters())):
            add_hook_to_module(layer, hook, append=True)


def _select_layers(
    module: nn.Module,
    name: str,
    skipped: re.Pattern[str] | None,
    skipped_classes: tuple[type[nn.Module], ...],
) -> Iterator[nn.Module]:
    if isinstance(module, skipped_classes) or (skipped is not None and skipped.search(name)):
        return
    if isinstance(module, READ_BY_OTHERS):
        return
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        yield module
        return
    for child_name, child in module.named_children():
        yield from _select_layers(
            child, f"{name}.{child_name}" if name else child_name, skipped, skipped_classes
        )
