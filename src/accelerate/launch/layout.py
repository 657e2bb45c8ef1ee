"""Number of processes on each node, with their threads and variables, and the sizes of an elastic run."""

from __future__ import annotations

import math
from typing import NamedTuple

from accelerate.base import ConfigurationError, environ, whole_number, wrong_value
from accelerate.launch.machine import LOOPBACK, Machine
from accelerate.settings import BUILT_IN, ENVIRONMENT, FLAG, Settings, all_options, env, nodes_of
from accelerate.settings.sections import (
    EXCLUSIVE,
    LaunchSection,
    MegatronSection,
    ParallelismSection,
    RendezvousSection,
)

MOST_PROCESSES = 10**6
CHOSEN = "chosen for this machine"


def choose_processes_per_machine(settings: Settings) -> tuple[Settings, tuple[int, ...]]:
    """Returns the number of processes of each node where these differ, and settings with the totals."""
    words = settings[LaunchSection].processes_per_machine
    if not words:
        return settings, ()
    flag = "--processes_per_machine"
    try:
        per_machine = tuple(whole_number(part) for part in words)
    except ValueError:
        per_machine = (0,)
    if min(per_machine) < 1:
        reason = "these are not numbers of at least 1"
        raise wrong_value(flag, ",".join(words), reason, "Write for example 8,4")
    for name, count in (("num_machines", len(per_machine)), ("num_processes", sum(per_machine))):
        given_count = settings.values[name]
        if settings.given(name) and given_count not in (None, -1, count):
            reason = f"that makes {count}, and {where(settings, name)} says {given_count}"
            raise wrong_value(flag, listed(per_machine), reason, "Make them agree, or leave one out")
    return settings.replaced(FLAG, num_machines=len(per_machine), num_processes=sum(per_machine)), per_machine


def listed(per_machine: tuple[int, ...]) -> str:
    return ",".join(map(str, per_machine))


def choose_processes(settings: Settings, machine: Machine) -> Settings:
    """Sets the number of processes if it is not set, and notes the assumed values."""
    launch = settings[LaunchSection]
    machines = launch.num_machines
    if machines < 1:
        raise wrong_option(settings, "num_machines", "at least one is needed", "Use 1 or more")
    # A file with `distributed_type: NO` runs one process, unless a flag or variable requests more.
    explicit = settings.source("num_processes") not in (BUILT_IN, settings.source("distributed_type"))
    has_strategy = any(settings.values[name] for name in (*EXCLUSIVE, "use_parallelism_config"))
    if launch.distributed_type == "NO" and not explicit and not has_strategy:
        return settings.replaced("distributed_type: NO", num_processes=1)
    if launch.num_processes not in (None, -1):
        return settings
    total = machine.devices * machines
    settings = settings.replaced(CHOSEN, num_processes=total)
    plural = "es" if total > 1 else ""
    present = machine.environ or {}
    rank, size = present.get("RANK"), present.get("WORLD_SIZE")
    is_one_of_several = total == 1 and rank and size and size != "1"  # which another program has started
    of_others = f" (rank {rank} of WORLD_SIZE={size})" if is_one_of_several else ""
    assumed = [f"{total} process{plural} on {machine.hardware.label}{of_others}"]
    if settings.source("mixed_precision") == BUILT_IN:
        assumed.append("mixed_precision=no")
    return settings.noted(f"assumed {', '.join(assumed)}; flags or `accelerate config` choose otherwise")


def choose_machines(settings: Settings, machine: Machine) -> Settings:
    """Sets the number of nodes, the node rank and the address of rank 0 from variables of operators.

    Flags and the variables of torchrun take precedence. `RANK` and `WORLD_SIZE` count nodes where several
    processes run on each. One process per node keeps both variables. The number of processes is known.
    """
    facts, total = machine.environ or {}, settings[LaunchSection].num_processes or 0
    known = (FLAG, *env.PET_VARIABLES, env.PET_ENDPOINT)
    address = facts.get("MASTER_ADDR", "")
    is_remote = address != "" and address not in LOOPBACK
    size = facts.get("WORLD_SIZE", "") if "RANK" in facts and "LOCAL_RANK" not in facts else ""
    if size not in ("", "1") and is_remote and total > 1 and settings.source("num_machines") not in known:
        count = all_options()["num_machines"].read(size, "WORLD_SIZE")
        if count < 1:
            raise wrong_value("WORLD_SIZE", size, "at least one process is needed", "Correct WORLD_SIZE")
        is_local = settings.source("num_processes") in (CHOSEN, env.PET_PROCESSES)
        total *= count if is_local else 1
        settings = settings.replaced("WORLD_SIZE", num_machines=count, num_processes=total)
    machines = settings[LaunchSection].num_machines
    if machines == 1:
        return settings
    variables = {"machine_rank": "RANK" if size == str(machines) else "JOB_COMPLETION_INDEX"}
    if is_remote:
        variables |= {"main_process_ip": "MASTER_ADDR", "main_process_port": "MASTER_PORT"}
    for name, variable in variables.items():
        if (text := facts.get(variable)) and settings.source(name) not in known:
            settings = settings.replaced(variable, **{name: all_options()[name].read(text, variable)})
    return settings


def _local(settings: Settings, per_machine: tuple[int, ...]) -> int:
    """Returns the number of processes of this node, after `choose_processes`."""
    launch = settings[LaunchSection]
    if per_machine:
        return per_machine[settings[RendezvousSection].machine_rank]
    return (launch.num_processes or 0) // launch.num_machines


def check_layout(settings: Settings, machine: Machine, per_machine: tuple[int, ...]) -> None:
    """Raises an error for numbers of processes and nodes that contradict each other or the machine."""
    launch, rank = settings[LaunchSection], settings[RendezvousSection].machine_rank
    total, machines = launch.num_processes or 0, launch.num_machines
    if total < 1:
        raise wrong_option(settings, "num_processes", "at least one process is needed", "Use 1 or more")
    if total > MOST_PROCESSES:
        fix = f"Use {MOST_PROCESSES} or fewer"
        raise wrong_option(settings, "num_processes", "so many processes cannot be started", fix)
    if total % machines and not per_machine:
        fix = f"It is the total: use a multiple of {machines}, or --processes_per_machine where these differ"
        raise wrong_option(settings, "num_processes", f"it cannot be divided over {machines} machines", fix)
    if not 0 <= rank < machines:
        fix = f"Use 0 to {machines - 1}" if machines > 1 else "Leave it out, or set --num_machines"
        raise wrong_option(settings, "machine_rank", f"there are {machines} machines", fix)
    local = _local(settings, per_machine)
    if machine.has_accelerator and local > machine.devices:
        of = f" of {machines}" if machines > 1 else ""
        reason = f"that is {local} on this machine{of}, which shows {machine.devices} devices"
        raise wrong_option(settings, "num_processes", reason, "Use fewer, or --cpu to run on the CPU")
    _check_mesh(settings)


def _check_mesh(settings: Settings) -> None:
    """Raises an error if the device mesh does not have all processes of a run whose number is fixed."""
    launch, values = settings[LaunchSection], settings.values
    if values["replicas"] or values["nnodes"] or values["min_processes"]:
        return
    if not ParallelismSection.active(values):
        return
    names = [row.name for row in ParallelismSection.options() if row.name.endswith("_size")]
    sizes = {name: values[name] for name in names if (values[name] or 1) > 1}
    product = math.prod(sizes.values())
    if product != launch.num_processes:
        name = max(sizes, key=lambda name: sizes[name], default="use_parallelism_config")
        prefix = ParallelismSection.field_prefix
        mesh = " x ".join(f"{name.removeprefix(prefix)}={size}" for name, size in sizes.items())
        reason = (
            f"the mesh ({mesh or 'all sizes are 1'}) has {product} processes, and "
            f"{where(settings, 'num_processes')} is {launch.num_processes}"
        )
        fix = f"Change the sizes, or set --num_processes {product}"
        raise wrong_option(settings, name, reason, fix)


def choose_threads(
    settings: Settings, machine: Machine, launcher: str, per_machine: tuple[int, ...]
) -> Settings:
    """Divides the cores among the processes of a node."""
    num_threads = settings[LaunchSection].num_cpu_threads_per_process
    if num_threads is not None and num_threads < 1:
        reason = "at least one thread is needed"
        raise wrong_option(settings, "num_cpu_threads_per_process", reason, "Use 1 or more")
    is_set = "OMP_NUM_THREADS" in (machine.environ or {})
    if num_threads is not None or is_set or launcher == "local":
        return settings
    local = _local(settings, per_machine)
    return settings.replaced(CHOSEN, num_cpu_threads_per_process=max(1, machine.cores // local))


def where(settings: Settings, name: str) -> str:
    """Returns the name under which the user sets an option, a flag, a variable, or a file and its key."""
    source, row = settings.source(name), all_options()[name]
    if source == ENVIRONMENT and row.variables:
        return row.variables[0]
    return f"--{name}" if source in (FLAG, BUILT_IN, CHOSEN, ENVIRONMENT) else f"{source}: {row.key or name}"


def wrong_option(settings: Settings, name: str, reason: str, fix: str) -> ConfigurationError:
    """Returns the error of an option with its value and the name under which the user set it."""
    return wrong_value(where(settings, name), settings.values[name], reason, fix)


INTEL_OPENMP = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
"""Variables by which the OpenMP of Intel binds the threads of one process on the CPU."""


def device_ids(gpu_ids: str | None) -> tuple[str, ...]:
    """Splits the value of `--gpu_ids`, and returns an empty tuple for "all"."""
    if gpu_ids is None or gpu_ids.strip() in ("", "all"):
        return ()
    ids = tuple(part.strip() for part in gpu_ids.split(","))
    if "" in ids or len(set(ids)) < len(ids):
        raise wrong_value("--gpu_ids", gpu_ids, "an entry is empty or repeated", "Write for example 0,1")
    return ids


def used_devices(settings: Settings, machine: Machine, processes: int) -> tuple[str, ...]:
    """Returns the ids of the devices of the processes of this node, or none for the CPU."""
    launch = settings[LaunchSection]
    if launch.cpu or not machine.has_accelerator:
        return ()
    return (device_ids(launch.gpu_ids) or tuple(map(str, range(machine.devices))))[:processes]


def worker_environment(settings: Settings, machine: Machine, launcher: str) -> dict[str, str]:
    """Returns the variables of the workers in addition to those of this process."""
    added, launch, megatron = env.encode(settings), settings[LaunchSection], settings[MegatronSection]
    ids = device_ids(launch.gpu_ids)
    if ids and machine.hardware.visible_env:
        added[machine.hardware.visible_env] = ",".join(ids)
    defaults = dict(INTEL_OPENMP) if launcher == "local" and launch.cpu else {}
    degrees = (megatron.megatron_lm_tp_degree, megatron.megatron_lm_context_parallel_size)
    is_sharded = launch.use_megatron_lm and any((degree or 1) > 1 for degree in degrees)
    if is_sharded and not megatron.megatron_lm_use_custom_fsdp:  # requires a single kernel queue
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    present = machine.environ or {}
    return {**added, **{name: text for name, text in defaults.items() if name not in present}}


# Elastic runs. The agent of torch starts all processes again with the new size, and the script continues from
# its newest checkpoint.

MAX_RESTARTS = 10
ELASTIC = "chosen for an elastic run"
TIMEOUTS = {"last_call_timeout": 10, "keep_alive_interval": 1, "keep_alive_max_attempt": 5}
"""Settings of the rendezvous: the seconds that it waits for further machines, and the interval in seconds and
number of heartbeats, after which a machine without a response is lost."""
VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", environ.ELASTIC: "1"}
"""Variables of the agent and its processes. With the first one, these do not keep the address of an earlier
rank 0. With the second one, they start again if another machine is asked to end."""


class Sizes(NamedTuple):
    """Smallest sizes of an elastic run, None where the size does not change."""

    machines: int | None = None  # smallest number of machines
    processes: int | None = None  # smallest number of processes on one machine


def choose_sizes(settings: Settings) -> tuple[Settings, Sizes]:
    """Returns the sizes of an elastic run, and settings with its rendezvous.

    The largest number of processes is known.
    """
    launch, rendezvous = settings[LaunchSection], settings[RendezvousSection]
    machines, total, smallest = launch.num_machines, launch.num_processes or 1, rendezvous.min_processes
    least = nodes_of(rendezvous.nnodes)[0] if rendezvous.nnodes else machines
    if smallest is not None and smallest > total:
        reason = f"the largest number of processes is {total}"
        raise wrong_option(settings, "min_processes", reason, "Use a smaller number")
    if smallest is not None and machines > 1:
        needed = -(-smallest * machines // total)
        least = max(least, needed) if rendezvous.nnodes else needed
    sizes = Sizes(least if least < machines else None)
    if machines == 1 and smallest not in (None, total):
        sizes = Sizes(processes=smallest)
    if sizes == Sizes():
        return settings, sizes
    if launch.processes_per_machine:
        reason = "each machine of an elastic run starts the same number"
        words = ",".join(launch.processes_per_machine)
        raise wrong_value("--processes_per_machine", words, reason, "Pass --num_processes")
    if settings.source("max_restarts") == BUILT_IN:
        settings = settings.replaced(ELASTIC, max_restarts=MAX_RESTARTS)
    if sizes.machines is not None:
        settings = _choose_rendezvous(settings)
    return settings, sizes


def _choose_rendezvous(settings: Settings) -> Settings:
    rendezvous = settings[RendezvousSection]
    if rendezvous.rdzv_backend == "static":
        if settings.source("rdzv_backend") in (FLAG, "PET_RDZV_BACKEND"):
            reason = "its number of machines cannot change"
            raise wrong_option(settings, "rdzv_backend", reason, "Leave it out, or use c10d")
        settings = settings.replaced(ELASTIC, rdzv_backend="c10d")
    given = [pair for pair in rendezvous.rdzv_conf.split(",") if pair]
    names = {pair.partition("=")[0] for pair in given}
    added = [f"{name}={value}" for name, value in TIMEOUTS.items() if name not in names]
    return settings.replaced(ELASTIC, rdzv_conf=",".join([*given, *added]))
