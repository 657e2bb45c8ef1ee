"""How many bytes a model takes, by its tensors alone: to hold it, and to train it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from accelerate.base import wrong_value
from accelerate.commands.model_tensors import Weight

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
        weights: whether each process keeps only its part of the weights.
        gradients: likewise.
        optimizer: likewise.
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

    Args:
        weights: of the model.
        dtype: number format of the computation.
        optimizer: a row of `OPTIMIZERS`.
        sharding: a row of `SHARDINGS`.
        processes: between how many processes it is split.

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
