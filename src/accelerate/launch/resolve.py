"""Resolution of settings and machine facts into a launch plan, and its text and JSON formats."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from accelerate.base import (
    ConfigurationError,
    LaunchError,
    PrecisionType,
    describe_mesh,
    describe_position,
    environ,
    read_seconds,
    wrong_value,
)
from accelerate.devices import CPU
from accelerate.launch import layout
from accelerate.launch.backends import Launcher, launcher_for, launcher_named
from accelerate.launch.layout import Sizes, choose_sizes
from accelerate.launch.machine import DEFAULT_PORT, Machine
from accelerate.launch.plan import RECORDED, LaunchPlan, Target
from accelerate.settings import ENVIRONMENT, FLAG, SECTIONS, Option, Settings, deepspeed_checks as checks
from accelerate.settings.sections import (
    EXCLUSIVE,
    DeepSpeedSection,
    DiagnosticsSection,
    LaunchSection,
    MpirunSection,
    ParallelismSection,
    PrecisionSection,
    RecoverySection,
    RendezvousSection,
    SlurmSection,
    StoppingSection,
    TpuSection,
)

HIDDEN = "(hidden)"
MAX_RANKS = 64  # whose positions in the mesh are listed
_SIZE = ("parallelism_config_", "_size")
"""Beginning and end of the names of options that are sizes of mesh dimensions."""
STREAMS = re.compile(r"[0-3]|(\d:[0-3],)*\d:[0-3]")
NEEDS_GROUP = ("use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config")
"""Strategies that need a process group, even with one process."""


def resolve_plan(
    settings: Settings, machine: Machine, target: Target, launcher_name: str | None = None
) -> tuple[LaunchPlan, Settings]:
    """Returns the launch plan, and the settings with the chosen values.

    Raises an error if the settings contradict each other or the machine, or an agreed port is in use.

    Args:
        launcher_name: Key of `LAUNCHERS`. None chooses the launcher by the settings.
    """
    exclusive = [f"--{name}" for name in EXCLUSIVE if settings.values[name]]
    if len(exclusive) > 1 and exclusive != ["--multi_gpu"]:
        raise ConfigurationError(f"{' and '.join(exclusive)} exclude each other. Keep one of them.")
    try:
        read_seconds(settings[StoppingSection].max_time or "0")
    except ValueError:
        fix = "Write seconds (5400), HH:MM:SS (01:30:00) or D-HH:MM:SS (1-12:00:00)"
        raise layout.wrong_option(settings, "max_time", "this is not a span of time", fix) from None
    settings = _enable_mesh(settings)
    launcher_name = launcher_name or choose_launcher(settings, machine)
    if launcher_name is not None:
        settings = launcher_named(launcher_name).amend(settings, machine)
    if launcher_name is not None and launcher_named(launcher_name).counts_remotely:
        launch = settings[LaunchSection]
        plan = LaunchPlan(launcher_name, target, max(launch.num_processes or 1, 1), launch.num_machines)
    else:
        machine = _used_hardware(settings, machine)
        settings, plan = _plan_processes(
            _note_idle_flags(settings, launcher_name), machine, target, launcher_name
        )
    environment = layout.worker_environment(settings, machine, plan.launcher)
    if settings[DiagnosticsSection].monitor and plan.launcher not in RECORDED:
        option = layout.where(settings, "monitor")
        settings = settings.noted(f"{option} has no effect with the {plan.launcher} launcher")
    plan = replace(plan, environment=environment, notes=settings.notes)
    return replace(plan, details=launcher_for(plan).details(settings, machine, plan)), settings


def _plan_processes(
    settings: Settings, machine: Machine, target: Target, launcher_name: str | None
) -> tuple[Settings, LaunchPlan]:
    """Plans the number of processes on this node and their rendezvous."""
    check_engine(settings, machine)
    settings, per_machine = layout.choose_processes_per_machine(settings)
    settings = layout.choose_processes(settings, machine)
    if launcher_name is None:
        settings = layout.choose_machines(settings, machine)
    layout.check_layout(settings, machine, per_machine)
    launch, rendezvous = settings[LaunchSection], settings[RendezvousSection]
    is_single = launch.num_processes == launch.num_machines == 1
    needs_agent = rendezvous.max_restarts > 0 or any(getattr(launch, name) for name in NEEDS_GROUP)
    default = "local" if is_single and not needs_agent else "elastic"
    name = launcher_name or default
    launcher = launcher_named(name)
    if per_machine and name != "elastic":
        reason = f"the {name} launcher starts the same number on each machine"
        raise wrong_value("--processes_per_machine", layout.listed(per_machine), reason, "Leave it out")
    if launcher.called_once and rendezvous.machine_rank:
        fix = "Call it once, on one machine, without it"
        raise layout.wrong_option(settings, "machine_rank", f"the {name} launcher starts all machines", fix)
    if name != "local":
        _check_rendezvous(settings, launcher)
    settings, smallest = choose_sizes(settings)
    if smallest != Sizes() and name != "elastic":
        option = "min_processes" if settings.values["nnodes"] is None else "nnodes"
        reason = f"the {name} launcher starts a fixed number of processes"
        raise layout.wrong_option(settings, option, reason, "Leave it out")
    rendezvous = settings[RendezvousSection]
    settings = layout.choose_threads(settings, machine, name, per_machine)
    plan = LaunchPlan(
        launcher=name,
        target=target,
        processes=launch.num_processes or 1,
        machines=launch.num_machines,
        machine=rendezvous.machine_rank,
        per_machine=per_machine,
        smallest=smallest,
    )
    if name != "local":
        settings, port = _choose_port(settings, machine, plan.machines > 1 and not launcher.called_once)
        address = rendezvous.main_process_ip or plan.address
        plan = replace(plan, rendezvous=rendezvous, address=address, port=port)
    if plan.machines > 1:  # the total is easily taken for the count of one machine
        total = f"{plan.processes} processes in total: {plan.layout}"
        own = "" if smallest.machines else f"; machine {plan.machine} has {plan.ranks}"
        settings = settings.noted(total + own)
    return settings, plan


def _names_of_sizes(settings: Settings) -> list[str]:
    return [name for name in settings.values if name.startswith(_SIZE[0]) and name.endswith(_SIZE[1])]


def _enable_mesh(settings: Settings) -> Settings:
    """Enables the device mesh if the size of a dimension is set, which would have no effect without it."""
    given = [
        name
        for name in _names_of_sizes(settings)
        if settings.given(name) and settings.values[name] not in (None, 1)
    ]
    if not given or settings[LaunchSection].use_parallelism_config:
        return settings
    return settings.replaced(settings.source(given[0]), use_parallelism_config=True)


def _note_idle_flags(settings: Settings, launcher_name: str | None) -> Settings:
    """Notes the flags without an effect, because their feature is not enabled."""
    for section in (s for s in SECTIONS if s.switch and not s.active(settings.values)):
        idle = [
            f"--{row.name}"
            for row in section.options()
            if settings.source(row.name) == FLAG and settings.values[row.name] != row.default
        ]
        if idle:
            verb = "has" if len(idle) == 1 else "have"
            settings = settings.noted(f"{', '.join(idle)} {verb} no effect without {section.switch}")
    if launcher_name is None and settings[SlurmSection].slurm:
        settings = settings.noted(f"{layout.where(settings, 'slurm')} has no effect outside of an allocation")
    return settings


def choose_cpu_or_devices(settings: Settings) -> Settings:
    """Chooses the CPU or `multi_gpu` if both are set, where flags take precedence."""
    launch = settings[LaunchSection]
    if launch.cpu and settings.source("gpu_ids") == FLAG:
        settings = settings.noted("--gpu_ids has no effect on the CPU")
    if not (launch.cpu and launch.multi_gpu):
        return settings
    sources = settings.source("cpu"), settings.source("multi_gpu")
    if sources == (FLAG, FLAG):
        raise ConfigurationError("--cpu and --multi_gpu exclude each other. Keep one of them.")
    if sources[1] == FLAG:
        note = f"--multi_gpu is used, and {layout.where(settings, 'cpu')}=true is not"
        return settings.replaced(FLAG, cpu=False).noted(note)
    if sources[0] == FLAG:
        return settings
    reason = f"{layout.where(settings, 'cpu')}=true wins over {launch.distributed_type}"
    return settings.noted(f"the run stays on the CPU: {reason}")


def choose_launcher(settings: Settings, machine: Machine) -> str | None:
    """Returns the name of an external launcher, or None if this process starts the processes."""
    launch, slurm, tpu = settings[LaunchSection], settings[SlurmSection], settings[TpuSection]
    if slurm.submit and not slurm.slurm:
        raise wrong_value("--submit", True, "it belongs to --slurm", "Pass --slurm as well, or leave it out")
    if launch.compute_environment == "AMAZON_SAGEMAKER":
        return "sagemaker"
    if tpu.tpu:
        return "tpu_pod" if tpu.tpu_use_cluster else "tpu"
    if slurm.slurm:
        if slurm.submit or "SLURM_JOB_ID" in (machine.environ or {}):
            return "sbatch" if slurm.submit else "slurm"
        if settings.source("slurm") not in (FLAG, ENVIRONMENT):
            return None
        fix = "Ask for one with salloc or sbatch, or add --submit"
        raise layout.wrong_option(settings, "slurm", "this is not inside an allocation of SLURM", fix)
    if settings[RecoverySection].replicas is not None and environ.REPLICA not in (machine.environ or {}):
        return "replicas"
    if settings[MpirunSection].mpirun_hostfile:
        return "mpi"
    deepspeed = settings[DeepSpeedSection]
    several = launch.num_machines > 1 or deepspeed.deepspeed_hostfile
    starts_machines = deepspeed.deepspeed_multinode_launcher not in (None, "standard")
    return "deepspeed" if launch.use_deepspeed and several and starts_machines else None


def _used_hardware(settings: Settings, machine: Machine) -> Machine:
    """Returns the machine with the devices of this run, none for `--cpu` and those of `--gpu_ids`."""
    launch = settings[LaunchSection]
    if launch.cpu:
        return replace(machine, hardware=CPU, devices=1)
    if machine.has_accelerator:
        return replace(machine, devices=len(layout.device_ids(launch.gpu_ids)) or machine.devices)
    fix = "Pass --cpu to run on the CPU, or check the driver and CUDA_VISIBLE_DEVICES"
    for name, value in (("multi_gpu", launch.multi_gpu), ("gpu_ids", launch.gpu_ids)):
        if value and value != "all":
            raise layout.wrong_option(settings, name, "this machine shows no accelerator", fix)
    return machine


def _check_rendezvous(settings: Settings, launcher: Launcher) -> None:
    """Raises an error for several nodes without an address, and for values that torch refuses."""
    rendezvous, several = settings[RendezvousSection], settings[LaunchSection].num_machines > 1
    if several and not rendezvous.main_process_ip and not launcher.finds_address:
        fix = "Pass the address of the machine of rank 0"
        raise wrong_value(
            "--main_process_ip", None, "several machines need an address for the rendezvous", fix
        )
    if not STREAMS.fullmatch(rendezvous.tee):
        fix = "Write 0, 1, 2 or 3, or one of these for single ranks: 0:3,1:2"
        raise layout.wrong_option(settings, "tee", "these are not streams", fix)
    pairs = rendezvous.rdzv_conf
    if pairs and not all("=" in pair.strip("=") for pair in pairs.split(",")):
        fix = "Write for example timeout=900,read_timeout=60"
        raise layout.wrong_option(settings, "rdzv_conf", "a setting has no name or no value", fix)


def _choose_port(settings: Settings, machine: Machine, is_agreed: bool) -> tuple[Settings, int]:
    """Chooses the port of the user, or a free one if it is in use and no other node must know it."""
    rendezvous = settings[RendezvousSection]
    port = DEFAULT_PORT if rendezvous.main_process_port is None else rendezvous.main_process_port
    if not 0 <= port <= 65535:
        raise layout.wrong_option(settings, "main_process_port", "ports go from 0 to 65535", "Use 29500")
    if not is_agreed:
        if port and not machine.port_in_use(port):
            return settings, port
        free = machine.free_port()
        return settings.noted(f"port {port} is in use, {free} is used instead") if port else settings, free
    if port == 0:
        fix = "Choose one port and pass it on every machine"
        raise wrong_value("--main_process_port", 0, "several machines must agree on a port", fix)
    if rendezvous.machine_rank == 0 and machine.port_in_use(port):
        raise LaunchError(
            f"Port {port} is in use on this machine, to which the others connect. "
            f"Free it, or pass another --main_process_port on every machine."
        )
    return settings, port


def check_engine(settings: Settings, machine: Machine) -> None:
    """Raises one error for all settings that DeepSpeed does not support, if it is the strategy."""
    if not settings[LaunchSection].use_deepspeed:
        return
    if machine.hardware == CPU and settings[PrecisionSection].mixed_precision == PrecisionType.FP16:
        reason = "DeepSpeed does not compute in float16 on the CPU"
        raise layout.wrong_option(settings, "mixed_precision", reason, "Use bf16")
    section = settings[DeepSpeedSection]
    path = section.deepspeed_config_file
    if not path:
        _check_fields({name: value for name in checks.USUAL if (value := getattr(section, name)) is not None})
        return
    config = checks.read_config(path, layout.where(settings, "deepspeed_config_file"))
    checks.straighten(config)
    checks.refuse_config(checks.problems_of_config(config), f"Correct {path}")
    fields = {name: checks.look_up(config, key) for name, key in checks.KEYS.items()}
    _check_fields({name: value for name, value in fields.items() if value not in (None, checks.AUTO)})


def _check_fields(fields: dict[str, Any]) -> None:
    complete: Any = SimpleNamespace(**{**checks.USUAL, **fields})
    checks.refuse_config(checks.problems_of_fields(complete), "Correct them")


def as_text(plan: LaunchPlan, settings: Settings) -> str:
    """Formats a plan as text with notes, values and their sources, environment and command."""
    launcher = launcher_for(plan)
    parts: list[tuple[str, list[list[str]]]] = [
        ("Notes", [[note] for note in plan.notes]),
        ("Processes", [[_layout(plan)]]),
    ]
    if ParallelismSection.active(settings.values):
        parts.append(("Mesh", [[line] for line in _mesh(plan, settings)]))
    for section in (section for section in SECTIONS if section.active(settings.values)):
        rows = [
            [row.name, str(_shown(row, settings.values[row.name])), settings.source(row.name)]
            for row in section.options()
        ]
        parts.append((str(section.__doc__).split("\n")[0].rstrip("."), rows))
    parts.append(("Environment added", [[name, text] for name, text in sorted(plan.environment.items())]))
    for path, text in launcher.files(plan).items():
        parts.append((f"File {path}", [[line] for line in text.splitlines()]))
    parts.append(("Command", [[shlex.join(launcher.command(plan))]]))
    return "\n\n".join("\n".join([title, *_columns(rows)]) for title, rows in parts)


def as_json(plan: LaunchPlan, settings: Settings) -> str:
    """Formats a plan as a JSON object."""
    launcher = launcher_for(plan)
    return json.dumps(
        {
            "launcher": plan.launcher,
            "processes": plan.processes,
            "machines": plan.machines,
            "machine": plan.machine,
            "meeting": {"backend": plan.rendezvous.rdzv_backend, "address": plan.address, "port": plan.port},
            "command": launcher.command(plan),
            "files": dict(launcher.files(plan)),
            "environment": dict(sorted(plan.environment.items())),
            "notes": list(plan.notes),
            "settings": {
                row.name: {"value": _shown(row, value), "source": source} for row, value, source in settings
            },
        },
        indent=2,
        default=str,
    )


def _layout(plan: LaunchPlan) -> str:
    if launcher_for(plan).counts_remotely:
        return f"as many as the machines there decide, by the {plan.launcher} launcher"
    text = f"{plan.processes} in total by the {plan.launcher} launcher"
    if plan.machines == 1:
        return f"{text}, on this machine"
    here = f"this is machine {plan.machine}, with {plan.ranks}"
    return f"{text}: {plan.layout}; {here}"


def _mesh(plan: LaunchPlan, settings: Settings) -> list[str]:
    """Returns the dimensions of the mesh and the position of each rank."""
    names = _names_of_sizes(settings)
    sizes = {name[len(_SIZE[0]) : -len(_SIZE[1])]: settings.values[name] or 1 for name in names}
    active = {name: size for name, size in sizes.items() if size > 1}
    if math.prod(active.values()) != plan.processes:
        return [f"its sizes make {math.prod(active.values())} processes, and there are {plan.processes}"]
    ranks = range(plan.processes)
    lines = [f"rank {rank} = {describe_position(active, rank)}" for rank in ranks[:MAX_RANKS]]
    rest = [f"and {plan.processes - MAX_RANKS} more ranks"] * (plan.processes > MAX_RANKS)
    return [describe_mesh(active), *lines, *rest]


def _shown(row: Option, value: object) -> Any:
    return HIDDEN if row.secret and value is not None else value


def _columns(rows: list[list[str]]) -> list[str]:
    """Aligns cells in columns without padding the last one."""
    if not rows:
        return ["  none"]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  " + "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
