"""Sizes of the weights, gradients and optimizer states of a model, computed from the shapes of its weights.

The command `accelerate estimate-memory` prints them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from accelerate.base import wrong_value
from accelerate.commands.model_tensors import Weight
from accelerate.planning import SHARDINGS

BITS_OF = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
DTYPES = tuple(BITS_OF)
TRAINING_DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes in which models are trained. The others are for inference."""

FLOAT32_BYTES = 4  # bytes of a weight, a gradient or an optimizer state in float32


def size_of(weights: Iterable[Weight], dtype: str) -> int:
    """Returns the bytes of tensors in a dtype, where indices and packed weights keep their own."""
    bits = BITS_OF[dtype]
    return sum(math.ceil(w.numel * bits / 8) if w.is_float else w.stored_bytes for w in weights)


def layer_of(name: str) -> str:
    """Returns the name of the numbered block that contains a tensor, else of its module."""
    parts = name.split(".")
    numbered = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[: numbered + 1]) if numbered is not None else ".".join(parts[:-1]) or name


def largest_layer(weights: Iterable[Weight], dtype: str) -> tuple[str, int]:
    sizes: Counter[str] = Counter()
    for weight in weights:
        sizes[layer_of(weight.name)] += size_of([weight], dtype)
    return max(sizes.items(), key=lambda item: item[1], default=("", 0))


def _per_weight(count: float) -> Callable[[Sequence[Weight]], int]:
    return lambda weights: math.ceil(count * FLOAT32_BYTES * sum(weight.numel for weight in weights))


def _factored(weights: Sequence[Weight]) -> int:
    """Returns the bytes of the states of Adafactor.

    It has a number for each row and column of a matrix, and for each element of other tensors.
    """
    matrices = [weight.shape for weight in weights if len(weight.shape) > 1]
    states = sum(math.prod(shape[:-2]) * (shape[-2] + shape[-1]) for shape in matrices)
    return FLOAT32_BYTES * (states + sum(weight.numel for weight in weights if len(weight.shape) < 2))


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
"""Optimizer -> function that returns the bytes of its states for the trained tensors."""


def training_bytes(
    weights: Sequence[Weight], dtype: str, optimizer: str, sharding: str, processes: int
) -> dict[str, int] | None:
    """Returns the bytes on each rank during training, by part and in total, without activations.

    Returns ``None`` for a dtype in which models are not trained.
    """
    if dtype not in TRAINING_DTYPES:
        return None
    plan = SHARDINGS[sharding]
    trained = [weight for weight in weights if weight.is_float]
    weight_dtype = dtype if plan.has_masters else "float32"
    masters = size_of(trained, "float32") if weight_dtype != "float32" else 0
    states = OPTIMIZERS[optimizer](trained) + masters
    parts = {
        "weights": size_of(weights, weight_dtype) / (processes if plan.weights else 1),
        "gradients": size_of(trained, weight_dtype) / (processes if plan.gradients else 1),
        "optimizer": states / (processes if plan.optimizer else 1),
    }
    sizes = {name: math.ceil(size) for name, size in parts.items()}
    # The forward pass needs all-gathered or cast weights in addition.
    if plan.gathered == "layer":
        sizes["weights"] += largest_layer(weights, dtype)[1]
    elif plan.gathered == "all" or dtype != weight_dtype:
        sizes["weights"] += size_of(weights, dtype)
    return {**sizes, "total": sum(sizes.values())}


MSAMP_BYTES = {"O1": (4, 1, 8), "O2": (2, 1, 3)}
"""Level of MS-AMP -> bytes of a weight, a gradient and the two moments of Adam."""


def estimate_training_usage(
    bytes: int, mixed_precision: str, msamp_config: str | None = None
) -> dict[str, int]:
    """Returns the memory for training with Adam on one process, from the size of the model alone.

    Args:
        bytes: Size of the model in float32, in bytes.
        mixed_precision: "float32", or "float16" or "bfloat16" for mixed precision.
        msamp_config: "O1" or "O2" with MS-AMP.

    Returns:
        Bytes of the "model", the "gradients" and the "optimizer", and their sum at the "step", without
        activations. All are -1 for a dtype in which models are not trained.

    Raises:
        ConfigurationError: The level of MS-AMP is unknown.
    """
    if mixed_precision not in TRAINING_DTYPES:
        return dict.fromkeys(("model", "gradients", "optimizer", "step"), -1)
    if msamp_config is not None and msamp_config not in MSAMP_BYTES:
        raise wrong_value("msamp_config", msamp_config, "there is no such level", "Use O1 or O2")
    without_msamp = (4 if mixed_precision == "float32" else 6, 4, 8)
    parts = MSAMP_BYTES[msamp_config] if msamp_config else without_msamp
    model, gradients, optimizer = (math.ceil(bytes * part / FLOAT32_BYTES) for part in parts)
    sizes = {"model": model, "gradients": gradients, "optimizer": optimizer}
    return {**sizes, "step": sum(sizes.values())}
