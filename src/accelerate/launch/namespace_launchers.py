"""The launchers that take an `argparse.Namespace` with every option already decided under its name."""

from __future__ import annotations

import argparse
from dataclasses import replace

from accelerate.launch.backends import launcher_for
from accelerate.launch.machine import Machine
from accelerate.launch.namespace import (
    SIMPLE,
    deepspeed_plan,
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
    sagemaker_plan,
    settings_of,
)
from accelerate.launch.plan import LaunchPlan, Rendezvous, Target
from accelerate.launch.ports import DEFAULT_PORT
from accelerate.settings import FLAG, SageMakerConfig, env
from accelerate.settings.sections import RendezvousSection


def simple_launcher(args: argparse.Namespace) -> None:
    """Run the namespace's script as one process.

    Args:
        args: every option of ``accelerate launch``, already decided.

    Raises:
        SystemExit: the script failed; with its exit code.
    """
    _, variables = prepare_simple_launcher_cmd_env(args)
    _run(LaunchPlan("local", Target.of(args), environment=variables))


def multi_gpu_launcher(args: argparse.Namespace) -> None:
    """Run the namespace's script in several processes.

    Args:
        args: every option of ``accelerate launch``, already decided.

    Raises:
        SystemExit: a process failed; with its exit code.
    """
    _run(_elastic_plan(args, prepare_multi_gpu_env(args)))


def _elastic_plan(args: argparse.Namespace, variables: dict[str, str]) -> LaunchPlan:
    settings = settings_of(args)
    wanted = settings[RendezvousSection]
    port = wanted.main_process_port or DEFAULT_PORT
    return LaunchPlan(
        launcher="elastic",
        target=Target.of(args),
        processes=args.num_processes,
        machines=settings.values["num_machines"],
        machine=wanted.machine_rank,
        rendezvous=Rendezvous.of(wanted, int(getattr(args, "master_port", None) or port)),
        environment=variables,
    )


def deepspeed_launcher(args: argparse.Namespace) -> None:
    """Run the namespace's script with DeepSpeed.

    Args:
        args: every option of ``accelerate launch``, already decided.

    Raises:
        SystemExit: a process failed; with its exit code.
    """
    command, variables = prepare_deepspeed_cmd_env(args)
    _run(_elastic_plan(args, variables) if command is None else deepspeed_plan(args, variables))


def tpu_launcher(args: argparse.Namespace) -> None:
    """Run the namespace's script on the chips of this TPU host.

    Args:
        args: every option of ``accelerate launch``, already decided.

    Raises:
        MissingPackageError: torch_xla is not installed.
    """
    _run(_tpu_plan(args, "tpu"))


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Run the namespace's script on all hosts of a TPU pod.

    Args:
        args: every option of ``accelerate launch``, already decided.

    Raises:
        SystemExit: a host failed; with its exit code.
    """
    _run(_tpu_plan(args, "tpu_pod"))


def _tpu_plan(args: argparse.Namespace, launcher: str) -> LaunchPlan:
    settings = settings_of(args).replaced(FLAG, tpu=True)
    plan = LaunchPlan(launcher, Target.of(args), environment=env.encode(settings, SIMPLE))
    return replace(plan, details=launcher_for(plan).details(settings, Machine(), plan))


def sagemaker_launcher(sagemaker_config: SageMakerConfig, args: argparse.Namespace) -> None:
    """Run the namespace's script as a job on Amazon SageMaker.

    Args:
        sagemaker_config: the job, as its configuration file describes it.
        args: every option of ``accelerate launch``.

    Raises:
        MissingPackageError: the vendor's package is not installed.
        LaunchError: the job failed.
    """
    _run(sagemaker_plan(sagemaker_config, args))


def _run(plan: LaunchPlan) -> None:
    code = launcher_for(plan).run(plan)
    if code:
        raise SystemExit(code)
