"""Questionnaire for one machine or a cluster, with defaults that are detected on this machine.

`accelerate config` calls `suggest` for the defaults and `get_cluster_input` for the answers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.base import (
    DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS,
    FSDP2_STATE_DICT_TYPE as FSDP2_STATE_DICT_TYPE,
    FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE as FSDP_STATE_DICT_TYPE,
    TORCH_DYNAMO_MODES as TORCH_DYNAMO_MODES,
    ComputeEnvironment,
    ConfigurationError,
    DistributedType as DistributedType,
    StateError,
    attach,
    environ,
    first_host,
)
from accelerate.commands.config.config_utils import DYNAMO_BACKENDS as DYNAMO_BACKENDS
from accelerate.commands.utils import DEVICE_PROBES
from accelerate.devices import nvidia
from accelerate.launch import Machine, look
from accelerate.settings import (
    SECTIONS,
    ClusterConfig,
    Prompt,
    Questionnaire,
    all_options,
    as_mapping,
    find_config_file,
    make_config,
    prompt_of_this_process,
    read_layer,
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
        "accelerate.devices": (*DEVICE_PROBES, "is_fp8_available", "is_transformer_engine_available"),
    },
)

CLUSTER_SECTIONS = tuple(section for section in SECTIONS if section is not SageMakerSection)


def get_cluster_input(prompt: Prompt | None = None, suggestions: Suggestions | None = None) -> ClusterConfig:
    """Asks for the settings of one machine or a cluster, with the arguments of `get_user_input`."""
    known = suggestions or suggest()
    prompt = prompt or prompt_of_this_process()
    questions = Questionnaire(
        prompt, CLUSTER_SECTIONS, known.values, known.offers, left_out=("compute_environment",)
    )
    answers = questions.run()
    kind = answers["distributed_type"]
    kept = {}  # settings of the existing file without a question, if they still apply
    if known.kept.get("distributed_type") == kind:
        kept = {name: value for name, value in known.kept.items() if all_options()[name].ask is None}
    mapping = as_mapping({**kept, **answers})
    mapping["compute_environment"] = ComputeEnvironment.LOCAL_MACHINE
    for name, value in {"use_cpu": kind == "MULTI_CPU", "debug": False, "num_processes": 1}.items():
        mapping.setdefault(name, value)
    if PARADIGM_OF_TYPE.get(kind) == "multi_gpu" and not known.has_accelerator:
        prompt.say(
            f"This machine has no accelerator: `accelerate launch` refuses {kind} here. MULTI_CPU trains "
            "on this machine."
        )
    return make_config(ClusterConfig, mapping)


MACHINE_DEFAULTS: dict[str, Any] = {
    "distributed_type": "NO",
    "gpu_ids": "all",
    "main_process_port": 29500,
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "gradient_accumulation_steps": 1,
    "deepspeed_multinode_launcher": "pdsh",
    "zero3_init_flag": True,
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fp8_backend": "ao",
    "ec2_instance_type": "ml.p3.2xlarge",
    "iam_role_name": "accelerate_sagemaker_execution_role",
}
"""Defaults that do not depend on the machine."""

BF16_CAPABILITY = 8.0  # minimum compute capability of NVIDIA GPUs that support bfloat16


@dataclass(frozen=True)
class Suggestions:
    """Defaults of the questionnaire, by option name."""

    values: Mapping[str, Any]
    offers: Mapping[str, tuple[str, ...]]  # values that are listed as answers
    kept: Mapping[str, Any]  # values of the existing file
    facts: tuple[str, ...]  # lines about the machine, which are printed first
    has_accelerator: bool = True


def suggest(config_file: str | None = None) -> Suggestions:
    """Returns defaults that are detected on this machine or read from an existing file.

    Args:
        config_file: File that will be written. None ignores existing files.
    """
    variables = environ.current()
    machine = look(variables, cpu=False)
    devices, facts = _of_machine(machine)
    nodes, slurm_facts = _of_slurm(variables)
    if "num_machines" in nodes:
        devices["num_processes"] = max(1, machine.devices) * nodes["num_machines"]
    kept, note = _of_file(config_file)
    values = {**MACHINE_DEFAULTS, **devices, **nodes, **kept}
    detected = str(machine.hardware.distributed_type.value)
    listed = all_options()["distributed_type"].offers
    offers = {"distributed_type": listed if detected in listed else (*listed[:2], detected, *listed[2:])}
    return Suggestions(values, offers, kept, (*facts, *slurm_facts, *note), machine.has_accelerator)


def _of_machine(machine: Machine) -> tuple[dict[str, Any], list[str]]:
    if not machine.has_accelerator:
        return {"num_processes": 1, "cpu": True}, [f"No accelerator; {machine.cores} CPU cores."]
    several = machine.devices > 1
    bf16 = _computes_in_bf16(machine)
    values = {
        "num_processes": machine.devices,
        "distributed_type": machine.hardware.distributed_type.value if several else "NO",
        "mixed_precision": "bf16" if bf16 else "no",
    }
    support = "with" if bf16 else "without"
    return values, [f"Found {machine.devices} x {machine.hardware.label}, {support} bf16."]


def _computes_in_bf16(machine: Machine) -> bool:
    if machine.hardware.comm == "nccl" and nvidia.driver_present():
        return min((float(row[0]) for row in nvidia.query("compute_cap")), default=0.0) >= BF16_CAPABILITY
    import torch

    try:
        return machine.hardware.supports(torch.bfloat16)
    except (RuntimeError, StateError):  # the device exists and its driver cannot be queried
        return False


def _of_slurm(variables: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    if shutil.which("srun") is None:
        return {}, []
    values: dict[str, Any] = {"slurm": True}
    nodes = variables.get("SLURM_JOB_NUM_NODES") or variables.get("SLURM_NNODES") or ""
    if not nodes.isdecimal():
        return values, ["SLURM is installed; this shell has no allocation."]
    values["num_machines"] = int(nodes)
    hosts = variables.get("SLURM_JOB_NODELIST") or variables.get("SLURM_NODELIST")
    if hosts:
        values["main_process_ip"] = first_host(hosts)
    return values, [f"SLURM: an allocation of {nodes} nodes."]


def _of_file(config_file: str | None) -> tuple[dict[str, Any], list[str]]:
    if config_file is None:
        return {}, []
    try:
        path = find_config_file(config_file)
        values = dict(read_layer(path, "file").values) if path else {}
    except ConfigurationError as error:  # not fatal, because the file will be replaced
        return {}, [f"The existing file is not used: {error}"]
    return values, [f"Settings of {path} are the defaults."]
