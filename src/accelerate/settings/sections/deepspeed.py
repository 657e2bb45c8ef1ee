"""DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.base.constants import DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate.settings.option import Section, option
from accelerate.settings.spelling import unless_empty, unless_empty_lower

DEVICES = ("none", "cpu", "nvme")


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSection(Section):
    """ZeRO stage, offloading, and how DeepSpeed starts processes on several machines."""

    title = "DeepSpeed Arguments"
    file_key = "deepspeed_config"

    deepspeed_config_file: str | None = option(
        None,
        "DeepSpeed's own JSON configuration; its values win over the flags of this group.",
        env="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        spell=unless_empty,
        ask="Path of DeepSpeed's JSON configuration (empty for none)?",
    )
    zero_stage: int | None = option(
        None, "ZeRO stage: 0, 1, 2 or 3.", env="ACCELERATE_DEEPSPEED_ZERO_STAGE", ask="Which ZeRO stage?"
    )
    offload_optimizer_device: str | None = option(
        None,
        "Where optimizer states are kept: none, cpu or nvme.",
        env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        spell=unless_empty_lower,
        ask="Where are optimizer states kept?",
    )
    offload_param_device: str | None = option(
        None,
        "Where parameters are kept: none, cpu or nvme.",
        env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        spell=unless_empty_lower,
        ask="Where are parameters kept?",
    )
    offload_optimizer_nvme_path: str | None = option(
        None,
        "Folder on NVMe for optimizer states.",
        env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
        spell=unless_empty,
    )
    offload_param_nvme_path: str | None = option(
        None,
        "Folder on NVMe for parameters.",
        env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
        spell=unless_empty,
    )
    gradient_accumulation_steps: int | None = option(
        None,
        "Batches per optimizer step.",
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        spell=unless_empty,
        ask="How many batches per optimizer step?",
    )
    gradient_clipping: float | None = option(
        None,
        "Largest norm of the gradients.",
        env="ACCELERATE_GRADIENT_CLIPPING",
        spell=unless_empty_lower,
    )
    zero3_init_flag: bool | None = option(
        None,
        "ZeRO-3: build models sharded from the start (true or false).",
        text_flag=True,
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        spell=unless_empty_lower,
    )
    zero3_save_16bit_model: bool | None = option(
        None,
        "ZeRO-3: gather 16-bit weights when saving (true or false).",
        text_flag=True,
        env="ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        spell=unless_empty_lower,
    )
    deepspeed_hostfile: str | None = option(None, "DeepSpeed's host file for several machines.")
    deepspeed_exclusion_filter: str | None = option(None, "Hosts and devices that are left out.")
    deepspeed_inclusion_filter: str | None = option(None, "Hosts and devices that are used.")
    deepspeed_multinode_launcher: str | None = option(
        None,
        f"What starts processes on several machines: {', '.join(DEEPSPEED_MULTINODE_LAUNCHERS)}.",
    )
    deepspeed_moe_layer_cls_names: str | None = option(
        None,
        "Class names of mixture-of-experts layers that ZeRO-3 must not enter, separated by commas.",
        env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        spell=unless_empty,
    )

    @staticmethod
    def active(values: Mapping[str, Any]) -> bool:
        """Only when DeepSpeed is the way of training."""
        return bool(values["use_deepspeed"])
