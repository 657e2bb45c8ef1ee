"""Store the weights of a model's layers in one number format, and compute in another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from accelerate.base import wrong_value
from accelerate.hooks import LayerwiseCastingHook, add_hook_to_module
from accelerate.weights import read_dtype

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
    storage_dtype: str | torch.dtype,
    compute_dtype: str | torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Let linear and convolutional layers keep their weights in a smaller format than they compute in.

    Layers that share weights with modules of other kinds, such as embeddings, stay as they are: those would
    compute in the smaller format.

    Args:
        module: the model.
        storage_dtype: of the weights in between, such as torch.float8_e4m3fn.
        compute_dtype: of the weights while their layer computes.
        skip_modules_pattern: regular expressions; modules whose names match one stay as they are, with
            all modules inside.
        skip_modules_classes: classes that stay as they are, with all modules inside.
        non_blocking: whether conversions may go on in the background.

    Raises:
        ConfigurationError: a pattern is no regular expression, or torch has no dtype of that name.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    pattern = "|".join(f"(?:{pattern})" for pattern in patterns)
    try:
        skipped = re.compile(pattern) if patterns else None
    except re.error as error:
        reason = f"this is no regular expression: {error}"
        raise wrong_value("skip_modules_pattern", pattern, reason, "correct the pattern") from error
    hook = LayerwiseCastingHook(read_dtype(storage_dtype), read_dtype(compute_dtype), non_blocking)
    layers = list(_choose(module, "", skipped, skip_modules_classes or ()))
    chosen = set(map(id, layers))
    others = [inner for inner in module.modules() if id(inner) not in chosen]
    shared = {id(parameter) for inner in others for parameter in inner.parameters(recurse=False)}
    for layer in layers:
        if shared.isdisjoint(map(id, layer.parameters())):
            add_hook_to_module(layer, hook, append=True)


def _choose(
    module: nn.Module,
    name: str,
    skipped: re.Pattern[str] | None,
    skipped_classes: tuple[type[nn.Module], ...],
) -> Iterator[nn.Module]:
    if isinstance(module, skipped_classes) or (skipped is not None and skipped.search(name)):
        return
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        yield module
        return
    for child_name, child in module.named_children():
        yield from _choose(child, f"{name}.{child_name}" if name else child_name, skipped, skipped_classes)
