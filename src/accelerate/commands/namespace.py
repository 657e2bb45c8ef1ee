"""Functions of `accelerate.commands.launch` that launch from an `argparse.Namespace`, for other programs.

Each function converts the namespace, which has the options of ``accelerate launch`` under their names, to
settings and passes them to the resolver. Devices are not counted.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.base import environ
from accelerate.devices import CUDA, count_visible
from accelerate.launch import LaunchPlan, Target, env_var_path_add, local_command, look, resolve_plan
from accelerate.launch.backends import (
    SageMakerDetails,
    _convert_nargs_to_dict as _convert_nargs_to_dict,
    launcher_for,
    precision_variables,
)
from accelerate.settings import FLAG, Layer, SageMakerConfig, Settings, all_options, env, merge_layers
from accelerate.settings.sections import (
    ContextParallelSection,
    DynamoSection,
    Fp8Section,
    LaunchSection,
    ParallelismSection,
    PipelineSection,
    SequenceParallelSection,
)


def settings_of(args: argparse.Namespace, **values: Any) -> Settings:
    """Returns the settings of a namespace, with built-in values for missing and `None` entries.

    Args:
        **values: Values that replace those of the namespace.
    """
    present = {**vars(args), "cpu": getattr(args, "cpu", None) or getattr(args, "use_cpu", None), **values}
    rows = {name: row for name, row in all_options().items() if present.get(name) is not None}
    # It selects the strategy of a configuration file, and here the function selects it.
    rows.pop("distributed_type", None)
    return merge_layers(
        Layer(FLAG, {name: row.read(present[name], f"--{name}") for name, row in rows.items()})
    )


def _resolve(args: argparse.Namespace, launcher: str, **values: Any) -> LaunchPlan:
    settings = settings_of(args, **values)
    launch, variables = settings[LaunchSection], environ.current()
    hardware = count_visible(variables)[0] if launch.gpu_ids else CUDA
    machine = replace(
        look(variables, cpu=True),
        hardware=hardware if hardware.visible_env else CUDA,
        devices=max(launch.num_processes or 1, 1),
    )
    return resolve_plan(settings, machine, Target.of(args), launcher)[0]


def _run(plan: LaunchPlan) -> None:
    code = launcher_for(plan).run(plan)
    if code:
        raise SystemExit(code)


def _resolve_simple(args: argparse.Namespace) -> LaunchPlan:
    """Returns the plan of one process on this node."""
    machines = getattr(args, "num_machines", None) or 1
    plan = _resolve(args, "local", num_processes=machines)
    variables = {"ACCELERATE_USE_CPU": str(settings_of(args)[LaunchSection].cpu)}
    if machines > 1 or getattr(args, "main_process_ip", None):
        port = getattr(args, "main_process_port", None) or plan.port
        variables |= {"MASTER_ADDR": str(args.main_process_ip), "MASTER_PORT": str(port)}
    return replace(plan, environment={**plan.environment, **variables})


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the whole environment for one process.

    Returns:
        The words of the command, and the environment.

    Raises:
        ConfigurationError: options contradict each other.
    """
    plan = _resolve_simple(args)
    return local_command(plan.target), {**environ.current(), **plan.environment}


def simple_launcher(args: argparse.Namespace) -> None:
    """Runs the script of a namespace in one process.

    Raises:
        SystemExit: the script fails, with its exit code.
    """
    _run(_resolve_simple(args))


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Returns the whole environment for several processes, and adds the arguments of torchrun to `args`.

    Args:
        args: receives ``nproc_per_node``, ``nnodes``, ``node_rank``, ``master_addr``, ``master_port`` or
            ``rdzv_endpoint`` as text.

    Returns:
        The environment.

    Raises:
        ConfigurationError: options contradict each other.
        LaunchError: the port is in use with several nodes.
    """
    plan = _resolve(args, "elastic")
    _add_torchrun_names(args, plan)
    return {**environ.current(), **plan.environment}


def _add_torchrun_names(args: argparse.Namespace, plan: LaunchPlan) -> None:
    args.nproc_per_node = str(plan.local_processes)
    if plan.machines == 1:
        args.master_port = str(plan.port)
        return
    args.nnodes, args.node_rank = str(plan.machines), str(plan.machine)
    if getattr(args, "same_network", False):
        args.master_addr, args.master_port = plan.address, str(plan.port)
    else:
        args.rdzv_endpoint = f"{plan.address}:{plan.port}"


def multi_gpu_launcher(args: argparse.Namespace) -> None:
    """Runs the script of a namespace in several processes.

    Raises:
        SystemExit: a process fails, with its exit code.
    """
    plan = _resolve(args, "elastic")
    _add_torchrun_names(args, plan)
    _run(plan)


def _resolve_deepspeed(args: argparse.Namespace) -> LaunchPlan:
    """Returns the plan for the launcher of DeepSpeed on several nodes, otherwise for torchrun."""
    several = (getattr(args, "num_machines", None) or 1) > 1
    own_launcher = getattr(args, "deepspeed_multinode_launcher", None) not in (None, "standard")
    plan = _resolve(args, "deepspeed" if several and own_launcher else "elastic")
    # The number of threads is that of the user, and DeepSpeed compiles models by its own settings.
    left_out = {"OMP_NUM_THREADS", *env.encode(settings_of(args), (DynamoSection,))}
    variables = {name: text for name, text in plan.environment.items() if name not in left_out}
    fields = getattr(args, "deepspeed_fields_from_accelerate_config", None)
    if fields is not None:
        variables["ACCELERATE_CONFIG_DS_FIELDS"] = str(fields).lower()
    variables["PYTHONPATH"] = env_var_path_add("PYTHONPATH", str(Path.cwd()))
    return replace(plan, environment=variables)


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Returns the command and the whole environment for DeepSpeed.

    Args:
        args: receives the arguments of torchrun on one node, and with the launcher ``standard``.

    Returns:
        The command of the launcher of DeepSpeed, or ``None`` where torchrun starts the processes, and the
        environment.

    Raises:
        ConfigurationError: options contradict each other.
        LaunchError: the port is in use with several nodes.
    """
    plan = _resolve_deepspeed(args)
    variables = {**environ.current(), **plan.environment}
    if plan.launcher == "deepspeed":
        return launcher_for(plan).command(plan), variables
    _add_torchrun_names(args, plan)
    return None, variables


def deepspeed_launcher(args: argparse.Namespace) -> None:
    """Runs the script of a namespace with DeepSpeed.

    Raises:
        SystemExit: a process fails, with its exit code.
    """
    plan = _resolve_deepspeed(args)
    if plan.launcher == "elastic":
        _add_torchrun_names(args, plan)
    _run(plan)


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Adds the variables for bfloat16 on XLA and for debug mode, and returns both arguments.

    For the hosts of a `pod` they are added to the ``env`` of `args`, otherwise to `current_env`.
    """
    settings = settings_of(args)
    added = precision_variables(settings)
    if settings[LaunchSection].debug:
        added["ACCELERATE_DEBUG_MODE"] = "true"
    if pod:
        args.env = [*(args.env or ()), *(f"{name}={text}" for name, text in added.items())]
    else:
        current_env.update(added)
    return args, current_env


def tpu_launcher(args: argparse.Namespace) -> None:
    """Runs the script of a namespace on the chips of this TPU host.

    Raises:
        MissingPackageError: torch_xla is not installed.
    """
    _run(_resolve(args, "tpu", tpu=True))


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Runs the script of a namespace on all hosts of a TPU pod.

    Raises:
        SystemExit: a host fails, with its exit code.
    """
    _run(_resolve(args, "tpu_pod", tpu=True))


def _resolve_job(config: SageMakerConfig, args: argparse.Namespace) -> LaunchPlan:
    """Returns the plan of a job from its configuration, where flags of the namespace take precedence."""
    dynamo = [row.name for row in DynamoSection.options()]
    keys = ("aws_access_key_id", "aws_secret_access_key", "mixed_precision", *dynamo)
    flags = {name: value for name in keys if (value := getattr(args, name, None)) is not None}
    values = {**(config.dynamo_config or {}), **config.to_dict(), **flags}
    rows = all_options()
    present = {name: rows[name].read(value, name) for name, value in values.items() if name in rows}
    settings = merge_layers(Layer(FLAG, {**present, "compute_environment": "AMAZON_SAGEMAKER"}))
    return resolve_plan(settings, look(environ.current(), cpu=True), Target.of(args))[0]


def prepare_sagemager_args_inputs(
    sagemaker_config: SageMakerConfig, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Returns the arguments of the estimator of a SageMaker job and its inputs, and sets AWS variables.

    Args:
        sagemaker_config: the job of the configuration file.

    Returns:
        Arguments of the estimator by name, and channel -> location of its data, None for none.

    Raises:
        ConfigurationError: the job is invalid.
    """
    job = _resolve_job(sagemaker_config, args).detail(SageMakerDetails)
    environ.assign(job.credentials)
    return dict(job.arguments), None if job.inputs is None else dict(job.inputs)


def sagemaker_launcher(sagemaker_config: SageMakerConfig, args: argparse.Namespace) -> None:
    """Runs the script of a namespace as a job on Amazon SageMaker.

    Args:
        sagemaker_config: the job of the configuration file.

    Raises:
        MissingPackageError: the package `sagemaker` is not installed.
        LaunchError: the job fails.
    """
    _run(_resolve_job(sagemaker_config, args))


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Adds the variables of the FP8 recipe if mixed precision is FP8."""
    current_env.update(env.encode(settings_of(args), (Fp8Section,)))
    return current_env


def prepare_extend_env_parallelism_config(
    args: argparse.Namespace, current_env: dict[str, str]
) -> dict[str, str]:
    """Adds the variables of the device mesh."""
    settings = settings_of(args, use_parallelism_config=True)
    current_env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    mesh = (ParallelismSection, PipelineSection, ContextParallelSection, SequenceParallelSection)
    current_env.update(env.encode(settings, mesh))
    return current_env


def _filter_args(
    args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: list[str] | None = None
) -> argparse.Namespace:
    """Returns the values of a namespace that another parser knows.

    `default_args` are required arguments of that parser.
    """
    known, _ = parser.parse_known_args(default_args or [])
    shared = {name: value for name, value in vars(args).items() if hasattr(known, name)}
    vars(known).update(shared)
    return known
