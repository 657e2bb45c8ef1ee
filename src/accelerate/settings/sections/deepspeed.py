"""DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from accelerate.base import DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate.settings.option import Section, as_text, optional, unless_empty, unless_empty_lower

OffloadDevice: TypeAlias = Literal["none", "cpu", "nvme"]
DEVICES = get_args(OffloadDevice)


def _without_own_file(answers: Mapping[str, Any]) -> bool:
    return not answers["deepspeed_config_file"]


def _shards_gradients(answers: Mapping[str, Any]) -> bool:
    return _without_own_file(answers) and (answers["zero_stage"] or 0) >= 2


def _shards_parameters(answers: Mapping[str, Any]) -> bool:
    return _without_own_file(answers) and answers["zero_stage"] == 3


def _several_machines(answers: Mapping[str, Any]) -> bool:
    return bool(answers["num_machines"] > 1)


def _starts_by_hostfile(answers: Mapping[str, Any]) -> bool:
    return _several_machines(answers) and answers["deepspeed_multinode_launcher"] != "standard"


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSection(Section):
    """ZeRO stage, offloading, and how DeepSpeed starts processes on several machines."""

    title = "DeepSpeed Arguments"
    file_key = "deepspeed_config"
    switch = "--use_deepspeed"
    env_prefix = "ACCELERATE_DEEPSPEED_"
    takes_words = True
    spell_optional = unless_empty_lower

    deepspeed_config_file: str | None = optional(
        "DeepSpeed's own JSON configuration; its values win over the flags of this group.",
        env="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        spell=unless_empty,
        ask="Path of DeepSpeed's JSON configuration (empty for none)?",
    )
    zero_stage: int | None = optional(
        "ZeRO stage: 0, 1, 2 or 3.",
        spell=as_text,
        limits=(0, 3),
        ask="Which ZeRO stage?",
        offers=("0", "1", "2", "3"),
        when=_without_own_file,
    )
    offload_optimizer_device: str | None = optional(
        "Where optimizer states are kept: none, cpu or nvme.",
        ask="Where are optimizer states kept?",
        offers=DEVICES,
        when=_shards_gradients,
    )
    offload_param_device: str | None = optional(
        "Where parameters are kept: none, cpu or nvme.",
        ask="Where are parameters kept?",
        offers=DEVICES,
        when=_shards_parameters,
    )
    offload_optimizer_nvme_path: str | None = optional(
        "Folder on NVMe for optimizer states.",
        spell=unless_empty,
        ask="Which folder on NVMe for optimizer states?",
        when=lambda answers: answers["offload_optimizer_device"] == "nvme",
    )
    offload_param_nvme_path: str | None = optional(
        "Folder on NVMe for parameters.",
        spell=unless_empty,
        ask="Which folder on NVMe for parameters?",
        when=lambda answers: answers["offload_param_device"] == "nvme",
    )
    gradient_accumulation_steps: int | None = optional(
        "Batches per optimizer step, with DeepSpeed; elsewhere Accelerator(gradient_accumulation_steps=...).",
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        ask="How many batches per optimizer step?",
        when=_without_own_file,
    )
    gradient_clipping: float | None = optional(
        "Largest norm of the gradients.",
        env="ACCELERATE_GRADIENT_CLIPPING",
        ask="What is the largest norm of the gradients (empty for no limit)?",
        when=_without_own_file,
    )
    zero3_init_flag: bool | None = optional(
        "ZeRO-3: build models sharded from the start (true or false).",
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        ask=True,
        when=_shards_parameters,
    )
    zero3_save_16bit_model: bool | None = optional(
        "ZeRO-3: gather 16-bit weights when saving (true or false).", ask=True, when=_shards_parameters
    )
    deepspeed_multinode_launcher: str | None = optional(
        f"What starts processes on several machines: {', '.join(DEEPSPEED_MULTINODE_LAUNCHERS)}.",
        env=(),
        ask="What starts processes on several machines?",
        offers=tuple(DEEPSPEED_MULTINODE_LAUNCHERS),
        when=_several_machines,
    )
    deepspeed_hostfile: str | None = optional(
        "DeepSpeed's host file for several machines.",
        env=(),
        ask="Where is the host file (empty for none)?",
        when=_starts_by_hostfile,
    )
    deepspeed_exclusion_filter: str | None = optional(
        "Hosts and devices that are left out.",
        env=(),
        ask="Which hosts and devices are left out (empty for none)?",
        when=_starts_by_hostfile,
    )
    deepspeed_inclusion_filter: str | None = optional(
        "Hosts and devices that are used.",
        env=(),
        ask="Which hosts and devices are used (empty for all)?",
        when=_starts_by_hostfile,
    )
    deepspeed_moe_layer_cls_names: str | None = optional(
        "Class names of mixture-of-experts layers that ZeRO-3 must not enter, separated by commas.",
        env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        spell=unless_empty,
        ask="Class names of mixture-of-experts layers that ZeRO-3 must not enter (empty for none)?",
        when=_shards_parameters,
        advanced=True,
    )
