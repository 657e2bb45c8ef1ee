"""Functions for launching from an `argparse.Namespace`, which call the launchers.

The namespace, `args`, contains every option of ``accelerate launch`` under its name. The values are final,
and nothing is read from the machine. `current_env` is a dictionary that receives variables and is returned.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.base import environ
from accelerate.launch.backends import (
    SageMakerDetails,
    _convert_nargs_to_dict as _convert_nargs_to_dict,
    launcher_for,
    precision_variables,
)
from accelerate.launch.layout import INTEL_OPENMP, device_ids
from accelerate.launch.machine import DEFAULT_PORT, LOOPBACK_ADDRESS, Machine, get_free_port, is_port_in_use
from accelerate.launch.plan import LaunchPlan, Target, env_var_path_add, local_command
from accelerate.settings import (
    FLAG,
    Layer,
    SageMakerConfig,
    Section,
    Settings,
    all_options,
    env,
    merge_layers,
    sections,
)

MESH = (sections.ParallelismSection, sections.ContextParallelSection, sections.SequenceParallelSection)
SIMPLE = (sections.LaunchSection, sections.PrecisionSection, sections.Fp8Section)
DEEPSPEED = (*SIMPLE, sections.DeepSpeedSection, *MESH)
COMPILED = (*SIMPLE, sections.DynamoSection)
MULTI = (*COMPILED, sections.FsdpSection, sections.MegatronSection, *MESH)


def settings_of(args: argparse.Namespace) -> Settings:
    """Returns the settings of a namespace, with built-in values for missing and `None` entries."""
    present = {
        name: value for name, value in vars(args).items() if name in all_options() and value is not None
    }
    values = {name: all_options()[name].read(value, f"--{name}") for name, value in present.items()}
    values["cpu"] = bool(getattr(args, "cpu", None) or getattr(args, "use_cpu", None))
    return merge_layers(Layer(FLAG, values))


def _make_plan(
    settings: Settings,
    args: argparse.Namespace,
    launcher: str,
    environment: Mapping[str, str],
    port: Any = None,
) -> LaunchPlan:
    rendezvous = settings[sections.RendezvousSection]
    plan = LaunchPlan(
        launcher=launcher,
        target=Target.of(args),
        processes=settings.values["num_processes"] or 1,
        machines=settings.values["num_machines"],
        machine=rendezvous.machine_rank,
        rendezvous=rendezvous,
        address=rendezvous.main_process_ip or LOOPBACK_ADDRESS,
        port=int(port or rendezvous.main_process_port or DEFAULT_PORT),
        environment=environment,
    )
    return replace(plan, details=launcher_for(plan).details(settings, Machine(), plan))


def _encode(args: argparse.Namespace, sections: tuple[type[Section], ...]) -> dict[str, str]:
    """Returns the whole environment of processes that read these sections."""
    from accelerate.devices import CUDA, count_visible

    settings = settings_of(args)
    added = env.encode(settings, sections)
    ids = device_ids(settings.values["gpu_ids"])
    if ids:
        backend, _ = count_visible(environ.current())
        added[backend.visible_env or CUDA.visible_env or ""] = ",".join(ids)
    return {**environ.current(), **added}


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the whole environment for one process.

    Returns:
        The words of the command, and the environment.

    Raises:
        ConfigurationError: options contradict each other.
    """
    settings = settings_of(args)
    variables = _encode(args, COMPILED)
    variables["ACCELERATE_USE_CPU"] = str(settings.values["cpu"])
    if settings.values["cpu"]:
        variables.update(INTEL_OPENMP)
    if getattr(args, "num_machines", None) not in (None, 1) or getattr(args, "main_process_ip", None):
        variables["MASTER_ADDR"] = str(args.main_process_ip)
        variables["MASTER_PORT"] = str(args.main_process_port or DEFAULT_PORT)
    return local_command(Target.of(args)), variables


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Returns the whole environment for several processes, and adds the arguments of torchrun to `args`.

    Args:
        args: receives ``nproc_per_node``, ``nnodes``, ``node_rank``, ``master_addr``, ``master_port`` or
            ``rdzv_endpoint`` as text.

    Returns:
        The environment.

    Raises:
        ConfigurationError: options contradict each other, or the port is in use with several nodes.
    """
    _add_torchrun_names(args)
    return _encode(args, MULTI)


def _add_torchrun_names(args: argparse.Namespace) -> None:
    machines = getattr(args, "num_machines", None) or 1
    port = getattr(args, "main_process_port", None)
    args.nproc_per_node = str(args.num_processes // machines)
    if machines == 1:
        port = DEFAULT_PORT if port is None else int(port)
        args.master_port = str(get_free_port() if port == 0 or is_port_in_use(port) else port)
        return
    args.nnodes, args.node_rank = str(machines), str(args.machine_rank or 0)
    address = (str(args.main_process_ip), str(port or DEFAULT_PORT))
    if getattr(args, "same_network", False):
        args.master_addr, args.master_port = address
    else:
        args.rdzv_endpoint = ":".join(address)


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Returns the command and the whole environment for DeepSpeed.

    Args:
        args: receives the arguments of torchrun on one node, and with the launcher ``standard``.

    Returns:
        The command of the launcher of DeepSpeed, or ``None`` where torchrun starts the processes, and the
        environment.

    Raises:
        ConfigurationError: options contradict each other, or the port is in use with several nodes.
    """
    variables = _encode(args, DEEPSPEED)
    variables.pop("OMP_NUM_THREADS", None)
    if (threads := environ.current().get("OMP_NUM_THREADS")) is not None:
        variables["OMP_NUM_THREADS"] = threads
    fields = getattr(args, "deepspeed_fields_from_accelerate_config", None)
    if fields is not None:
        variables["ACCELERATE_CONFIG_DS_FIELDS"] = str(fields).lower()
    variables["PYTHONPATH"] = env_var_path_add("PYTHONPATH", str(Path.cwd()))
    several = (getattr(args, "num_machines", None) or 1) > 1
    if several and getattr(args, "deepspeed_multinode_launcher", None) not in (None, "standard"):
        plan = _make_plan(settings_of(args), args, "deepspeed", {})
        return launcher_for(plan).command(plan), variables
    _add_torchrun_names(args)
    return None, variables


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Adds the variables for bfloat16 on XLA and for debug mode, and returns both arguments.

    For the hosts of a `pod` they are added to the ``env`` of `args`, otherwise to `current_env`.
    """
    settings = settings_of(args)
    added = precision_variables(settings.values["downcast_bf16"], settings.values["mixed_precision"])
    if settings.values["debug"]:
        added["ACCELERATE_DEBUG_MODE"] = "true"
    if pod:
        args.env = [*(args.env or ()), *(f"{name}={text}" for name, text in added.items())]
    else:
        current_env.update(added)
    return args, current_env


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
    job = _plan_job(sagemaker_config, args).detail(SageMakerDetails)
    environ.assign(job.credentials)
    return dict(job.arguments), None if job.inputs is None else dict(job.inputs)


def _plan_job(config: SageMakerConfig, args: argparse.Namespace) -> LaunchPlan:
    """Returns the plan of a job from its configuration, where flags of the namespace take precedence."""
    rows = all_options()
    dynamo = [row.name for row in sections.DynamoSection.options()]
    keys = ("aws_access_key_id", "aws_secret_access_key", "mixed_precision", *dynamo)
    flags = {name: value for name in keys if (value := getattr(args, name, None)) is not None}
    present = {
        name: rows[name].read(value, name)
        for name, value in {**(config.dynamo_config or {}), **config.to_dict(), **flags}.items()
        if name in rows
    }
    settings = merge_layers(Layer(FLAG, {**present, "compute_environment": "AMAZON_SAGEMAKER"}))
    return _make_plan(settings, args, "sagemaker", {})


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Adds the variables of the FP8 recipe if mixed precision is FP8."""
    current_env.update(env.encode(settings_of(args), (sections.Fp8Section,)))
    return current_env


def prepare_extend_env_parallelism_config(
    args: argparse.Namespace, current_env: dict[str, str]
) -> dict[str, str]:
    """Adds the variables of the device mesh."""
    settings = settings_of(args).replaced(FLAG, use_parallelism_config=True)
    current_env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    current_env.update(env.encode(settings, MESH))
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


def simple_launcher(args: argparse.Namespace) -> None:
    """Runs the script of a namespace in one process.

    Raises:
        SystemExit: the script fails, with its exit code.
    """
    _, variables = prepare_simple_launcher_cmd_env(args)
    _run(_make_plan(settings_of(args), args, "local", variables))


def multi_gpu_launcher(args: argparse.Namespace) -> None:
    """Runs the script of a namespace in several processes.

    Raises:
        SystemExit: a process fails, with its exit code.
    """
    variables = prepare_multi_gpu_env(args)
    _run(_make_plan(settings_of(args), args, "elastic", variables, getattr(args, "master_port", None)))


def deepspeed_launcher(args: argparse.Namespace) -> None:
    """Runs the script of a namespace with DeepSpeed.

    Raises:
        SystemExit: a process fails, with its exit code.
    """
    command, variables = prepare_deepspeed_cmd_env(args)
    port = getattr(args, "master_port", None) if command is None else None
    _run(_make_plan(settings_of(args), args, "elastic" if command is None else "deepspeed", variables, port))


def tpu_launcher(args: argparse.Namespace) -> None:
    """Runs the script of a namespace on the chips of this TPU host.

    Raises:
        MissingPackageError: torch_xla is not installed.
    """
    _run(_plan_tpu(args, "tpu"))


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Runs the script of a namespace on all hosts of a TPU pod.

    Raises:
        SystemExit: a host fails, with its exit code.
    """
    _run(_plan_tpu(args, "tpu_pod"))


def _plan_tpu(args: argparse.Namespace, launcher: str) -> LaunchPlan:
    settings = settings_of(args).replaced(FLAG, tpu=True)
    return _make_plan(settings, args, launcher, env.encode(settings, COMPILED))


def sagemaker_launcher(sagemaker_config: SageMakerConfig, args: argparse.Namespace) -> None:
    """Runs the script of a namespace as a job on Amazon SageMaker.

    Args:
        sagemaker_config: the job of the configuration file.

    Raises:
        MissingPackageError: the package `sagemaker` is not installed.
        LaunchError: the job fails.
    """
    _run(_plan_job(sagemaker_config, args))


def _run(plan: LaunchPlan) -> None:
    code = launcher_for(plan).run(plan)
    if code:
        raise SystemExit(code)
