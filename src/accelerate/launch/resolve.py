"""Merged settings + machine -> LaunchPlan; the file that chooses the launcher. Nothing is started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from accelerate.base import ConfigurationError, LaunchError, PrecisionType, read_seconds, wrong_value
from accelerate.devices import CPU
from accelerate.launch.backends import Launcher, launcher_named
from accelerate.launch.layout import (
    CHOSEN as CHOSEN,
    check_layout,
    choose_processes,
    choose_shares,
    choose_threads,
    device_ids,
    listed,
    where,
    worker_environment,
)
from accelerate.launch.machine import Machine
from accelerate.launch.network import DEFAULT_PORT
from accelerate.launch.plan import LaunchPlan, Rendezvous, Target
from accelerate.settings import ENVIRONMENT, FLAG, SECTIONS, Settings, deepspeed_checks as checks
from accelerate.settings.sections import EXCLUSIVE, LaunchSection, RendezvousSection

STREAMS = re.compile(r"[0-3]|(\d:[0-3],)*\d:[0-3]")
NEEDS_GROUP = ("use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config")
"""Ways of training that need a process group, even with one process."""


def resolve_plan(settings: Settings, machine: Machine, target: Target) -> tuple[LaunchPlan, Settings]:
    """Decide what to start.

    Args:
        settings: merged from flags, environment and file.
        machine: facts about this machine.
        target: what runs in each process.

    Returns:
        The plan, and the settings with the values that were chosen here filled in.

    Raises:
        ConfigurationError: the settings contradict each other or the machine.
        LaunchError: the port that several machines agreed on is busy here.
    """
    check_paradigm(settings)
    check_budget(settings)
    starter, starter_notes = choose_starter(settings, machine)
    if starter is not None:
        settings = launcher_named(starter).amend(settings, machine)
    if starter is not None and launcher_named(starter).counts_remotely:
        return _plan_remotely(starter, settings, machine, target), settings
    machine = _hardware(settings, machine)
    check_engine(settings, machine)
    settings, shares = choose_shares(settings)
    settings, notes = choose_processes(settings, machine)
    check_layout(settings, machine, shares)
    name = starter or _choose_here(settings)
    launcher = launcher_named(name)
    _check_calls(settings, launcher, name, shares)
    settings = choose_threads(settings, machine, name, shares)
    rendezvous, port_notes = _rendezvous(settings, machine, name)
    plan = LaunchPlan(
        launcher=name,
        target=target,
        processes=settings.values["num_processes"],
        machines=settings.values["num_machines"],
        machine=settings.values["machine_rank"],
        rendezvous=rendezvous,
        shares=shares,
        environment=worker_environment(settings, machine, name),
        notes=(*settings.notes, *_idle_notes(settings), *starter_notes, *notes, *port_notes),
    )
    plan = replace(plan, notes=(*plan.notes, *_layout_note(plan)))
    return replace(plan, details=launcher.details(settings, machine, plan)), settings


def _plan_remotely(name: str, settings: Settings, machine: Machine, target: Target) -> LaunchPlan:
    """A plan whose processes are counted on the machines where they run."""
    given = settings.values["num_processes"]
    plan = LaunchPlan(
        launcher=name,
        target=target,
        processes=given if given and given > 0 else 1,
        machines=settings.values["num_machines"],
        environment=worker_environment(settings, machine, name),
        notes=settings.notes,
    )
    return replace(plan, details=launcher_named(name).details(settings, machine, plan))


def _idle_notes(settings: Settings) -> tuple[str, ...]:
    """Name the flags that change nothing, since what they belong to is not chosen."""
    notes = []
    for section in (s for s in SECTIONS if s.switch and not s.active(settings.values)):
        idle = [
            f"--{row.name}"
            for row in section.options()
            if settings.source(row.name) == FLAG and settings.values[row.name] != row.default
        ]
        if idle:
            notes.append(
                f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect without {section.switch}"
            )
    return tuple(notes)


def _layout_note(plan: LaunchPlan) -> tuple[str, ...]:
    """Say how the total is distributed, since it is easily taken for the count of one machine."""
    if plan.machines == 1:
        return ()
    total = f"{plan.processes} processes in total: {plan.layout}"
    return (f"{total}; machine {plan.machine} has {plan.ranks}",)


def check_paradigm(settings: Settings) -> None:
    """Refuse two ways of training at once."""
    chosen = [f"--{name}" for name in EXCLUSIVE if settings.values[name]]
    if len(chosen) > 1 and chosen != ["--multi_gpu"]:
        raise ConfigurationError(f"{' and '.join(chosen)} exclude each other. Keep one of them.")


def choose_cpu_or_devices(settings: Settings) -> Settings:
    """Decide between the CPU and `multi_gpu` where both are asked for: a flag wins over a variable or file.

    Args:
        settings: merged, before the devices of the machine are looked for.

    Raises:
        ConfigurationError: two flags contradict each other.
    """
    if settings.values["cpu"] and settings.source("gpu_ids") == FLAG:
        settings = settings.noted("--gpu_ids has no effect on the CPU")
    if not (settings.values["cpu"] and settings.values["multi_gpu"]):
        return settings
    sources = settings.source("cpu"), settings.source("multi_gpu")
    if sources == (FLAG, FLAG):
        raise ConfigurationError("--cpu and --multi_gpu exclude each other. Keep one of them.")
    if sources[1] == FLAG:
        note = f"--multi_gpu is used, and {where(settings, 'cpu')}=true is not"
        return settings.replaced(FLAG, cpu=False).noted(note)
    if sources[0] == FLAG:
        return settings
    way = settings.values["distributed_type"]
    return settings.noted(f"the run stays on the CPU: {where(settings, 'cpu')}=true wins over {way}")


def check_budget(settings: Settings) -> None:
    """Refuse a time budget that the processes could not read."""
    text = settings.values["max_time"]
    try:
        read_seconds(text or "0")
    except ValueError:
        fix = "Write seconds (5400), HH:MM:SS (01:30:00) or D-HH:MM:SS (1-12:00:00)"
        raise wrong_value(where(settings, "max_time"), text, "this is not a span of time", fix) from None


def choose_starter(settings: Settings, machine: Machine) -> tuple[str | None, tuple[str, ...]]:
    """Name the program that starts the processes, if it is not this one, and the notes for the user.

    Raises:
        ConfigurationError: a flag asks for SLURM, and there is no allocation.
    """
    values = settings.values
    if values["submit"] and not values["slurm"]:
        raise wrong_value("--submit", True, "it belongs to --slurm", "Pass --slurm as well, or leave it out")
    if values["compute_environment"] == "AMAZON_SAGEMAKER":
        return "sagemaker", ()
    if values["tpu"]:
        return ("tpu_pod" if values["tpu_use_cluster"] else "tpu"), ()
    if values["slurm"]:
        return _choose_slurm(settings, machine)
    if values["mpirun_hostfile"]:
        return "mpi", ()
    several = values["num_machines"] > 1 or values["deepspeed_hostfile"]
    if values["use_deepspeed"] and several and _own_multinode(values):
        return "deepspeed", ()
    return None, ()


def _choose_slurm(settings: Settings, machine: Machine) -> tuple[str | None, tuple[str, ...]]:
    if settings.values["submit"]:
        return "sbatch", ()
    if "SLURM_JOB_ID" in (machine.environ or {}):
        return "slurm", ()
    origin, source = where(settings, "slurm"), settings.source("slurm")
    if source in (FLAG, ENVIRONMENT):
        fix = "Ask for one with salloc or sbatch, or add --submit"
        raise wrong_value(origin, True, "this is not inside an allocation of SLURM", fix)
    return None, (f"{origin} has no effect outside of an allocation",)


def _choose_here(settings: Settings) -> str:
    values = settings.values
    alone = values["num_processes"] == 1 and values["num_machines"] == 1
    return "local" if alone and not any(values[name] for name in NEEDS_GROUP) else "elastic"


def _own_multinode(values: Mapping[str, Any]) -> bool:
    return values["deepspeed_multinode_launcher"] not in (None, "standard")


def _hardware(settings: Settings, machine: Machine) -> Machine:
    """The machine as this run uses it: without its devices for `--cpu`, with those of `--gpu_ids` only."""
    launch = settings[LaunchSection]
    if launch.cpu:
        return replace(machine, hardware=CPU, devices=1)
    if not machine.has_accelerator:
        _refuse_devices(settings)
        return machine
    ids = device_ids(launch.gpu_ids)
    devices = len(ids) if ids else machine.devices
    return replace(machine, devices=devices)


def _refuse_devices(settings: Settings) -> None:
    fix = "Pass --cpu to run on the CPU, or check the driver and CUDA_VISIBLE_DEVICES"
    for name in ("multi_gpu", "gpu_ids"):
        value = settings.values[name]
        if value and value != "all":
            raise wrong_value(where(settings, name), value, "this machine shows no accelerator", fix)


def _check_calls(settings: Settings, launcher: Launcher, name: str, shares: tuple[int, ...]) -> None:
    if shares and name != "elastic":
        reason = f"the {name} launcher starts the same number on each machine"
        raise wrong_value("--processes_per_machine", listed(shares), reason, "Leave it out")
    rank = settings.values["machine_rank"]
    if launcher.called_once and rank:
        fix = "Call it once, on one machine, without it"
        raise wrong_value(
            where(settings, "machine_rank"), rank, f"the {name} launcher starts all machines", fix
        )


def _rendezvous(settings: Settings, machine: Machine, launcher: str) -> tuple[Rendezvous, tuple[str, ...]]:
    section = settings[RendezvousSection]
    if launcher == "local":
        return Rendezvous(), ()
    starter = launcher_named(launcher)
    several = settings.values["num_machines"] > 1
    if several and not section.main_process_ip and not starter.finds_address:
        fix = "Pass the address of the machine of rank 0"
        raise wrong_value("--main_process_ip", None, "several machines need a place to meet", fix)
    _check_streams(settings)
    port, notes = _port(settings, machine, several and not starter.called_once)
    return Rendezvous.of(section, port), notes


def _check_streams(settings: Settings) -> None:
    """Refuse streams and further settings that torch would refuse."""
    streams, further = settings.values["tee"], settings.values["rdzv_conf"]
    if not STREAMS.fullmatch(streams):
        fix = "Write 0, 1, 2 or 3, or one of these for single ranks: 0:3,1:2"
        raise wrong_value(where(settings, "tee"), streams, "this names no streams", fix)
    if further and not all("=" in pair.strip("=") for pair in further.split(",")):
        fix = "Write for example timeout=900,read_timeout=60"
        raise wrong_value(where(settings, "rdzv_conf"), further, "a setting has no name or no value", fix)


def _port(settings: Settings, machine: Machine, several: bool) -> tuple[int, tuple[str, ...]]:
    given = settings.values["main_process_port"]
    port = DEFAULT_PORT if given is None else given
    if not 0 <= port <= 65535:
        raise wrong_value(where(settings, "main_process_port"), port, "ports go from 0 to 65535", "Use 29500")
    if several:
        _check_agreed_port(settings, machine, port)
        return port, ()
    if port == 0:
        return machine.free_port(), ()
    if not machine.port_in_use(port):
        return port, ()
    free = machine.free_port()
    return free, (f"port {port} is in use, {free} is taken instead",)


def _check_agreed_port(settings: Settings, machine: Machine, port: int) -> None:
    if port == 0:
        fix = "Choose one port and pass it on every machine"
        raise wrong_value("--main_process_port", 0, "several machines must agree on a port", fix)
    if settings.values["machine_rank"] == 0 and machine.port_in_use(port):
        raise LaunchError(
            f"Port {port} is in use on this machine, where the others would look for it. "
            f"Free it, or pass another --main_process_port on every machine."
        )


FILE = "deepspeed_config_file"


def check_engine(settings: Settings, machine: Machine) -> None:
    """Refuse what DeepSpeed cannot train with; nothing where it is not the way of training.

    Args:
        settings: merged, with the hardware that is chosen.
        machine: as the run uses it.

    Raises:
        ConfigurationError: with all that is wrong.
    """
    values = settings.values
    if not values["use_deepspeed"]:
        return
    if machine.hardware == CPU and values["mixed_precision"] == PrecisionType.FP16:
        fix = "Use bf16"
        reason = "DeepSpeed does not compute in float16 on the CPU"
        raise wrong_value(where(settings, "mixed_precision"), "fp16", reason, fix)
    if not values[FILE]:
        _check_fields({name: value for name in checks.USUAL if (value := values.get(name)) is not None})
        return
    config = checks.read_config(values[FILE], where(settings, FILE))
    checks.straighten(config)
    checks.refuse_config(checks.problems_of_config(config), f"Correct {values[FILE]}")
    fields = {name: checks.look_up(config, key) for name, key in checks.KEYS.items()}
    _check_fields({name: value for name, value in fields.items() if value not in (None, checks.AUTO)})


def _check_fields(fields: dict[str, Any]) -> None:
    complete: Any = SimpleNamespace(**{**checks.USUAL, **fields})
    checks.refuse_config(checks.problems_of_fields(complete), "Correct them")
