"""How a plugin for FSDP cuts a model into units on XLA devices, and what it asks that they cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from accelerate.base import ConfigurationError


def refuse_unknown(plugin: Any) -> None:
    """Refuse what FSDP does on GPUs only.

    Args:
        plugin: the user's plugin.

    Raises:
        ConfigurationError: with the fields at fault.
    """
    offload = plugin.cpu_offload  # torch's object of either version
    offloads = type(offload).__name__ == "CPUOffloadPolicy" or bool(getattr(offload, "offload_params", False))
    asked = {
        "cpu_offload": offloads,
        "cpu_ram_efficient_loading": bool(plugin.cpu_ram_efficient_loading),
        "activation_checkpointing_offload": bool(plugin.activation_checkpointing_offload),
        "ignored_modules": plugin.ignored_modules is not None,
    }
    found = [name for name, is_asked in asked.items() if is_asked]
    if found:
        raise ConfigurationError(
            f"fsdp_plugin has {', '.join(found)}, which FSDP cannot do on XLA devices. Leave it out there."
        )


def policy_of(plugin: Any, model: nn.Module) -> Callable[..., bool] | None:
    """Return the plugin's policy in the words of torch_xla; None where the whole model is one unit.

    Args:
        plugin: the user's plugin.
        model: the model, which the plugin is told.
    """
    plugin.set_auto_wrap_policy(model)
    policy = plugin.auto_wrap_policy
    if policy is None:
        return None

    def choose(module: nn.Module, recurse: bool, unwrapped_params: int, **rest: Any) -> bool:
        return bool(policy(module=module, recurse=recurse, nonwrapped_numel=unwrapped_params))

    return choose


def find_units(model: nn.Module, policy: Callable[..., bool] | None) -> list[nn.Module]:
    """Return the units of a model, inner ones first, itself last.

    Args:
        model: the model.
        policy: as `policy_of` returns it.
    """
    inner = [module for module in model.modules() if module is not model] if policy else []
    chosen = [
        module
        for module in inner
        if policy is not None
        and policy(module=module, recurse=False, unwrapped_params=sum(p.numel() for p in module.parameters()))
    ]
    return [*reversed(chosen), model]
