"""Values of batches, models and optimizers that a record of a training has."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate import torch_private

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.strategies import Strategy


def seed_of(*values: Any) -> int:
    """Returns a seed for values, which is the same in all processes."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=4).digest(), "little")


def module_of(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Returns the module of the script in a prepared model."""
    module: nn.Module = accelerator.unwrap_model(model, keep_torch_compile=False)
    return module


def norm_of_engine(strategy: Strategy, optimizer: AcceleratedOptimizer) -> float | None:
    """Returns the gradient norm of the last step of an engine after clipping, or None if it is unknown."""
    norm = float(strategy.clip_grad_norm(list(optimizer.parameters()), math.inf))
    limit = getattr(optimizer.optimizer, "clip_grad", 0.0) or math.inf
    return None if math.isnan(norm) else min(norm, float(limit))


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a parameter group, but for learning rates, which schedules change."""
    return {
        name: value
        for name, value in group.items()
        if name not in ("params", "lr", "initial_lr", "max_lr", "min_lr")
        and isinstance(value, (int, float, tuple, list))
        and all(
            isinstance(each, (int, float)) for each in (value if isinstance(value, (tuple, list)) else ())
        )
    }


def digests(batch: object, rows: int | None) -> list[str]:
    """Returns the shapes of each sample of a batch and a digest of its values."""
    leaves = [leaf for leaf in torch_private.pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    whole = [leaf.detach().cpu() for leaf in leaves if leaf.ndim and leaf.shape[0] == rows]
    digests = []
    for row in range(rows or 0):
        digest, shapes = hashlib.blake2b(digest_size=6), [tuple(leaf.shape[1:]) for leaf in whole]
        for leaf in whole:
            digest.update(leaf[row].reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        digests.append(f"{shapes} {digest.hexdigest()}")
    return digests
