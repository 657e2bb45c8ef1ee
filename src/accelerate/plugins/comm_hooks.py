"""How DistributedDataParallel sends gradients: one table of hooks, one of number formats around them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from accelerate.base import DDPCommunicationHookType

# Without annotations, because torch compares those of a hook's parameters with its own classes.
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def renamed(hook: Hook) -> Hook:
    """Return a hook of another name, because torch refuses hooks *called* bf16_compress_hook or
    bf16_compress_wrapper_hook without a CUDA or XPU build, although they work on gloo."""

    def compressed_hook(state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    return compressed_hook


def state_of(kind: DDPCommunicationHookType, options: dict[str, Any]) -> powerSGD_hook.PowerSGDState | None:
    """Return the state that the hook of a kind is registered with."""
    if kind in (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD):
        return powerSGD_hook.PowerSGDState(process_group=None, **options)
    if options:
        warnings.warn(
            f"comm_state_option={options} has no effect: only power_sgd and batched_power_sgd have a state.",
            stacklevel=4,
        )
    return None


HOOKS: dict[DDPCommunicationHookType, Hook] = {
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
    DDPCommunicationHookType.BF16: renamed(default_hooks.bf16_compress_hook),
    DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
    DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
}
"""The hook of each kind but `no`. torch 2.13's own `batched_power_sgd` fails at its first compressed step."""

WRAPPERS: dict[DDPCommunicationHookType, Callable[[Hook], Hook]] = {
    DDPCommunicationHookType.NO: lambda hook: hook,
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
    DDPCommunicationHookType.BF16: lambda hook: renamed(default_hooks.bf16_compress_wrapper(hook)),
}
"""Wrappers that cast the result of a hook to a number format before it is communicated."""
