"""Read configuration files written by older versions: each step is a small function over the mapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Mapping = dict[str, Any]
Step = Callable[[Mapping], list[str]]

RETIRED = {
    "ipex_config": "Intel Extension for PyTorch is no longer used",
    "use_ipex": "Intel Extension for PyTorch is no longer used",
    "use_xpu": "an XPU is used when there is one",
    "tpu_vm_use_alpha": "this TPU command was withdrawn",
}
"""Keys that older versions wrote and that mean nothing now -> why."""

TOP_LEVEL_DYNAMO = ("dynamo_backend", "dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic")


def migrate(mapping: Mapping) -> tuple[Mapping, tuple[str, ...]]:
    """Bring a file's mapping to today's form.

    Args:
        mapping: as read from the file; not changed.

    Returns:
        The mapping in today's form, and notes about what was left out.
    """
    current = dict(mapping)
    notes = [note for step in STEPS for note in step(current)]
    return current, tuple(notes)


def _fp16_flag(mapping: Mapping) -> list[str]:
    old = mapping.pop("fp16", None)
    if old is not None:
        mapping.setdefault("mixed_precision", "fp16" if old in (True, "true", "yes") else "no")
    return []


def _tpu_name(mapping: Mapping) -> list[str]:
    if str(mapping.get("distributed_type", "")).upper() == "TPU":
        mapping["distributed_type"] = "XLA"
    return []


def _flat_dynamo(mapping: Mapping) -> list[str]:
    flat = {name: mapping.pop(name) for name in TOP_LEVEL_DYNAMO if name in mapping}
    if flat:
        mapping["dynamo_config"] = {**flat, **(mapping.get("dynamo_config") or {})}
    return []


def _dynamo_without_prefix(mapping: Mapping) -> list[str]:
    nested = mapping.get("dynamo_config")
    if isinstance(nested, dict):
        mapping["dynamo_config"] = {
            name if name.startswith("dynamo_") else f"dynamo_{name}": value for name, value in nested.items()
        }
    return []


def _fsdp_layer_key(mapping: Mapping) -> list[str]:
    nested = mapping.get("fsdp_config")
    if isinstance(nested, dict) and "fsdp_backward_prefetch_policy" in nested:
        nested = dict(nested)
        nested.setdefault("fsdp_backward_prefetch", nested.pop("fsdp_backward_prefetch_policy"))
        mapping["fsdp_config"] = nested
    return []


def _fp8_uppercase(mapping: Mapping) -> list[str]:
    nested = mapping.get("fp8_config")
    if isinstance(nested, dict):
        mapping["fp8_config"] = {
            name: value.lower() if name == "backend" and isinstance(value, str) else value
            for name, value in nested.items()
        }
    return []


def _retired(mapping: Mapping) -> list[str]:
    gone = [name for name in RETIRED if name in mapping]
    return [f"{name} has no effect: {RETIRED[name]}" for name in gone if mapping.pop(name) or True]


STEPS: tuple[Step, ...] = (
    _fp16_flag,
    _tpu_name,
    _flat_dynamo,
    _dynamo_without_prefix,
    _fsdp_layer_key,
    _fp8_uppercase,
    _retired,
)
