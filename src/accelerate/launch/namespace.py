"""The entry points that take an `argparse.Namespace`: calls of what the resolver uses too.

Such a namespace holds every option, already decided, under its name; nothing is looked up on the machine.
"""

from __future__ import annotations

import argparse
from typing import Any

from accelerate.base import environ
from accelerate.base.errors import wrong_value
from accelerate.launch.backends.base import launcher_for
from accelerate.launch.command import local_command
from accelerate.launch.environment import INTEL_OPENMP, device_ids
from accelerate.launch.plan import LaunchPlan, Rendezvous, Target
from accelerate.launch.ports import DEFAULT_PORT, get_free_port, is_port_in_use
from accelerate.settings import env
from accelerate.settings.merge import FLAG, Layer, Settings, all_options, merge
from accelerate.settings.option import Section
from accelerate.settings.sections.dynamo import DynamoSection
from accelerate.settings.sections.fsdp import FsdpSection
from accelerate.settings.sections.launch import LaunchSection
from accelerate.settings.sections.megatron import MegatronSection
from accelerate.settings.sections.parallelism import (
    ContextParallelSection,
    ParallelismSection,
    SequenceParallelSection,
)
from accelerate.settings.sections.precision import Fp8Section, PrecisionSection
from accelerate.settings.sections.rendezvous import RendezvousSection

MESH = (ParallelismSection, ContextParallelSection, SequenceParallelSection)
SIMPLE = (LaunchSection, PrecisionSection, DynamoSection, Fp8Section)
MULTI = (*SIMPLE, FsdpSection, MegatronSection, *MESH)


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that a namespace holds; an option it lacks, or holds as ``None``, has its built-in value.

    Raises:
        ConfigurationError: a value has the wrong type.
    """
    held = vars(args)
    values: dict[str, Any] = {}
    for name, row in all_options().items():
        value = held.get(name)
        if value is not None:
            values[name] = row.read(value, f"--{name}")
    values["cpu"] = bool(held.get("cpu")) or bool(held.get("use_cpu"))
    return merge(Layer(FLAG, values))


def _encode(args: argparse.Namespace, sections: tuple[type[Section], ...]) -> dict[str, str]:
    settings = settings_of(args)
    added = env.encode(settings, sections)
    ids = device_ids(settings.values["gpu_ids"])
    if ids:
        added[_visible_variable()] = ",".join(ids)
    return {**environ.current(), **added}


def _visible_variable() -> str:
    from accelerate.devices.catalogue import CUDA, count_visible

    backend, _ = count_visible(environ.current())
    return backend.visible_env or CUDA.visible_env or ""


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command and the whole environment for one process.

    Args:
        args: every option of ``accelerate launch``, already decided.

    Returns:
        The words of the command, and the environment.

    Raises:
        ConfigurationError: the namespace contradicts itself.
    """
    settings = settings_of(args)
    variables = _encode(args, SIMPLE)
    variables["ACCELERATE_USE_CPU"] = str(settings.values["cpu"])
    if settings.values["cpu"]:
        variables.update(INTEL_OPENMP)
    if getattr(args, "num_machines", None) not in (None, 1) or getattr(args, "main_process_ip", None):
        variables["MASTER_ADDR"] = str(args.main_process_ip)
        variables["MASTER_PORT"] = str(args.main_process_port or DEFAULT_PORT)
    return local_command(Target.of(args)), variables


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """The whole environment for several processes; the namespace gets what ``torchrun`` needs.

    Args:
        args: every option of ``accelerate launch``, already decided; gets ``nproc_per_node``, ``nnodes``,
            ``node_rank``, ``master_addr``, ``master_port`` or ``rdzv_endpoint``, as text.

    Returns:
        The environment.

    Raises:
        ConfigurationError: the namespace contradicts itself, or its port is busy on a cluster.
    """
    _add_torchrun_names(args)
    return _encode(args, MULTI)


def _add_torchrun_names(args: argparse.Namespace) -> None:
    machines = getattr(args, "num_machines", None) or 1
    port = getattr(args, "main_process_port", None)
    args.nproc_per_node = str(args.num_processes // machines)
    if machines == 1:
        args.master_port = str(_free(DEFAULT_PORT if port is None else int(port)))
        return
    args.nnodes, args.node_rank = str(machines), str(args.machine_rank or 0)
    place = (str(args.main_process_ip), str(port or DEFAULT_PORT))
    if getattr(args, "same_network", False):
        args.master_addr, args.master_port = place
    else:
        args.rdzv_endpoint = ":".join(place)


def _free(port: int) -> int:
    return get_free_port() if port == 0 or is_port_in_use(port) else port


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the variables of the FP8 recipe, where FP8 is the number format.

    Args:
        args: every option of ``accelerate launch``.
        current_env: gets the variables.

    Returns:
        `current_env`.
    """
    current_env.update(env.encode(settings_of(args), (Fp8Section,)))
    return current_env


def prepare_extend_env_parallelism_config(
    args: argparse.Namespace, current_env: dict[str, str]
) -> dict[str, str]:
    """Add the variables of the mesh.

    Args:
        args: every option of ``accelerate launch``.
        current_env: gets the variables.

    Returns:
        `current_env`.
    """
    settings = settings_of(args).replaced(FLAG, use_parallelism_config=True)
    current_env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    current_env.update(env.encode(settings, MESH))
    return current_env


def _filter_args(
    args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: list[str] | None = None
) -> argparse.Namespace:
    """The values of a namespace that another parser knows too.

    Args:
        args: values by name.
        parser: says which names matter, and gives the others their defaults.
        default_args: words that the parser needs in order to parse at all.
    """
    known, _ = parser.parse_known_args(default_args or [])
    shared = {name: value for name, value in vars(args).items() if hasattr(known, name)}
    vars(known).update(shared)
    return known


def _convert_nargs_to_dict(nargs: list[str]) -> dict[str, Any]:
    """Read a script's own arguments as names and values; a flag without a value is ``True``.

    Args:
        nargs: words such as ``--epochs 3 --fast``.

    Raises:
        ConfigurationError: a value has no name before it.
    """
    result: dict[str, Any] = {}
    name: str | None = None
    for word in nargs:
        if word.startswith("--") or (word.startswith("-") and not _is_number(word)):
            name, _, text = word.lstrip("-").partition("=")
            result[name] = _value_of(text) if "=" in word else True
        elif name is None:
            raise wrong_value("argument", word, "it belongs to no option", "Write arguments as --name value")
        else:
            result[name] = _value_of(word)
    return result


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _value_of(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


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
    variables = prepare_multi_gpu_env(args)
    settings = settings_of(args)
    wanted = settings[RendezvousSection]
    port = wanted.main_process_port or DEFAULT_PORT
    plan = LaunchPlan(
        launcher="elastic",
        target=Target.of(args),
        processes=args.num_processes,
        machines=settings.values["num_machines"],
        machine=wanted.machine_rank,
        rendezvous=Rendezvous.of(wanted, int(getattr(args, "master_port", None) or port)),
        environment=variables,
    )
    _run(plan)


def _run(plan: LaunchPlan) -> None:
    code = launcher_for(plan).run(plan)
    if code:
        raise SystemExit(code)
