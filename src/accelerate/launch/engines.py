"""Refuse settings of DeepSpeed that each process would refuse, before one is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from accelerate.base import PrecisionType, wrong_value
from accelerate.devices import CPU
from accelerate.launch.layout import where
from accelerate.launch.machine import Machine
from accelerate.settings import Settings, deepspeed_checks as checks

FILE = "deepspeed_config_file"


def check_engine(settings: Settings, machine: Machine) -> None:
    """Refuse what DeepSpeed cannot train with; nothing where it is not the way of training.

    Args:
        settings: merged, with the hardware that is chosen.
        machine: as the run uses it.

    Raises:
        ConfigurationError: with all that is wrong.
    """
    values = settings.values
    if not values["use_deepspeed"]:
        return
    if machine.hardware == CPU and values["mixed_precision"] == PrecisionType.FP16:
        fix = "Use bf16"
        reason = "DeepSpeed does not compute in float16 on the CPU"
        raise wrong_value(where(settings, "mixed_precision"), "fp16", reason, fix)
    if not values[FILE]:
        told = {name: values.get(name) for name in checks.USUAL}
        _check_fields({name: told[name] for name in told if told[name] is not None})
        return
    config = checks.read_config(values[FILE], where(settings, FILE))
    checks.straighten(config)
    checks.refuse_config(checks.problems_of_config(config), f"Correct {values[FILE]}")
    found = {name: checks.look_up(config, key) for name, key in checks.KEYS.items()}
    _check_fields({name: value for name, value in found.items() if value not in (None, checks.AUTO)})


def _check_fields(told: dict[str, Any]) -> None:
    fields: Any = SimpleNamespace(**{**checks.USUAL, **told})
    checks.refuse_config(checks.problems_of_fields(fields), "Correct them")
