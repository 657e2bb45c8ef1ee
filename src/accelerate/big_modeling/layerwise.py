"""Store the weights of a model's layers in one number format, and compute in another."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from accelerate.hooks.base import add_hook_to_module
from accelerate.hooks.casting import LayerwiseCastingHook

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Let linear and convolutional layers keep their weights in a smaller format than they compute in.

    Args:
        module: the model.
        storage_dtype: of the weights in between, such as torch.float8_e4m3fn.
        compute_dtype: of the weights while their layer computes.
        skip_modules_pattern: regular expressions; modules in whose names one is found stay as they are, with
            all modules inside.
        skip_modules_classes: classes that stay as they are, with all modules inside.
        non_blocking: whether conversions may go on in the background.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    chosen = re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None
    hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
    _attach(module, "", hook, chosen, skip_modules_classes or ())


def _attach(
    module: nn.Module,
    name: str,
    hook: LayerwiseCastingHook,
    skipped: re.Pattern[str] | None,
    skipped_classes: tuple[type[nn.Module], ...],
) -> None:
    if isinstance(module, skipped_classes) or (skipped is not None and skipped.search(name)):
        return
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        add_hook_to_module(module, hook, append=True)
        return
    for child_name, child in module.named_children():
        _attach(child, f"{name}.{child_name}" if name else child_name, hook, skipped, skipped_classes)
