"""Fully sharded data parallelism, versions 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from accelerate.base import (
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)
from accelerate.settings.option import Section, lower, lower_bool, option, optional, unless_empty

_fsdp1_option = partial(option, when=lambda answers: answers["fsdp_version"] == 1)


@dataclass(frozen=True, kw_only=True)
class FsdpSection(Section):
    """How a model is sharded."""

    title = "FSDP Arguments"
    file_key = "fsdp_config"
    switch = "--use_fsdp"
    env_prefix = ""
    takes_words = True
    spell = lower_bool
    spell_optional = unless_empty

    fsdp_version: int = option(
        1,
        "Version of FSDP: 1 or 2.",
        choices=("1", "2"),
        flag_default="1",
        flag_type=str,
        ask="Which version of FSDP?",
    )
    fsdp_offload_params: bool = option(
        False, "Keep parameters and gradients on the CPU (true or false).", ask=True
    )
    fsdp_min_num_params: int = option(
        100_000_000,
        "SIZE_BASED_WRAP: modules with at least this many parameters become a unit.",
        limits=(0, 10**15),
        ask="How many parameters has a unit at least?",
        when=lambda answers: answers["fsdp_auto_wrap_policy"] == "SIZE_BASED_WRAP",
    )
    fsdp_sharding_strategy: str = _fsdp1_option(
        "FULL_SHARD",
        "FSDP 1: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, or their numbers.",
        ask="What is sharded?",
        offers=tuple(FSDP_SHARDING_STRATEGY),
    )
    fsdp_reshard_after_forward: str = option(
        "true",
        "Free the parameters between forward and backward: true or false with FSDP 2, a sharding strategy "
        "with FSDP 1.",
        spell=lower,
        ask="Free the parameters between forward and backward?",
        offers=("true", "false"),
        when=lambda answers: answers["fsdp_version"] == 2,
    )
    fsdp_auto_wrap_policy: str | None = optional(
        "How the model is cut into units: TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP.",
        ask="How is the model cut into units?",
        offers=tuple(FSDP_AUTO_WRAP_POLICY),
    )
    fsdp_transformer_layer_cls_to_wrap: str | None = optional(
        "TRANSFORMER_BASED_WRAP: class names of the layers that become units, separated by commas.",
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
        ask="Which layer classes become units (separated by commas, empty: what the model says)?",
        when=lambda answers: answers["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP",
    )
    fsdp_backward_prefetch: str | None = _fsdp1_option(
        None,
        "FSDP 1: when the next unit is fetched in backward: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH.",
        ask="When is the next unit fetched in backward?",
        offers=tuple(FSDP_BACKWARD_PREFETCH),
    )
    fsdp_state_dict_type: str | None = optional(
        "How checkpoints are written: FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT.",
        ask="How are checkpoints written?",
        offers=tuple(FSDP_STATE_DICT_TYPE),
    )
    fsdp_forward_prefetch: bool = _fsdp1_option(
        False, "FSDP 1: fetch the next unit during forward (true or false).", ask=True
    )
    fsdp_use_orig_params: bool = _fsdp1_option(
        True, "FSDP 1: keep the model's own parameters, so that some can be frozen (true or false).", ask=True
    )
    fsdp_cpu_ram_efficient_loading: bool = option(
        True,
        "Only the first process reads pretrained weights (true or false).",
        ask="Let only the first process read pretrained weights?",
    )
    fsdp_sync_module_states: bool = _fsdp1_option(
        True,
        "FSDP 1: every unit starts from the weights of rank 0 (true or false).",
        ask="Start every unit from the weights of rank 0?",
    )
    fsdp_activation_checkpointing: bool = option(
        False,
        "Recompute activations in backward instead of keeping them (true or false).",
        ask="Recompute activations in backward to save memory?",
    )
    fsdp_activation_checkpointing_offload: bool = option(
        False, "Keep checkpointed activations on the CPU (true or false)."
    )
    fsdp_ignored_modules: str | None = optional(
        "Modules that are not sharded: a regular expression over their names.", flags=()
    )
