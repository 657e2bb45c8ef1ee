"""Sections for processes, nodes and devices, the rendezvous, diagnostics, and stopping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from accelerate.base import (
    SAGEMAKER_PYTHON_VERSION,
    SAGEMAKER_PYTORCH_VERSION,
    SAGEMAKER_TRANSFORMERS_VERSION,
    DistributedType,
)
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
"""`distributed_type` of a configuration file -> the option it selects."""

EXCLUSIVE = ("multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
"""Exclusive strategies. A layer that sets one overrides those of lower layers."""


def several_processes(answers: Mapping[str, Any]) -> bool:
    """Returns whether the strategy uses more than one process."""
    return bool(answers["distributed_type"] != "NO")


def several_machines(answers: Mapping[str, Any]) -> bool:
    """Returns whether there is more than one node."""
    return bool(answers["num_machines"] > 1)


def data_parallel_on_devices(answers: Mapping[str, Any]) -> bool:
    """Returns whether each process trains on a separate device."""
    return PARADIGM_OF_TYPE.get(answers["distributed_type"]) in ("multi_gpu", "use_fsdp", "use_deepspeed")


_paradigm = partial(option, False, group=PARADIGMS, key=None, encode=only_true("true"))


@dataclass(frozen=True, kw_only=True)
class LaunchSection(Section):
    """Processes and devices of a launch."""

    title = RESOURCES

    compute_environment: str = option(
        "LOCAL_MACHINE",
        "Where the script runs: LOCAL_MACHINE (this machine or a cluster) or AMAZON_SAGEMAKER.",
        choices=("LOCAL_MACHINE", "AMAZON_SAGEMAKER"),
        flags=(),
        ask="Where does the script run?",
    )
    distributed_type: str | None = optional(
        "The training strategy in files: NO, MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED, MEGATRON_LM or XLA.",
        flags=(),
        ask="Which training strategy (NO is one process, XLA is TPU)?",
        offers=("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"),
    )
    cpu: bool = option(
        False,
        "Run on the CPU even if there is an accelerator.",
        group=HARDWARE,
        key="use_cpu",
        env="ACCELERATE_USE_CPU",
        encode=only_true("True"),
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
        encode=only_true("1"),
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
        encode=only_true("true"),
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


_machines_option = partial(option, when=several_machines)


@dataclass(frozen=True, kw_only=True)
class RendezvousSection(Section):
    """Addresses, ports, restarts and logs."""

    title = "Distributed GPUs"

    nnodes: str | None = optional(
        "Number of machines, or the smallest and the largest number of an elastic run: 2:4. An elastic run "
        "continues with the remaining machines when some are lost, and grows when they return.",
        key=None,  # YAML reads 2:4 as a number
    )
    min_processes: int | None = optional(
        "Smallest number of processes with which an elastic run continues. --num_processes is the largest.",
        limits=(1, 10**6),
    )
    same_network: bool = _machines_option(
        False,
        "The machines are on one local network. Kept for configuration files: addresses are used as given.",
        advanced=True,
        ask="Are the machines on one local network?",
    )
    machine_rank: int = _machines_option(
        0,
        "Rank of this machine, from 0.",
        limits=(0, 10**6),
        flag_default=None,
        ask="What is the rank of this machine?",
    )
    main_process_ip: str | None = _machines_option(
        None, "Address of the machine of rank 0.", ask="What is the address of the machine of rank 0?"
    )
    main_process_port: int | None = _machines_option(
        None,
        "Port of the machine of rank 0 where processes meet (29500). On one machine a busy port is replaced, "
        "and 0 takes any free one; on several machines a busy port is an error.",
        limits=(0, 65535),
        ask="Which port do the processes meet on?",
    )
    tee: str = option(
        "0",
        "Standard streams that go to the log folder and to the terminal: 0 none, 1 out, 2 err, 3 both; "
        "or for single ranks, as in 0:3,1:2.",
        flags=("-t", "--tee"),
        key=None,
    )
    log_dir: str | None = optional("Folder for the logs of the processes.", key=None)
    role: str = option("default", "Name of these workers in logs.", key=None)
    rdzv_backend: str = _machines_option(
        "static",
        "How the processes meet: static (fixed machines) or c10d (elastic).",
        advanced=True,
        ask="How do the processes meet (static: fixed machines, c10d: elastic)?",
        offers=("static", "c10d"),
    )
    rdzv_conf: str = option("", "Further settings of the meeting: key1=value1,key2=value2.", key=None)
    max_restarts: int = option(
        0, "How often failed processes are started again (10 in an elastic run).", limits=(0, 10**6), key=None
    )
    monitor_interval: float = option(
        0.1, "Seconds between two looks at the processes.", limits=(0.001, 86400), key=None
    )


@dataclass(frozen=True, kw_only=True)
class DiagnosticsSection(Section):
    """Timeouts for reports of hangs, and whether the run continues."""

    title = "Diagnostics Arguments"
    env_prefix = "ACCELERATE_"

    hang_timeout: int | None = optional(
        "Seconds that a process may wait for the others before a report says where each of them is (60); "
        "0 for no reports.",
        limits=(0, 10**6),
    )
    hang_action: str | None = optional(
        "What follows a report: report (the default) lets the run continue, abort ends all processes with an "
        "error.",
        choices=("report", "abort"),
    )
    run_records: str | None = optional(
        "Folder in which each rank records times of steps, checkpoints and events, for accelerate report; "
        "yes for the state folder of the user, no for none (yes with a project_dir)."
    )
    step_times: bool = option(
        False,
        "Print the time of steps by phase, and what makes them slow, at the end of the run.",
        encode=only_true("true"),
    )
    monitor: bool = option(
        False,
        "Show throughput, the time of steps by phase, memory and conclusions in the terminal during the run.",
        encode=lambda value: None,  # for the launcher alone
    )
    peak_tflops: float | None = optional(
        "Peak of a device in 10^12 FLOPs per second, for the model FLOPs utilization that count_flops "
        "measures (known for common data-center GPUs).",
        limits=(1e-6, 1e9),
    )


@dataclass(frozen=True, kw_only=True)
class StoppingSection(Section):
    """Conditions of `accelerator.should_stop` and `accelerator.should_save` besides signals."""

    title = "Stopping Arguments"
    env_prefix = "ACCELERATE_"

    max_time: str | None = optional(
        "Time after its start when a process is asked to save and stop: seconds, HH:MM:SS or D-HH:MM:SS."
    )
    stop_margin: int | None = optional(
        "Seconds before the end of an allocation of SLURM when processes are asked to save and stop (120); "
        "0 leaves that to signals.",
        limits=(0, 10**6),
    )
    stop_file: str | None = optional("A file that asks all processes to save and stop as soon as it exists.")
    save_file: str | None = optional(
        "A file that asks all processes to save and continue, each time that it is touched."
    )


@dataclass(frozen=True, kw_only=True)
class RecoverySection(Section):
    """Replica groups that continue when one of them ends."""

    title = "Recovery Arguments"
    env_prefix = "ACCELERATE_"

    replicas: int | None = optional(
        "Number of replica groups, which divide the processes. If one ends, the others continue and it is "
        "started again (torchft).",
        limits=(1, 10**5),
    )
    min_replicas: int | None = optional(
        "Smallest number of replica groups that take a step; with fewer, the run waits (1).",
        limits=(1, 10**5),
    )
    replica_batch: str | None = optional(
        "Global batch of a step with fewer replica groups: constant (the default), for which each computes "
        "more micro-batches, or shrink.",
        choices=("constant", "shrink"),
    )
    replica_timeout: int | None = optional(
        "Timeout for one collective between replica groups, in seconds (60).", limits=(1, 10**6)
    )
    lighthouse: str | None = optional(
        "Address of a running lighthouse of torchft. By default machine 0 starts one."
    )


@dataclass(frozen=True, kw_only=True)
class MpirunSection(Section):
    """Processes started by mpirun."""

    title = "MPI Arguments"
    file_key = "mpirun_config"
    switch = "--mpirun_hostfile"

    mpirun_hostfile: str | None = optional(
        "Host file for mpirun; processes are then started by it.",
        ask="Host file for mpirun (empty: processes are not started by mpirun)?",
    )
    mpirun_ccl: int | None = optional(
        "Threads of oneCCL in each process (CCL_WORKER_COUNT).",
        flags=(),
        env="CCL_WORKER_COUNT",
        foreign=True,
        advanced=True,
    )

    @classmethod
    def asked(cls, answers: Mapping[str, Any]) -> bool:
        """Returns whether CPU processes run on several nodes, where mpirun may start them."""
        return answers["distributed_type"] == "MULTI_CPU" and several_machines(answers)


@dataclass(frozen=True, kw_only=True)
class SlurmSection(Section):
    """Launch of one agent on each node of a SLURM allocation, or of a batch job."""

    title = "SLURM Arguments"
    file_key = "slurm_config"
    switch = "--slurm"

    slurm: bool = option(
        False,
        "Inside an allocation of SLURM: start one agent on each of its machines with srun; addresses and "
        "counts are those of the allocation. In a configuration file it has no effect outside of one.",
        negations=("--no_slurm",),
        ask="Start the processes on all machines of the allocation, when inside one of SLURM?",
        advanced=True,
    )
    submit: bool = option(
        False, "With --slurm: write a batch script for --num_machines machines and submit it.", key=None
    )
    slurm_options: str = option(
        "", "Further options for srun, or with --submit for sbatch, in one text: '--partition=gpu --time=60'."
    )
    slurm_script: str | None = optional(
        "With --submit: where the batch script is written (the script's name, with .sbatch).", key=None
    )

    @classmethod
    def asked(cls, answers: Mapping[str, Any]) -> bool:
        """Returns whether there may be several processes."""
        return several_processes(answers)


_pod_option = partial(optional, when=lambda answers: answers["tpu_use_cluster"])


@dataclass(frozen=True, kw_only=True)
class TpuSection(Section):
    """A TPU host, or the hosts of a pod."""

    title = "TPU"
    switch = "--tpu"

    tpu: bool = option(False, "Run on TPU.", group=HARDWARE, key=None)
    tpu_use_cluster: bool = option(
        False,
        "Start the script on all hosts of a TPU pod.",
        flags=("--tpu_cluster",),
        negations=("--no_tpu_cluster",),
        ask="Start the script on all hosts of a TPU pod?",
    )
    tpu_use_sudo: bool = option(
        False,
        "Run as root on the hosts of the pod.",
        ask=True,
        when=lambda answers: answers["tpu_use_cluster"],
    )
    vm: tuple[str, ...] | None = _pod_option(
        "Hosts of the pod; once for each.",
        action="append",
        key="tpu_vm",
        ask="Which hosts of the pod (separated by commas, empty for all)?",
    )
    env: tuple[str, ...] | None = _pod_option(
        "Variables (NAME=value) for the hosts of the pod; once for each.",
        action="append",
        key="tpu_env",
        ask="Which variables for the hosts (NAME=value, separated by commas)?",
    )
    downcast_bf16: bool = option(
        False,
        "Compute float32 and float64 in bfloat16 on TPU; without it only float32.",
        ask="Compute float32 and float64 in bfloat16?",
        when=lambda answers: answers["mixed_precision"] == "bf16",
    )
    tpu_name: str | None = _pod_option("Name of the TPU.", flags=(), ask="What is the name of the TPU?")
    tpu_zone: str | None = _pod_option("Zone of the TPU.", flags=(), ask="In which zone is the TPU?")
    command_file: str | None = _pod_option("File of commands that set up each host.", flags=(), ask=True)
    commands: tuple[str, ...] | None = _pod_option("Commands that set up each host.", flags=(), ask=True)


def _image_option(package: str, default: str) -> Any:
    text = f"{package} version of the image"
    return option(default, f"{text}.", ask=f"Which {text}?", advanced=True)


@dataclass(frozen=True, kw_only=True)
class SageMakerSection(Section):
    """A training job on Amazon SageMaker."""

    title = "AWS Arguments"
    makes_flags = False

    aws_access_key_id: str | None = optional(
        "Access key for AWS.", flags=("--aws_access_key_id",), key=None, secret=True
    )
    aws_secret_access_key: str | None = optional(
        "Secret key for AWS.", flags=("--aws_secret_access_key",), key=None, secret=True
    )
    ec2_instance_type: str | None = optional("Instance type.", ask="Which instance type?")
    iam_role_name: str | None = optional(
        "Role that the job runs as.", ask="Which IAM role does the job run as?"
    )
    image_uri: str | None = optional("Container image of your own.", ask=True)
    profile: str | None = optional(
        "Profile of the AWS configuration.",
        ask="Which profile of the AWS configuration (empty for the default one)?",
    )
    region: str = option("us-east-1", "AWS region.", ask="Which AWS region?")
    base_job_name: str = option(
        "accelerate-sagemaker-1", "Beginning of the job's name.", ask="How does the job's name begin?"
    )
    pytorch_version: str = _image_option("PyTorch", SAGEMAKER_PYTORCH_VERSION)
    transformers_version: str = _image_option("Transformers", SAGEMAKER_TRANSFORMERS_VERSION)
    py_version: str = _image_option("Python", SAGEMAKER_PYTHON_VERSION)
    sagemaker_inputs_file: str | None = optional("Table of input channels.", ask=True)
    sagemaker_metrics_file: str | None = optional("Table of metric definitions.", ask=True)
    additional_args: dict[str, Any] | None = optional(
        "Further arguments for the estimator of SageMaker, as they are."
    )

    @classmethod
    def active(cls, values: Mapping[str, Any]) -> bool:
        """Returns whether the run is a job on Amazon SageMaker."""
        return bool(values["compute_environment"] == "AMAZON_SAGEMAKER")
