"""Which way of training, how many processes and machines, on which devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from accelerate.base import DistributedType
from accelerate.settings.option import Section, only_true, option, optional

HARDWARE = "Hardware Selection Arguments"
RESOURCES = "Resource Selection Arguments"
PARADIGMS = "Training Paradigm Arguments"
GENERAL = "options"

PARADIGM_OF_TYPE: dict[str, str | None] = {
    "NO": None,
    **{kind.value: "multi_gpu" for kind in DistributedType if kind.value.startswith("MULTI_")},
    "MULTI_CPU": None,
    "DEEPSPEED": "use_deepspeed",
    "FSDP": "use_fsdp",
    "MEGATRON_LM": "use_megatron_lm",
    "XLA": "tpu",
}
"""`distributed_type` of a configuration file -> the option it stands for."""

EXCLUSIVE = ("multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
"""Ways of training of which a run has at most one; a layer that names one drops what a lower layer named."""


def several_processes(answers: Mapping[str, Any]) -> bool:
    """Whether the way of training takes more than one process."""
    return bool(answers["distributed_type"] != "NO")


def data_parallel_on_devices(answers: Mapping[str, Any]) -> bool:
    """Whether each process trains on a device of its own."""
    return PARADIGM_OF_TYPE.get(answers["distributed_type"]) in ("multi_gpu", "use_fsdp", "use_deepspeed")


_paradigm = partial(option, False, group=PARADIGMS, key=None, spell=only_true("true"))


@dataclass(frozen=True, kw_only=True)
class LaunchSection(Section):
    """What is started, and on what."""

    title = RESOURCES

    compute_environment: str = option(
        "LOCAL_MACHINE",
        "Where the script runs: LOCAL_MACHINE (this machine or a cluster) or AMAZON_SAGEMAKER.",
        choices=("LOCAL_MACHINE", "AMAZON_SAGEMAKER"),
        flags=(),
        ask="Where does the script run?",
    )
    distributed_type: str | None = optional(
        "The way of training in files: NO, MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED, MEGATRON_LM or XLA.",
        flags=(),
        ask="Which way of training (NO is one process, XLA is TPU)?",
        offers=("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"),
    )
    cpu: bool = option(
        False,
        "Run on the CPU even if there is an accelerator.",
        group=HARDWARE,
        key="use_cpu",
        env="ACCELERATE_USE_CPU",
        spell=only_true("True"),
        ask="Run on CPU only, even if there is an accelerator?",
        when=lambda answers: answers["distributed_type"] == "NO",
    )
    multi_gpu: bool = option(
        False, "Data-parallel training on several accelerators.", group=HARDWARE, key=None
    )
    num_processes: int | None = optional(
        "Number of processes in total, over all machines together (not per machine).",
        ask="How many processes in total (over all machines together)?",
        when=several_processes,
    )
    num_machines: int = option(
        1,
        "Number of machines.",
        flag_default=None,
        ask="How many machines take part?",
        when=lambda answers: answers["distributed_type"] not in ("NO", "XLA"),
    )
    processes_per_machine: tuple[str, ...] | None = optional(
        "Processes on each machine, from machine 0 on, where these differ: 8,4. The total is their sum.",
        key=None,
    )
    num_cpu_threads_per_process: int | None = optional(
        "CPU threads each process may use (OMP_NUM_THREADS).",
        key=None,
        env="OMP_NUM_THREADS",
        foreign=True,
        advanced=True,
    )
    enable_cpu_affinity: bool = option(
        False,
        "Bind each process to the CPU cores nearest to its device (NUMA).",
        env="ACCELERATE_CPU_AFFINITY",
        spell=only_true("1"),
        advanced=True,
        ask="Bind each process to the CPU cores nearest to its device?",
        when=data_parallel_on_devices,
    )
    use_deepspeed: bool = _paradigm("Train with DeepSpeed.", env="ACCELERATE_USE_DEEPSPEED")
    use_fsdp: bool = _paradigm("Train with fully sharded data parallelism.", env="ACCELERATE_USE_FSDP")
    use_parallelism_config: bool = _paradigm(
        "Lay the processes out on a mesh (data, tensor, context and sequence parallelism).",
        env="ACCELERATE_USE_PARALLELISM_CONFIG",
        ask="Lay the processes out on a mesh (tensor, context or hybrid parallelism)?",
        when=lambda answers: answers["distributed_type"] == "FSDP",
        advanced=True,
    )
    use_megatron_lm: bool = _paradigm("Train with Megatron-LM.", env="ACCELERATE_USE_MEGATRON_LM")
    gpu_ids: str | None = optional(
        "Devices of this machine to use, separated by commas; 'all' (the default) uses every visible one.",
        group="Distributed GPUs",
        ask="Which devices of this machine (numbers separated by commas, or all)?",
        when=data_parallel_on_devices,
    )
    debug: bool = option(
        False,
        "Check before each collective that all processes agree on shapes, and name the one that does not.",
        group=GENERAL,
        flag_default=None,
        env="ACCELERATE_DEBUG_MODE",
        spell=only_true("true"),
        advanced=True,
        ask="Check before each collective that all processes agree on shapes (slow)?",
        when=several_processes,
    )
    main_training_function: str = option(
        "main",
        "Function of the script that is run in each process on TPU.",
        group="TPU",
        flag_default=None,
        advanced=True,
        ask="Which function of the script is run in each process?",
        when=lambda answers: answers["distributed_type"] == "XLA",
    )
