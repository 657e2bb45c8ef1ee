"""Private attributes of modules, parameters and tensors.

Wrappers, hooks and checkpoints use them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

WRAPPED = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""Attributes of wrappers of torch for their module, which are prefixes in the names of parameters."""


def is_optimized_module(module: object) -> bool:
    """Returns whether a module is the result of `torch.compile(module)`, by its type."""
    # No module is compiled before dynamo is imported, and the import takes a second.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def uncompiled(module: nn.Module) -> Any:
    """Returns the module inside the wrapper of torch.compile, or the module if it is not compiled."""
    return module._orig_mod if is_optimized_module(module) else module


def keep_name(module: nn.Module, name: str) -> None:
    """Lets `_get_name` return a name for the modules of a class.

    `fully_shard` sets a class of another name. The Trainer of transformers shifts labels for the models whose
    names it knows.
    """
    type(module)._get_name = lambda self: name  # type: ignore[method-assign]


def is_compiled_in_place(module: nn.Module) -> bool:
    """Returns whether `module.compile()` was called, which sets only a private attribute."""
    return getattr(module, "_compiled_call_impl", None) is not None


def has_compiled_forward(module: nn.Module) -> bool:
    """Returns whether `module.forward = torch.compile(module.forward)` was called."""
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""Names of the buffers of a module that are not in its state dict, which torch does not list."""

recomputed_module: Callable[[Any], nn.Module] = attrgetter("_checkpoint_wrapped_module")
"""Module inside a wrapper of `checkpoint_wrapper`, which has no public name for it."""


def state_dict_hooks(module: nn.Module) -> list[Any]:
    """Returns the state dict hooks of a module, which torch registers but does not list."""
    hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks, module._state_dict_hooks)
    return [hook for registered in hooks for hook in registered.values()]


GRADIENT_HOOKS = ("_post_accumulate_grad_hooks", "_backward_hooks")
"""Attributes of a parameter with its gradient hooks, which torch registers but does not list."""
_RECORDERS = {"torch", "wandb"}
"""Packages whose hooks do not change gradients, such as those of memory trackers."""


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Returns whether a parameter has gradient hooks."""
    return any(getattr(parameter, name, None) for name in GRADIENT_HOOKS)


def has_registered_hooks(parameter: Tensor, names: Sequence[str] = ("_backward_hooks",)) -> bool:
    """Returns whether `register_hook` of a parameter was called, except by tools that only record gradients.

    Args:
        names: Attributes with hooks.
    """
    hooks = [hook for name in names for hook in (getattr(parameter, name, None) or {}).values()]
    return any(str(getattr(hook, "__module__", "")).partition(".")[0] not in _RECORDERS for hook in hooks)


def is_stepped_in_backward(parameter: Tensor) -> bool:
    """Returns whether torch steps an optimizer of a parameter after its gradient is averaged."""
    return hasattr(parameter, "_in_backward_optimizers")


def call_after_load(optimizer: torch.optim.Optimizer, hook: Callable[[Any], Any]) -> None:
    """Calls a function with an optimizer after its `load_state_dict`.

    Optimizers that wrap others may not call the constructor of torch's class, which creates the hooks.
    """
    vars(optimizer).setdefault("_optimizer_load_state_dict_post_hooks", OrderedDict())
    optimizer.register_load_state_dict_post_hook(hook)


def has_load_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer has hooks that change or follow `load_state_dict`."""
    names = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return any(getattr(optimizer, name, None) for name in names)


def count_recompilations() -> int:
    """Returns the number of recompilations of torch.compile, or 0 if dynamo is not loaded."""
    counts = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COMPILE_COUNTER", {})
    return sum(count - 1 for count in counts.copy().values())


def count_compilations() -> int:
    """Returns the number of compilations by torch.compile, or 0 if dynamo is not loaded."""
    counts = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COMPILE_COUNTER", {})
    return sum(counts.copy().values())


Weights = tuple[dict[str, Tensor | None], dict[str, Tensor | None]]
"""Parameters and buffers of one module by name."""


def placeholder_weights(module: nn.Module, device: torch.device) -> Weights:
    """Returns tensors without memory of the shapes and dtypes of the parameters and buffers of one module."""

    def placeholder(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        empty = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty

    kinds = (module._parameters, module._buffers)
    return tuple(  # type: ignore[return-value]
        {name: placeholder(tensor) for name, tensor in kind.items()} for kind in kinds
    )


@contextmanager
def replaced_weights(weights: Mapping[nn.Module, Weights], *, has_hooks: bool = False) -> Iterator[None]:
    """Replaces the parameters and buffers of modules inside the block.

    Args:
        has_hooks: Whether the modules keep their forward hooks.
    """
    names = ("_parameters", "_buffers", *(() if has_hooks else ("_forward_hooks", "_forward_pre_hooks")))
    kept = {module: tuple(module.__dict__[name] for name in names) for module in weights}
    try:
        for module, values in weights.items():
            replaced = (*values, *(OrderedDict[int, Any]() for _ in names[2:]))
            module.__dict__.update(zip(names, replaced, strict=True))
        yield
    finally:
        for module, values in kept.items():
            module.__dict__.update(zip(names, values, strict=True))


def num_forward_hooks(module: nn.Module) -> int:
    """Returns the number of hooks before and after the forward of a module."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def hooks_of(module: nn.Module) -> list[Any]:
    """Returns the hooks of the forward and of the backward pass of a module, which torch does not list."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [hook for name in names for hook in getattr(module, name).values()]


def call_forward_hooks(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: object, source: str
) -> Any:
    """Calls some forward hooks of a module whose forward is left out, and returns its outputs after them.

    Args:
        args: Positional arguments of its forward.
        kwargs: Keyword arguments.
        outputs: Outputs in place of those of the forward.
        source: Name of the Python module whose hooks are called.
    """
    for key, hook in list(module._forward_hooks.items()):
        if getattr(hook, "__module__", None) == source:
            takes_kwargs = key in module._forward_hooks_with_kwargs
            result = hook(module, args, kwargs, outputs) if takes_kwargs else hook(module, args, outputs)
            outputs = outputs if result is None else result
    return outputs


def remove_weights(module: nn.Module) -> None:
    """Sets the parameters and buffers of a module, without its submodules, to None."""
    for kind in (module._parameters, module._buffers):
        kind.update(dict.fromkeys(kind))


@contextmanager
def without_reentrant_checkpoints() -> Iterator[None]:
    """Lets reentrant checkpoints be others inside the block, through which `torch.autograd.grad` works."""
    module: Any = torch.utils.checkpoint
    kept = module.CheckpointFunction

    def apply(function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
        return module.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserves)

    module.CheckpointFunction = SimpleNamespace(apply=apply)
    try:
        yield
    finally:
        module.CheckpointFunction = kept
