"""Programs and services that start processes: mpirun, SLURM, TPU pods, Amazon SageMaker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from accelerate.base import (
    SAGEMAKER_PYTHON_VERSION,
    SAGEMAKER_PYTORCH_VERSION,
    SAGEMAKER_TRANSFORMERS_VERSION,
)
from accelerate.settings.option import Section, option, optional
from accelerate.settings.sections.launch import HARDWARE


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
        """Only for CPU processes on several machines, where mpirun may be the one that starts them."""
        return bool(answers["distributed_type"] == "MULTI_CPU" and answers["num_machines"] > 1)


@dataclass(frozen=True, kw_only=True)
class SlurmSection(Section):
    """SLURM: one agent on each machine of the allocation, or a job that is submitted."""

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
        """Wherever there may be several processes."""
        return bool(answers["distributed_type"] != "NO")


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
    command_file: str | None = _pod_option(
        "File of commands that set up each host.",
        flags=(),
        ask="File of commands that set up each host (empty for none)?",
    )
    commands: tuple[str, ...] | None = _pod_option(
        "Commands that set up each host.",
        flags=(),
        ask="Commands that set up each host (separated by commas, empty for none)?",
    )


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
    image_uri: str | None = optional(
        "Container image of your own.", ask="Container image of your own (empty for none)?"
    )
    profile: str | None = optional(
        "Profile of the AWS configuration.",
        ask="Which profile of the AWS configuration (empty for the default one)?",
    )
    region: str = option("us-east-1", "AWS region.", ask="Which AWS region?")
    base_job_name: str = option(
        "accelerate-sagemaker-1", "Beginning of the job's name.", ask="How does the job's name begin?"
    )
    pytorch_version: str = option(
        SAGEMAKER_PYTORCH_VERSION,
        "PyTorch version of the image.",
        ask="Which PyTorch version of the image?",
        advanced=True,
    )
    transformers_version: str = option(
        SAGEMAKER_TRANSFORMERS_VERSION,
        "Transformers version of the image.",
        ask="Which Transformers version of the image?",
        advanced=True,
    )
    py_version: str = option(
        SAGEMAKER_PYTHON_VERSION,
        "Python version of the image.",
        ask="Which Python version of the image?",
        advanced=True,
    )
    sagemaker_inputs_file: str | None = optional(
        "Table of input channels.", ask="Table of input channels (empty for none)?"
    )
    sagemaker_metrics_file: str | None = optional(
        "Table of metric definitions.", ask="Table of metric definitions (empty for none)?"
    )
    additional_args: dict[str, Any] | None = optional(
        "Further arguments for the estimator of SageMaker, as they are."
    )

    @classmethod
    def active(cls, values: Mapping[str, Any]) -> bool:
        """Only for a job on Amazon SageMaker."""
        return bool(values["compute_environment"] == "AMAZON_SAGEMAKER")
