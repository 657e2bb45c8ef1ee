"""Merged settings + machine -> LaunchPlan; the one place that chooses a launcher. Nothing is started."""

from __future__ import annotations

from accelerate.base.errors import ConfigurationError, LaunchError, wrong_value
from accelerate.devices.catalogue import CPU
from accelerate.launch.environment import device_ids, environment
from accelerate.launch.machine import Machine
from accelerate.launch.plan import LaunchPlan, Rendezvous, Target
from accelerate.launch.ports import DEFAULT_PORT
from accelerate.settings.merge import BUILT_IN, ENVIRONMENT, FLAG, Settings
from accelerate.settings.sections.launch import EXCLUSIVE, LaunchSection
from accelerate.settings.sections.rendezvous import RendezvousSection

CHOSEN = "chosen for this machine"
NEEDS_GROUP = ("use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config")
"""Ways of training that need a process group, even with one process."""


def resolve(settings: Settings, machine: Machine, target: Target) -> tuple[LaunchPlan, Settings]:
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
    machine = _hardware(settings, machine)
    settings, notes = _choose_processes(settings, machine)
    _check_layout(settings, machine)
    launcher = choose_launcher(settings)
    settings = _choose_threads(settings, machine, launcher)
    rendezvous, port_notes = _rendezvous(settings, machine, launcher)
    launch = settings[LaunchSection]
    plan = LaunchPlan(
        launcher=launcher,
        target=target,
        processes=settings.values["num_processes"],
        machines=launch.num_machines,
        machine=settings.values["machine_rank"],
        rendezvous=rendezvous,
        environment=environment(settings, machine, launcher),
        notes=(*settings.notes, *notes, *port_notes),
    )
    return plan, settings


def check_paradigm(settings: Settings) -> None:
    """Refuse two ways of training at once."""
    chosen = [f"--{name}" for name in EXCLUSIVE if settings.values[name]]
    if len(chosen) > 1 and chosen != ["--multi_gpu"]:
        raise ConfigurationError(f"{' and '.join(chosen)} exclude each other. Keep one of them.")


def choose_launcher(settings: Settings) -> str:
    """Name the launcher that a run needs, whether or not this version has it."""
    values = settings.values
    if values["compute_environment"] == "AMAZON_SAGEMAKER":
        return "sagemaker"
    if values["tpu"]:
        return "tpu"
    if values["mpirun_hostfile"]:
        return "mpi"
    if values["use_deepspeed"] and values["num_machines"] > 1 and _own_multinode(values):
        return "deepspeed"
    alone = values["num_processes"] == 1 and values["num_machines"] == 1
    return "local" if alone and not any(values[name] for name in NEEDS_GROUP) else "elastic"


def _own_multinode(values: object) -> bool:
    wanted = values["deepspeed_multinode_launcher"]  # type: ignore[index]
    return wanted not in (None, "standard")


def _hardware(settings: Settings, machine: Machine) -> Machine:
    """The machine as this run uses it: without its devices for `--cpu`, with those of `--gpu_ids` only."""
    launch = settings[LaunchSection]
    if launch.cpu:
        return Machine(CPU, 1, machine.cores, machine.port_in_use, machine.free_port, machine.environ)
    if not machine.has_accelerator:
        _refuse_devices(settings)
        return machine
    ids = device_ids(launch.gpu_ids)
    devices = len(ids) if ids else machine.devices
    return Machine(
        machine.hardware, devices, machine.cores, machine.port_in_use, machine.free_port, machine.environ
    )


def _refuse_devices(settings: Settings) -> None:
    mend = "Pass --cpu to run on the CPU, or check the driver and CUDA_VISIBLE_DEVICES"
    for name in ("multi_gpu", "gpu_ids"):
        value = settings.values[name]
        if value and value != "all":
            raise wrong_value(_where(settings, name), value, "this machine shows no accelerator", mend)


def _choose_processes(settings: Settings, machine: Machine) -> tuple[Settings, tuple[str, ...]]:
    """Fill in the number of processes where nobody gave it, and say what was assumed."""
    launch = settings[LaunchSection]
    machines = launch.num_machines
    if machines < 1:
        raise wrong_value(
            _where(settings, "num_machines"), machines, "at least one is needed", "Use 1 or more"
        )
    if _says_one_process(settings):
        return settings.replaced("distributed_type: NO", num_processes=1), ()
    if launch.num_processes not in (None, -1):
        return settings, ()
    total = machine.devices * machines
    settings = settings.replaced(CHOSEN, num_processes=total)
    plural = "es" if total > 1 else ""
    assumed = [f"{total} process{plural} on {machine.hardware.label}"]
    if settings.source("mixed_precision") == BUILT_IN:
        assumed.append("mixed_precision=no")
    return settings, (f"assumed {', '.join(assumed)}; flags or `accelerate config` choose otherwise",)


def _says_one_process(settings: Settings) -> bool:
    """A file with `distributed_type: NO` runs one process, unless a flag or variable asks for more."""
    explicit = settings.source("num_processes") in (FLAG, ENVIRONMENT)
    chosen = any(settings.values[name] for name in (*EXCLUSIVE, "use_parallelism_config"))
    return settings.values["distributed_type"] == "NO" and not explicit and not chosen


def _check_layout(settings: Settings, machine: Machine) -> None:
    values = settings.values
    total, machines, rank = values["num_processes"], values["num_machines"], values["machine_rank"]
    where = _where(settings, "num_processes")
    if total < 1:
        raise wrong_value(where, total, "at least one process is needed", "Use 1 or more")
    if total % machines:
        mend = f"It is the total over all machines: use a multiple of {machines}"
        raise wrong_value(where, total, f"it cannot be divided over {machines} machines", mend)
    if not 0 <= rank < machines:
        mend = f"Use 0 to {machines - 1}" if machines > 1 else "Leave it out, or set --num_machines"
        raise wrong_value(_where(settings, "machine_rank"), rank, f"there are {machines} machines", mend)
    if machine.has_accelerator and total // machines > machine.devices:
        reason = f"that is {total // machines} on this machine, which shows {machine.devices} devices"
        raise wrong_value(where, total, reason, "Use fewer, or --cpu to run on the CPU")


def _choose_threads(settings: Settings, machine: Machine, launcher: str) -> Settings:
    """Share the cores between the processes of a machine, so that they do not get in each other's way."""
    given = settings.values["num_cpu_threads_per_process"]
    if given is not None and given < 1:
        where = _where(settings, "num_cpu_threads_per_process")
        raise wrong_value(where, given, "at least one thread is needed", "Use 1 or more")
    kept = "OMP_NUM_THREADS" in (machine.environ or {})
    if given is not None or kept or launcher == "local":
        return settings
    local = settings.values["num_processes"] // settings.values["num_machines"]
    return settings.replaced(CHOSEN, num_cpu_threads_per_process=max(1, machine.cores // local))


def _rendezvous(settings: Settings, machine: Machine, launcher: str) -> tuple[Rendezvous, tuple[str, ...]]:
    wanted = settings[RendezvousSection]
    if launcher == "local":
        return Rendezvous(), ()
    several = settings.values["num_machines"] > 1
    if several and not wanted.main_process_ip:
        mend = "Pass the address of the machine of rank 0"
        raise wrong_value("--main_process_ip", None, "several machines need a place to meet", mend)
    port, notes = _port(settings, machine, several)
    return Rendezvous.of(wanted, port), notes


def _port(settings: Settings, machine: Machine, several: bool) -> tuple[int, tuple[str, ...]]:
    given = settings.values["main_process_port"]
    wanted = DEFAULT_PORT if given is None else given
    if not 0 <= wanted <= 65535:
        raise wrong_value(
            _where(settings, "main_process_port"), wanted, "ports go from 0 to 65535", "Use 29500"
        )
    if several:
        _check_agreed_port(settings, machine, wanted)
        return wanted, ()
    if wanted == 0:
        return machine.free_port(), ()
    if not machine.port_in_use(wanted):
        return wanted, ()
    port = machine.free_port()
    return port, (f"port {wanted} is in use, {port} is taken instead",)


def _check_agreed_port(settings: Settings, machine: Machine, port: int) -> None:
    if port == 0:
        mend = "Choose one port and pass it on every machine"
        raise wrong_value("--main_process_port", 0, "several machines must agree on a port", mend)
    if settings.values["machine_rank"] == 0 and machine.port_in_use(port):
        raise LaunchError(
            f"Port {port} is in use on this machine, where the others would look for it. "
            f"Free it, or pass another --main_process_port on every machine."
        )


def _where(settings: Settings, name: str) -> str:
    """How the user knows an option, by where its value came from."""
    source = settings.source(name)
    return f"--{name}" if source in (FLAG, BUILT_IN, CHOSEN, ENVIRONMENT) else f"{source}: {name}"
