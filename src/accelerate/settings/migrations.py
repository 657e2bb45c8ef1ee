"""Migration of configuration files of older versions, and of settings of FSDP 1 to FSDP 2."""

from __future__ import annotations

from collections import abc
from enum import Enum
from typing import Any

from accelerate.base import FSDP_SHARDING_STRATEGY, ConfigurationError, shortened, wrong_value
from accelerate.settings.parsing import check_values
from accelerate.settings.sections import FsdpSection

Mapping = dict[str, Any]

RETIRED = {
    "ipex_config": "Intel Extension for PyTorch is no longer used",
    "use_ipex": "Intel Extension for PyTorch is no longer used",
    "use_xpu": "an XPU is used when there is one",
    "tpu_vm_use_alpha": "this TPU command was withdrawn",
}
"""Keys that older versions wrote and that mean nothing now -> why."""

RETIRED_VARIABLES = {"ACCELERATE_USE_IPEX": RETIRED["use_ipex"], "ACCELERATE_USE_XPU": RETIRED["use_xpu"]}
"""Variables that older launchers and scripts set and that mean nothing now -> why."""

TOP_LEVEL_DYNAMO = ("dynamo_backend", "dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic")


def migrate(mapping: Mapping) -> tuple[Mapping, tuple[str, ...]]:
    """Returns the mapping of a file in the current format, and notes about dropped entries."""
    check_values(mapping)
    current = dict(mapping)
    _update_values(current)
    _update_groups(current)
    notes = (f"{name} has no effect: {why}" for name, why in RETIRED.items() if name in current)
    return {name: value for name, value in current.items() if name not in RETIRED}, tuple(notes)


def retired_variables(environ: abc.Mapping[str, str]) -> list[str]:
    """Returns notes about variables of older versions that are set to another value than no."""
    return [
        f"{name}={shortened(environ[name])} has no effect: {why}."
        for name, why in RETIRED_VARIABLES.items()
        if environ.get(name, "").lower() not in ("", "0", "false", "no", "off")
    ]


def _update_values(mapping: Mapping) -> None:
    fp16 = mapping.pop("fp16", None)
    if fp16 is not None:
        mapping.setdefault("mixed_precision", "fp16" if fp16 in (True, "true", "yes") else "no")
    if mapping.get("distributed_type") is False:  # how YAML reads NO without quotes
        mapping["distributed_type"] = "NO"
    if str(mapping.get("distributed_type", "")).upper() == "TPU":
        mapping["distributed_type"] = "XLA"


def _update_groups(mapping: Mapping) -> None:
    dynamo = mapping.get("dynamo_config") or {}
    if isinstance(dynamo, dict):
        dynamo = {**{name: mapping.pop(name) for name in TOP_LEVEL_DYNAMO if name in mapping}, **dynamo}
    if dynamo and isinstance(dynamo, dict):
        mapping["dynamo_config"] = {
            name if name.startswith("dynamo_") else f"dynamo_{name}": value for name, value in dynamo.items()
        }
    fsdp = mapping.get("fsdp_config")
    if isinstance(fsdp, dict) and "fsdp_backward_prefetch_policy" in fsdp:
        mapping["fsdp_config"] = fsdp = dict(fsdp)
        fsdp.setdefault("fsdp_backward_prefetch", fsdp.pop("fsdp_backward_prefetch_policy"))
    fp8 = mapping.get("fp8_config")
    if isinstance(fp8, dict) and isinstance(fp8.get("backend"), str):
        mapping["fp8_config"] = {**fp8, "backend": fp8["backend"].lower()}


class ConversionStatus(Enum):
    """Replacement of a setting of FSDP 1 that FSDP 2 does not have."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


ARGUMENT_KEY_MAPPING: dict[str, str | ConversionStatus] = {
    **{str(row.key): str(row.key) for row in FsdpSection.options()},
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
    "fsdp_backward_prefetch": ConversionStatus.REMOVED,
    "fsdp_forward_prefetch": ConversionStatus.NOT_YET_IMPLEMENTED,
    "fsdp_use_orig_params": ConversionStatus.REMOVED,
    "fsdp_sync_module_states": ConversionStatus.REMOVED,
}
"""Key of FSDP 1 -> key of FSDP 2, or why there is none."""

_STRATEGIES = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}
ARGUMENT_VALUE_MAPPING: dict[str, dict[str, bool]] = {
    "fsdp_sharding_strategy": _STRATEGIES,
    "fsdp_reshard_after_forward": dict(_STRATEGIES),
}
"""Key of FSDP 1 -> its values -> the value of FSDP 2."""

_NUMBERED_STRATEGIES = {str(number): name for number, name in enumerate(FSDP_SHARDING_STRATEGY, start=1)}


def convert_config_to_fsdp2(config: Mapping) -> Mapping:
    """Converts the settings of FSDP 1 to settings of FSDP 2.

    Args:
        config: a configuration file's mapping; not changed.

    Returns:
        The mapping for FSDP 2; one for FSDP 2 is returned as it is. What FSDP 2 has no setting
        for is left out, and unknown keys stay as they are: `fsdp2_notes` lists them.

    Raises:
        ConfigurationError: the file is not for FSDP, or holds settings that contradict each other.
    """
    old = config.get("fsdp_config")
    if not isinstance(old, dict) or not old:
        raise ConfigurationError("There is no fsdp_config in this configuration: it is not for FSDP.")
    if str(old.get("fsdp_version", 1)) == "2":
        return dict(config)
    new: Mapping = {}
    for key, value in migrate(config)[0]["fsdp_config"].items():
        target = ARGUMENT_KEY_MAPPING.get(key)
        if target is None:
            new[key] = value
        if not isinstance(target, str):
            continue
        value = _value_of_fsdp2(key, value)
        if new.get(target, value) != value:
            reason = f"another setting gives {target}={new[target]}"
            raise wrong_value(f"fsdp_config.{key}", value, reason, "Keep one")
        new[target] = value
    return {**config, "fsdp_config": {**new, "fsdp_version": 2}}


def _value_of_fsdp2(key: str, value: object) -> Any:
    values = ARGUMENT_VALUE_MAPPING.get(key)
    if values is None or isinstance(value, bool) or str(value).lower() in ("true", "false"):
        return value
    word = _NUMBERED_STRATEGIES.get(str(value), str(value).upper())
    if word in values:
        return values[word]
    fix = f"Use one of {', '.join(values)}"
    raise wrong_value(f"fsdp_config.{key}", value, "there is no such strategy", fix)


def fsdp2_notes(config: Mapping) -> list[str]:
    """Returns notes for the user about the changes of `convert_config_to_fsdp2` to a mapping."""
    old = config.get("fsdp_config") or {}
    if str(old.get("fsdp_version", 1)) == "2":
        return ["it is for FSDP 2 already"]
    keys = migrate(config)[0].get("fsdp_config") or {}
    notes = [NOTES[gone].format(key) for key in keys if (gone := ARGUMENT_KEY_MAPPING.get(key)) in NOTES]
    strategies = {str(old.get(key)).upper() for key in ARGUMENT_VALUE_MAPPING}
    return notes + [note for part, note in STRATEGY_NOTES.items() if any(part in s for s in strategies)]


NOTES: dict[Any, str] = {
    None: "{} stays as it is: no such setting is known, and a launch refuses it. Correct or remove it",
    ConversionStatus.REMOVED: "{} is left out: FSDP 2 needs no such setting",
    ConversionStatus.NOT_YET_IMPLEMENTED: "{} is left out: it cannot be set for FSDP 2 yet",
}
STRATEGY_NOTES = {
    "HYBRID": "replicas are now an axis of the mesh: set parallelism_config_dp_replicate_size",
    "NO_SHARD": "FSDP 2 always shards: NO_SHARD becomes what SHARD_GRAD_OP was",
}
