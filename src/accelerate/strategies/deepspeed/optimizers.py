"""torch's optimizers -> those of DeepSpeed that step on the CPU, where states are offloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_COMMON = ("lr", "betas", "eps", "weight_decay")


def _adam(optimizer: Any) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(
        optimizer.defaults.get("decoupled_weight_decay", False)
    )
    return _built(DeepSpeedCPUAdam, optimizer, (*_COMMON, "amsgrad"), adamw_mode=decoupled)


def _adagrad(optimizer: Any) -> Any:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

    return _built(DeepSpeedCPUAdagrad, optimizer, ("lr", "eps", "weight_decay"))


def _lion(optimizer: Any) -> Any:
    from deepspeed.ops.lion import DeepSpeedCPULion

    return _built(DeepSpeedCPULion, optimizer, ("lr", "betas", "weight_decay"))


TWINS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...] = (
    (lambda optimizer: type(optimizer) in (torch.optim.Adam, torch.optim.AdamW), _adam),
    (lambda optimizer: type(optimizer).__name__ in ("AdamW", "AdamW8bit", "Adam8bit"), _adam),
    (lambda optimizer: type(optimizer).__name__ == "Adagrad", _adagrad),
    (lambda optimizer: type(optimizer).__name__ in ("Lion", "Lion8bit"), _lion),
)
"""Which optimizers have a twin, and what builds it."""


def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
    """Return DeepSpeed's optimizer for states on the CPU; the very object where it has none of that kind.

    Args:
        optimizer: fresh, not stepped yet. Its groups become those of the new one, so that schedulers which
            hold them keep setting its learning rates.
    """
    if type(optimizer).__module__.startswith("deepspeed."):
        return optimizer
    return next((build(optimizer) for fits, build in TWINS if fits(optimizer)), optimizer)


def _built(kind: Any, optimizer: Any, names: tuple[str, ...], **more: Any) -> Any:
    known = {name: optimizer.defaults[name] for name in names if name in optimizer.defaults}
    if known.pop("amsgrad", False):
        more["amsgrad"] = True
    return kind(optimizer.param_groups, **known, **more)
