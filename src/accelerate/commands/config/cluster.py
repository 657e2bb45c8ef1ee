"""The questionnaire for one machine or a cluster."""

from __future__ import annotations

from accelerate.base import (
    DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS,
    FSDP2_STATE_DICT_TYPE as FSDP2_STATE_DICT_TYPE,
    FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE as FSDP_STATE_DICT_TYPE,
    TORCH_DYNAMO_MODES as TORCH_DYNAMO_MODES,
    ComputeEnvironment,
    DistributedType as DistributedType,
    attach,
)
from accelerate.commands.config.config_utils import DYNAMO_BACKENDS as DYNAMO_BACKENDS
from accelerate.commands.config.suggestions import Suggestions, suggest
from accelerate.settings import (
    SECTIONS,
    ClusterConfig,
    Prompt,
    Questionnaire,
    all_options,
    as_mapping,
    prompt_of_this_process,
)
from accelerate.settings.sections import PARADIGM_OF_TYPE, SageMakerSection

__getattr__, __dir__, _ = attach(
    __name__,
    {
        "accelerate.base": (
            "is_deepspeed_available",
            "is_msamp_available",
            "is_torchao_available",
            "is_transformers_available",
        ),
        "accelerate.devices": (
            "is_fp8_available",
            "is_hpu_available",
            "is_mlu_available",
            "is_mps_available",
            "is_musa_available",
            "is_neuron_available",
            "is_npu_available",
            "is_sdaa_available",
            "is_transformer_engine_available",
            "is_xpu_available",
        ),
    },
)

CLUSTER_SECTIONS = tuple(section for section in SECTIONS if section is not SageMakerSection)


def get_cluster_input(prompt: Prompt | None = None, suggestions: Suggestions | None = None) -> ClusterConfig:
    """Ask for the settings of one machine or a cluster.

    Args:
        prompt: asks; default: the terminal, or lines when this process has none.
        suggestions: the defaults; default: those for this machine.

    Returns:
        What the file will hold.

    Raises:
        ConfigurationError: on a pipe, an answer is wrong or missing.
    """
    known = suggestions or suggest()
    chosen = prompt or prompt_of_this_process()
    asking = Questionnaire(
        chosen, CLUSTER_SECTIONS, known.values, known.offers, left_out=("compute_environment",)
    )
    answers = asking.run()
    mapping = as_mapping({**_kept(known, answers["distributed_type"]), **answers})
    mapping["compute_environment"] = ComputeEnvironment.LOCAL_MACHINE
    mapping.setdefault("use_cpu", answers["distributed_type"] == "MULTI_CPU")
    mapping.setdefault("debug", False)
    mapping.setdefault("num_processes", 1)
    way = answers["distributed_type"]
    if PARADIGM_OF_TYPE.get(way) == "multi_gpu" and not known.has_accelerator:
        chosen.say(
            f"This machine shows no accelerator: `accelerate launch` refuses {way} here. MULTI_CPU trains on "
            "this machine."
        )
    return ClusterConfig(**mapping)


def _kept(known: Suggestions, way: str) -> dict[str, object]:
    """Settings of the file that is there for which there is no question, while they can still apply."""
    if known.kept.get("distributed_type") != way:
        return {}
    return {name: value for name, value in known.kept.items() if all_options()[name].ask is None}
