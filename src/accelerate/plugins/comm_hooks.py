"""Tables of the communication hooks of DistributedDataParallel and of the dtype wrappers around them.

`DistributedDataParallelKwargs.register_comm_hook` registers a hook from these tables on the wrapped model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from accelerate.base import DDPCommunicationHookType

# The parameters of hooks have no annotations, because torch compares annotations with its own classes.
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def rename_hook(hook: Hook) -> Hook:
    """Returns the same hook as a function of another name.

    Without a CUDA or XPU build, torch refuses hooks whose name is `bf16_compress_hook` or
    `bf16_compress_wrapper_hook`, although they work on gloo.
    """

    def compressed_hook(state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    return compressed_hook


def build_state(
    kind: DDPCommunicationHookType, options: dict[str, Any]
) -> powerSGD_hook.PowerSGDState | None:
    """Returns the state with which a hook is registered, or None for a hook without state."""
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
    DDPCommunicationHookType.BF16: rename_hook(default_hooks.bf16_compress_hook),
    DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
    DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
}
"""Hook of each kind except `no`. In torch 2.13 `batched_power_sgd` fails at its first compressed step."""

WRAPPERS: dict[DDPCommunicationHookType, Callable[[Hook], Hook]] = {
    DDPCommunicationHookType.NO: lambda hook: hook,
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
    DDPCommunicationHookType.BF16: lambda hook: rename_hook(default_hooks.bf16_compress_wrapper(hook)),
}
"""Wrappers that cast gradients to a dtype before a hook, and back after it."""
