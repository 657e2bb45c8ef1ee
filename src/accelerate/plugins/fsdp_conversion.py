"""From a plugin for FSDP 1 to the fields of one for FSDP 2, by the tables that convert files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.settings import ARGUMENT_KEY_MAPPING, ARGUMENT_VALUE_MAPPING, STRATEGY_NOTES

_STRATEGIES = ARGUMENT_VALUE_MAPPING["fsdp_sharding_strategy"]
_POLICY = ("param_dtype", "reduce_dtype")
"""What the mixed precision of both versions has."""


def fields_of_fsdp2(plugin: Any, options: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields with which FSDP 2 trains as a plugin for FSDP 1 says.

    Args:
        plugin: the plugin; not changed.
        options: its fields -> the options that they stand for.
    """
    kept = [field for field, option in options.items() if isinstance(ARGUMENT_KEY_MAPPING[option], str)]
    policy = plugin.mixed_precision_policy
    return {
        **{field: getattr(plugin, field) for field in kept},
        "fsdp_version": 2,
        "sharding_strategy": None,
        "reshard_after_forward": _STRATEGIES[plugin.sharding_strategy.name.lstrip("_")],
        "forward_prefetch": False,
        "cpu_offload": plugin.cpu_offload.offload_params,
        "mixed_precision_policy": policy and {name: getattr(policy, name) for name in _POLICY},
        "state_dict_type": plugin.state_dict_type.name.replace("LOCAL", "SHARDED"),
    }


def notes_of(plugin: Any) -> list[str]:
    """Return what a user should know about the conversion of a plugin for FSDP 1."""
    name = plugin.sharding_strategy.name
    return [note for part, note in STRATEGY_NOTES.items() if part in name]
