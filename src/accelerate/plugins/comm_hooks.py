"""How DistributedDataParallel sends gradients: one table of hooks, one of number formats around them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from accelerate.base import DDPCommunicationHookType

# Without annotations, because torch compares those of a hook's parameters with its own classes.
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
Wrapper = Callable[[Hook], Hook]


@dataclass(frozen=True)
class CommHook:
    """A communication hook and the state it is registered with.

    Args:
        function: what torch calls for each bucket of gradients.
        state: builds the hook's state from the user's options.
    """

    function: Hook
    state: Callable[[dict[str, Any]], object]


def renamed(hook: Hook) -> Hook:
    """Return a hook that behaves like another but has a name of its own.

    torch refuses hooks *called* bf16_compress_hook or bf16_compress_wrapper_hook without a CUDA or XPU build,
    although they work on gloo.
    """

    def compressed_hook(state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    return compressed_hook


def _bare_state(options: dict[str, Any]) -> None:
    if options:
        warnings.warn(
            f"comm_state_option={options} has no effect: only power_sgd and batched_power_sgd have a state.",
            stacklevel=4,
        )


def _power_sgd_state(options: dict[str, Any]) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(process_group=None, **options)


HOOKS: dict[DDPCommunicationHookType, CommHook] = {
    DDPCommunicationHookType.FP16: CommHook(default_hooks.fp16_compress_hook, _bare_state),
    DDPCommunicationHookType.BF16: CommHook(renamed(default_hooks.bf16_compress_hook), _bare_state),
    DDPCommunicationHookType.POWER_SGD: CommHook(powerSGD_hook.powerSGD_hook, _power_sgd_state),
    DDPCommunicationHookType.BATCHED_POWER_SGD: CommHook(
        powerSGD_hook.batched_powerSGD_hook, _power_sgd_state
    ),
}
"""The hook of each kind but `no`. torch 2.13's own `batched_power_sgd` fails at its first compressed step."""

WRAPPERS: dict[DDPCommunicationHookType, Wrapper] = {
    DDPCommunicationHookType.NO: lambda hook: hook,
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
    DDPCommunicationHookType.BF16: lambda hook: renamed(default_hooks.bf16_compress_wrapper(hook)),
}
"""What is put around a hook so that its result travels in a number format."""
