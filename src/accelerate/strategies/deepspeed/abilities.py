"""Whether DeepSpeed can do here what its configurations ask for: hardware, number formats, NVMe, FP8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accelerate.base import packages, wrong_value
from accelerate.settings import look_up


def check_abilities(configs: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Refuse what DeepSpeed cannot do on this machine.

    Args:
        configs: of all plugins of the run.
        device: of this process.

    Raises:
        ConfigurationError: it computes on other hardware, not in that number format, or reaches no NVMe.
        MissingPackageError: MS-AMP is asked for, and not installed.
    """
    from deepspeed.accelerator import get_accelerator

    hardware = get_accelerator()
    check_hardware(hardware.device_name(), device.type)
    formats = {"fp16": hardware.is_fp16_supported, "bf16": hardware.is_bf16_supported}
    for config in configs:
        for name, is_supported in formats.items():
            if look_up(config, f"{name}.enabled") is True and not is_supported():
                raise wrong_value(
                    f"{name}.enabled",
                    True,
                    f"DeepSpeed does not compute in this format on {device.type}",
                    "Set mixed_precision to bf16 or no" if name == "fp16" else "Set mixed_precision to no",
                )
        if computes_in_fp8(config):
            packages.require("msamp", "FP8 by DeepSpeed and MS-AMP")
        for name in ("optimizer", "param"):
            if look_up(config, f"zero_optimization.offload_{name}.device") == "nvme" and not reaches_nvme():
                raise wrong_value(
                    f"offload_{name}_device",
                    "nvme",
                    "DeepSpeed's extension async_io, which reads and writes there, cannot be built here",
                    "Install libaio with its headers (libaio-dev or libaio-devel), or offload to cpu",
                )


def check_hardware(found: str, wanted: str) -> None:
    """Refuse a DeepSpeed that has chosen other hardware than the run.

    Args:
        found: torch device type that DeepSpeed computes on.
        wanted: that of the run.

    Raises:
        ConfigurationError: they differ.
    """
    if found != wanted:
        raise wrong_value(
            "DS_ACCELERATOR",
            found,
            f"DeepSpeed has chosen this hardware, and the run computes on {wanted}",
            f"Set DS_ACCELERATOR={wanted} before deepspeed is imported, if DeepSpeed knows it; otherwise "
            "train without DeepSpeed",
        )


def computes_in_fp8(config: Mapping[str, Any]) -> bool:
    """Whether MS-AMP's engine takes the place of DeepSpeed's."""
    return bool((config.get("msamp") or {}).get("enabled", False))


def reaches_nvme() -> bool:
    """Whether DeepSpeed's extension for NVMe is there, or can be built."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(installed_ops.get("async_io")) or bool(AsyncIOBuilder().is_compatible(verbose=False))
