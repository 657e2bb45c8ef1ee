"""How many bytes a model takes to hold it and to train it, and its device map, by its tensors alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.base import CustomDtype, wrong_value
from accelerate.commands.model_tensors import Weight

if TYPE_CHECKING:
    from torch import nn

BITS_OF = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
TRAINED_IN = ("float32", "float16", "bfloat16")
"""Number formats that models are trained in; the others are for inference."""

FULL = 4
"""Bytes of a weight, a gradient or an optimizer state in float32."""


def size_of(weights: Iterable[Weight], dtype: str) -> int:
    """Bytes that tensors take in a number format; indices and packed weights stay as they are."""
    return sum(_bytes(weight, dtype) for weight in weights)


def _bytes(weight: Weight, dtype: str) -> int:
    return math.ceil(weight.numel * BITS_OF[dtype] / 8) if weight.is_float else weight.stored_bytes


def layer_of(name: str) -> str:
    """The part of a model that a tensor belongs to: its block where blocks are numbered, else its module."""
    parts = name.split(".")
    numbered = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[: numbered + 1]) if numbered is not None else ".".join(parts[:-1]) or name


def largest_layer(weights: Iterable[Weight], dtype: str) -> tuple[str, int]:
    """Name and bytes of the largest layer."""
    sizes: Counter[str] = Counter()
    for weight in weights:
        sizes[layer_of(weight.name)] += _bytes(weight, dtype)
    return max(sizes.items(), key=lambda item: item[1], default=("", 0))


def _per_weight(count: float) -> Callable[[Sequence[Weight]], int]:
    return lambda weights: math.ceil(count * FULL * sum(weight.numel for weight in weights))


def _factored(weights: Sequence[Weight]) -> int:
    """Adafactor: a number for each row and column of a matrix, and for each entry of what is no matrix."""
    return FULL * sum(_factored_states(weight.shape) for weight in weights)


def _factored_states(shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape[:-2]) * (shape[-2] + shape[-1])


OPTIMIZERS: dict[str, Callable[[Sequence[Weight]], int]] = {
    "adamw": _per_weight(2),
    "adam": _per_weight(2),
    "adamw8bit": _per_weight(0.5),
    "adafactor": _factored,
    "adagrad": _per_weight(1),
    "lion": _per_weight(1),
    "rmsprop": _per_weight(1),
    "sgd": _per_weight(0),
    "sgd_momentum": _per_weight(1),
}
"""Optimizer -> bytes of its states for these trained tensors."""


@dataclass(frozen=True)
class Sharding:
    """What is split between processes, and in which number format it is kept.

    Attributes:
        gathered: what of split weights is whole in the forward pass: the largest "layer", or "all".
        masters: in 16 bit, the float32 weights belong to the optimizer, and weights and gradients are kept in
            16 bit (DeepSpeed); else weights and gradients are kept in float32.
    """

    weights: bool
    gradients: bool
    optimizer: bool
    gathered: str = "nothing"
    masters: bool = False


SHARDINGS = {
    "none": Sharding(False, False, False),
    "zero1": Sharding(False, False, True, masters=True),
    "zero2": Sharding(False, True, True, masters=True),
    "zero3": Sharding(True, True, True, "layer", masters=True),
    "full_shard": Sharding(True, True, True, "layer"),
    "shard_grad_op": Sharding(True, True, True, "all"),
}


def training_bytes(
    weights: Sequence[Weight], dtype: str, optimizer: str, sharding: str, processes: int
) -> dict[str, int] | None:
    """Bytes on each process while a model is trained, without activations.

    Returns:
        Bytes of the weights, the gradients, the optimizer's states, and all together; ``None`` for a format
        that models are not trained in.
    """
    if dtype not in TRAINED_IN:
        return None
    plan = SHARDINGS[sharding]
    trained = [weight for weight in weights if weight.is_float]
    kept_in = dtype if plan.masters else "float32"
    masters = size_of(trained, "float32") if kept_in != "float32" else 0
    held = _part(size_of(weights, kept_in), processes, plan.weights) + _whole(weights, dtype, kept_in, plan)
    gradients = _part(size_of(trained, kept_in), processes, plan.gradients)
    states = _part(OPTIMIZERS[optimizer](trained) + masters, processes, plan.optimizer)
    return {"weights": held, "gradients": gradients, "optimizer": states, "total": held + gradients + states}


def _part(size: int, processes: int, split: bool) -> int:
    return math.ceil(size / processes) if split else size


def _whole(weights: Sequence[Weight], dtype: str, kept_in: str, plan: Sharding) -> int:
    """Bytes that the forward pass computes with beside the weights that are kept."""
    if plan.gathered == "layer":
        return largest_layer(weights, dtype)[1]
    return size_of(weights, dtype) if plan.gathered == "all" or dtype != kept_in else 0


BYTES_OF_MSAMP = {"O1": (4, 1, 8), "O2": (2, 1, 3)}
"""Level of MS-AMP -> bytes of a weight, a gradient and the two moments of Adam."""


def estimate_training_usage(
    bytes: int, mixed_precision: str, msamp_config: str | None = None
) -> dict[str, int]:
    """Memory for training with Adam on one process, from the size of the model alone.

    Args:
        bytes: size of the model in float32.
        mixed_precision: "float32", or "float16" or "bfloat16" for mixed precision.
        msamp_config: "O1" or "O2" with MS-AMP.

    Returns:
        Bytes of the "model", the "gradients", the "optimizer", and at the "step" all together; without
        activations. All are -1 for a number format that models are not trained in.

    Raises:
        ConfigurationError: no such level of MS-AMP.
    """
    if mixed_precision not in TRAINED_IN:
        return dict.fromkeys(("model", "gradients", "optimizer", "step"), -1)
    if msamp_config is not None and msamp_config not in BYTES_OF_MSAMP:
        raise wrong_value("msamp_config", msamp_config, "there is no such level", "Use O1 or O2")
    plain = (4 if mixed_precision == "float32" else 6, 4, 8)
    parts = BYTES_OF_MSAMP[msamp_config] if msamp_config else plain
    model, gradients, optimizer = (math.ceil(bytes * part / FULL) for part in parts)
    return {
        "model": model,
        "gradients": gradients,
        "optimizer": optimizer,
        "step": model + gradients + optimizer,
    }


# Device maps

WHOLE = "_Block"
MOST_DIGITS = 6
"""Of the number of a device."""
DEVICES = ("mps", "cpu", "disk")


def parse_memory(words: Sequence[str]) -> dict[Any, int] | None:
    """Read limits such as "0=24GB" or "cpu=64GB"; without any, what is free on this machine counts."""
    if not words:
        return None
    from accelerate.big_modeling import get_max_memory

    limits: dict[Any, str] = {}
    for word in words:
        device, equals, size = word.partition("=")
        is_number = device.isdecimal() and len(device) <= MOST_DIGITS
        if not equals or not (is_number or device in DEVICES):
            fix = "write 0=24GB, or cpu=64GB"
            raise wrong_value("--device_map", word, "this is no device with its memory", fix)
        limits[int(device) if is_number else device] = size
    return get_max_memory(limits)


def plan_of(
    weights: Iterable[Weight], dtype: str, memory: Mapping[Any, int] | None
) -> tuple[dict[str, Any], str]:
    """Plan a device map.

    Args:
        memory: bytes by device; None: what is free on this machine, without a tenth for activations.

    Returns:
        Devices by module, and the plan as a table.
    """
    from accelerate.big_modeling import explain_device_map, infer_auto_device_map, plan_memory

    model = _build(weights)
    number_format = CustomDtype.INT4 if dtype == "int4" else dtype
    limits = plan_memory(memory)
    device_map = infer_auto_device_map(model, limits, [WHOLE], number_format)
    return dict(device_map), explain_device_map(model, device_map, limits, number_format)


def _build(weights: Iterable[Weight]) -> nn.Module:
    """Build modules that have the names and sizes of a model's; numbered ones are blocks that stay whole."""
    import torch
    from torch import nn

    class _Plain(nn.Module):
        def forward(self) -> None:
            """Say that it can be called, as modules that are no lists can."""

    class _Block(_Plain):
        pass

    root = _Plain()
    for weight in weights:
        *path, name = weight.name.split(".")
        module: nn.Module = root
        for part, following in zip(path, [*path[1:], ""], strict=True):
            if part not in module._modules:
                kind = nn.ModuleList if following.isdecimal() else _Block if part.isdecimal() else _Plain
                module.add_module(part, kind())
            module = module.get_submodule(part)
        shape = weight.shape if weight.is_float else (weight.stored_bytes,)
        number_format = torch.float32 if weight.is_float else torch.uint8
        tensor = torch.empty(shape, dtype=number_format, device="meta")
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return root
