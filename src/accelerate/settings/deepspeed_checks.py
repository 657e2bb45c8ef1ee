"""Reading, normalization and checks of DeepSpeed settings and its JSON configuration before a run.

Launcher and workers do this alike, so that the launcher refuses what its workers would.

Source: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import base64
import difflib
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from accelerate.base import ConfigurationError, shown, wrong_value
from accelerate.settings import parsing
from accelerate.settings.sections import DEVICES

AUTO = "auto"
STAGE = "zero_optimization.stage"

_FIELDS: dict[str, tuple[str, Any]] = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps", AUTO),
    "gradient_clipping": ("gradient_clipping", AUTO),
    "zero_stage": (STAGE, 2),
    "offload_optimizer_device": ("zero_optimization.offload_optimizer.device", "none"),
    "offload_param_device": ("zero_optimization.offload_param.device", "none"),
    "offload_optimizer_nvme_path": ("zero_optimization.offload_optimizer.nvme_path", "none"),
    "offload_param_nvme_path": ("zero_optimization.offload_param.nvme_path", "none"),
    "zero3_save_16bit_model": ("zero_optimization.stage3_gather_16bit_weights_on_model_save", False),
}
KEYS = {field: key for field, (key, _) in _FIELDS.items()}
"""Fields that DeepSpeed's configuration has too -> their dotted names in it."""
USUAL = {field: value for field, (_, value) in _FIELDS.items()}
"""Their values where none is given."""

COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Values of the configuration that are whole numbers of at least 1."""

SHAPES = {
    "optimizer": '{"type": ..., "params": {...}}',
    "optimizer.params": "{...}",
    "scheduler": '{"type": ..., "params": {...}}',
    "scheduler.params": "{...}",
    "fp16": '{"enabled": true}',
    "bf16": '{"enabled": true}',
    "zero_optimization": '{"stage": 2}',
    "zero_optimization.offload_optimizer": '{"device": "cpu"}',
    "zero_optimization.offload_param": '{"device": "cpu"}',
}
"""Parts of the configuration that are objects themselves -> what is written there."""

_NUMBERS: dict[str, Callable[[str], int | float]] = {
    **dict.fromkeys((*COUNTS, STAGE), int),
    "gradient_clipping": float,
}
_READ_HERE = (*COUNTS, "gradient_clipping", *(name for name in SHAPES if "." not in name))
_WHAT_IT_IS = "Give the path of a JSON file, a dictionary, or JSON in base64"


def refuse_config(problems: list[str], fix: str) -> None:
    """Raises one error for all problems, if there are any.

    The problems and the fix have no full stops.
    """
    if problems:
        lines = "".join(f"\n- {line}" for line in problems)
        raise ConfigurationError(f"The DeepSpeed settings do not go together:{lines}\n{fix}.")


def read_config(source: object, name: str = "hf_ds_config") -> dict[str, Any]:
    """Returns the configuration `name` from a dictionary, a JSON file, or JSON in base64."""
    if isinstance(source, dict):
        return deepcopy(source)
    if not hasattr(source, "__fspath__") and not isinstance(source, str):
        raise wrong_value(name, source, f"it is a {type(source).__name__}", _WHAT_IT_IS)
    path = str(source)
    is_file = os.path.isfile(path)
    try:
        text = parsing.read_text(Path(path)) if is_file else base64.urlsafe_b64decode(path).decode("utf-8")
    except (OSError, ValueError) as error:
        if not is_file:
            reason = "there is no such file, and it is not base64"
            raise wrong_value(name, path, reason, _WHAT_IT_IS) from None
        raise wrong_value(name, path, f"it cannot be read ({error})", "Correct the file") from error
    try:
        config = parsing.parse_json(text)
    except ValueError as error:
        raise wrong_value(name, path, f"it is not JSON ({error})", "Correct the file") from error
    if not isinstance(config, dict):
        fix = "Write {...} with DeepSpeed's settings"
        raise wrong_value(name, path, "it is JSON, but not an object", fix)
    return config


def straighten(config: dict[str, Any]) -> None:
    """Normalizes text to numbers and drops null entries in place, and keeps invalid values."""
    for name in SHAPES:
        if look_up(config, name, ...) is None:
            node, key = find_node(config, name)
            del node[key]  # type: ignore[union-attr]
    for name, number in _NUMBERS.items():
        node, key = find_node(config, name)
        if node is not None and key in node:
            node[key] = AUTO if node[key] is None else _as_number(node[key], number)


def _as_number(value: object, number: Callable[[str], int | float]) -> Any:
    if isinstance(value, float) and value.is_integer() and number is int:
        return int(value)
    if not isinstance(value, str):
        return value
    try:
        return number(value)
    except ValueError:
        return value


def find_node(config: object, name: str) -> tuple[dict[str, Any] | None, str]:
    """Returns the dictionary of a value, or None, and the last part of the name of the value."""
    *nodes, key = name.split(".")
    for node in nodes:
        config = config.get(node) if isinstance(config, dict) else None
    return (config if isinstance(config, dict) else None), key


def look_up(config: object, name: str, otherwise: object = None) -> Any:
    """Returns a value of a configuration by its dotted name, or `otherwise` if it is missing."""
    node, key = find_node(config, name)
    return otherwise if node is None else node.get(key, otherwise)


def problems_of_config(config: dict[str, Any]) -> list[str]:
    """Returns one line for each part of a normalized configuration with an invalid type."""
    problems = []
    if "zero_optimization" not in config:
        near = difflib.get_close_matches("zero_optimization", map(str, config), 1, 0.8)
        hint = f"{near[0]} may be meant; " if near else ""
        problems.append(f"zero_optimization is missing: {hint}write {{'stage': 0}}, or another stage")
    for name, sample in SHAPES.items():
        value = look_up(config, name, {})
        if not isinstance(value, dict):
            problems.append(f"{name} is {shown(value)}, and it is an object: write {sample}")
        elif name in ("optimizer", "scheduler") and name in config and "type" not in value:
            problems.append(f"{name} has no type, which names it: write {sample}")
    problems += problems_of_counts(config)
    enabled = [name for name in ("fp16", "bf16") if look_up(config, f"{name}.enabled") is True]
    if len(enabled) == 2:
        problems.append("fp16.enabled and bf16.enabled are both true: set one of them to false")
    return problems


def problems_of_counts(config: Mapping[str, Any]) -> list[str]:
    """Returns one line for each value of a configuration that must be a count and is not."""
    counts = {name: config[name] for name in COUNTS if config.get(name, AUTO) != AUTO}
    return [
        f"{name} is {shown(value)}: it is not a whole number of at least 1"
        for name, value in counts.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]


def likely_typos(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the unknown keys that DeepSpeed would silently ignore, with the key that each resembles."""
    unknown = [key for key in config if key not in _READ_HERE]
    near = {key: difflib.get_close_matches(str(key), _READ_HERE, 1, 0.9) for key in unknown}
    return {str(key): names[0] for key, names in near.items() if names}


def problems_of_fields(fields: Any) -> list[str]:
    """Returns one line for each field in `KEYS` that is invalid or contradicts another."""
    problems = []
    stage = fields.zero_stage
    if str(stage) not in ("0", "1", "2", "3"):
        problems.append(f"zero_stage={shown(stage)}: the stages of ZeRO are 0, 1, 2 and 3")
    for name in ("optimizer", "param"):
        problems += _problems_of_offload(fields, name)
    for name, devices in (("offload_param_device", DEVICES[1:]), ("offload_optimizer_device", ("nvme",))):
        device = getattr(fields, name)
        if str(stage) in "012" and str(device).lower() in devices:
            only = f"this is supported with ZeRO stage 3 only, and zero_stage is {stage}"
            problems.append(f"{name}={device!r}: {only}")
    for name, least in (("gradient_accumulation_steps", 1), ("gradient_clipping", 0)):
        value = getattr(fields, name)
        if value not in (AUTO, None) and not _is_at_least(value, least):
            problems.append(f"{name}={shown(value)}: it is not a number of at least {least}")
    return problems


def _problems_of_offload(fields: Mapping[str, Any], name: str) -> list[str]:
    device = getattr(fields, f"offload_{name}_device")
    path = getattr(fields, f"offload_{name}_nvme_path")
    if device is None or str(device).lower() in (*DEVICES[:2], AUTO):
        return []
    if str(device).lower() not in DEVICES:
        return [f"offload_{name}_device={shown(device)}: it is none of {', '.join(DEVICES)}"]
    if path in (None, "none", ""):
        return [f"offload_{name}_device='nvme' needs offload_{name}_nvme_path, a folder on that disk"]
    return []


def _is_at_least(value: Any, least: int) -> bool:
    try:
        return not isinstance(value, bool) and float(value) >= least
    except (TypeError, ValueError, OverflowError):
        return False
