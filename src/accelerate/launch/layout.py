"""How many processes run on which machine, with which threads and variables."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate.base import ConfigurationError, whole_number, wrong_value
from accelerate.launch.machine import LOOPBACK, Machine
from accelerate.settings import BUILT_IN, ENVIRONMENT, FLAG, Settings, all_options, env
from accelerate.settings.sections import EXCLUSIVE, LaunchSection

MOST_PROCESSES = 10**6
CHOSEN = "chosen for this machine"


def choose_shares(settings: Settings) -> tuple[Settings, tuple[int, ...]]:
    """Read how many processes each machine runs, where they differ, and set the totals that follow."""
    given = settings.values["processes_per_machine"]
    if not given:
        return settings, ()
    flag = "--processes_per_machine"
    try:
        shares = tuple(whole_number(part) for part in given)
    except ValueError:
        shares = (0,)
    if min(shares) < 1:
        raise wrong_value(flag, ",".join(given), "these are no numbers from 1 on", "Write for example 8,4")
    for name, count in (("num_machines", len(shares)), ("num_processes", sum(shares))):
        given_count = settings.values[name]
        if settings.given(name) and given_count not in (None, -1, count):
            reason = f"that makes {count}, and {where(settings, name)} says {given_count}"
            raise wrong_value(flag, listed(shares), reason, "Make them agree, or leave one out")
    return settings.replaced(FLAG, num_machines=len(shares), num_processes=sum(shares)), shares


def listed(shares: tuple[int, ...]) -> str:
    return ",".join(map(str, shares))


def choose_processes(settings: Settings, machine: Machine) -> Settings:
    """Fill in the number of processes where it is not given, and note what was assumed."""
    launch = settings[LaunchSection]
    machines = launch.num_machines
    if machines < 1:
        raise wrong_option(settings, "num_machines", "at least one is needed", "Use 1 or more")
    # A file with `distributed_type: NO` runs one process, unless a flag or variable asks for more.
    explicit = settings.source("num_processes") not in (BUILT_IN, settings.source("distributed_type"))
    chosen = any(settings.values[name] for name in (*EXCLUSIVE, "use_parallelism_config"))
    if settings.values["distributed_type"] == "NO" and not explicit and not chosen:
        return settings.replaced("distributed_type: NO", num_processes=1)
    if launch.num_processes not in (None, -1):
        return settings
    total = machine.devices * machines
    settings = settings.replaced(CHOSEN, num_processes=total)
    plural = "es" if total > 1 else ""
    among = _number_of_others(machine.environ or {}) if total == 1 else ""
    assumed = [f"{total} process{plural} on {machine.hardware.label}{among}"]
    if settings.source("mixed_precision") == BUILT_IN:
        assumed.append("mixed_precision=no")
    return settings.noted(f"assumed {', '.join(assumed)}; flags or `accelerate config` choose otherwise")


def _number_of_others(environ: Mapping[str, str]) -> str:
    """Say that another program has started this process as one of several, such as one for each pod."""
    rank, size = environ.get("RANK"), environ.get("WORLD_SIZE")
    return f" (rank {rank} of WORLD_SIZE={size})" if rank and size and size != "1" else ""


def choose_machines(settings: Settings, machine: Machine) -> Settings:
    """Read the machines, the rank of this one and the address of rank 0 from what operators set in each pod.

    Flags and the variables of torchrun take precedence. `RANK` and `WORLD_SIZE` count machines where several
    processes run on each; one process per machine keeps both variables. The number of processes is known.
    """
    facts, total = machine.environ or {}, settings.values["num_processes"]
    known = (FLAG, *env.PET_VARIABLES, env.PET_ENDPOINT)
    address = facts.get("MASTER_ADDR", "")
    is_remote = address != "" and address not in LOOPBACK
    size = facts.get("WORLD_SIZE", "") if "RANK" in facts and "LOCAL_RANK" not in facts else ""
    if size not in ("", "1") and is_remote and total > 1 and settings.source("num_machines") not in known:
        count = all_options()["num_machines"].read(size, "WORLD_SIZE")
        if count < 1:
            raise wrong_value("WORLD_SIZE", size, "at least one process takes part", "Correct WORLD_SIZE")
        is_local = settings.source("num_processes") in (CHOSEN, env.PET_PROCESSES)
        total *= count if is_local else 1
        settings = settings.replaced("WORLD_SIZE", num_machines=count, num_processes=total)
    machines = settings.values["num_machines"]
    if machines == 1:
        return settings
    found = {"machine_rank": "RANK" if size == str(machines) else "JOB_COMPLETION_INDEX"}
    if is_remote:
        found |= {"main_process_ip": "MASTER_ADDR", "main_process_port": "MASTER_PORT"}
    for name, variable in found.items():
        if (text := facts.get(variable)) and settings.source(name) not in known:
            settings = settings.replaced(variable, **{name: all_options()[name].read(text, variable)})
    return settings


def _local(settings: Settings, shares: tuple[int, ...]) -> int:
    values = settings.values
    share: int = (
        shares[values["machine_rank"]] if shares else values["num_processes"] // values["num_machines"]
    )
    return share


def check_layout(settings: Settings, machine: Machine, shares: tuple[int, ...]) -> None:
    values = settings.values
    total, machines, rank = values["num_processes"], values["num_machines"], values["machine_rank"]
    if total < 1:
        raise wrong_option(settings, "num_processes", "at least one process is needed", "Use 1 or more")
    if total > MOST_PROCESSES:
        fix = f"Use {MOST_PROCESSES} or fewer"
        raise wrong_option(settings, "num_processes", "so many cannot be started", fix)
    if total % machines and not shares:
        fix = f"It is the total: use a multiple of {machines}, or --processes_per_machine where these differ"
        raise wrong_option(settings, "num_processes", f"it cannot be divided over {machines} machines", fix)
    if not 0 <= rank < machines:
        fix = f"Use 0 to {machines - 1}" if machines > 1 else "Leave it out, or set --num_machines"
        raise wrong_option(settings, "machine_rank", f"there are {machines} machines", fix)
    local = _local(settings, shares)
    if machine.has_accelerator and local > machine.devices:
        of = f" of {machines}" if machines > 1 else ""
        reason = f"that is {local} on this machine{of}, which shows {machine.devices} devices"
        raise wrong_option(settings, "num_processes", reason, "Use fewer, or --cpu to run on the CPU")


def choose_threads(settings: Settings, machine: Machine, launcher: str, shares: tuple[int, ...]) -> Settings:
    """Divide the cores between the processes of a machine."""
    given = settings.values["num_cpu_threads_per_process"]
    if given is not None and given < 1:
        reason = "at least one thread is needed"
        raise wrong_option(settings, "num_cpu_threads_per_process", reason, "Use 1 or more")
    kept = "OMP_NUM_THREADS" in (machine.environ or {})
    if given is not None or kept or launcher == "local":
        return settings
    local = _local(settings, shares)
    return settings.replaced(CHOSEN, num_cpu_threads_per_process=max(1, machine.cores // local))


def where(settings: Settings, name: str) -> str:
    """How the user knows an option: ``--name``, the variable, or the file and the key in it."""
    source, row = settings.source(name), all_options()[name]
    if source == ENVIRONMENT and row.variables:
        return row.variables[0]
    return f"--{name}" if source in (FLAG, BUILT_IN, CHOSEN, ENVIRONMENT) else f"{source}: {row.key or name}"


def wrong_option(settings: Settings, name: str, reason: str, fix: str) -> ConfigurationError:
    """Return the error of an option, which has its value and the name under which the user set it."""
    return wrong_value(where(settings, name), settings.values[name], reason, fix)


INTEL_OPENMP = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
"""How Intel's OpenMP binds the threads of one process on the CPU; others ignore it."""


def device_ids(gpu_ids: str | None) -> tuple[str, ...]:
    """Split ``--gpu_ids``; empty for "all"."""
    if gpu_ids is None or gpu_ids.strip() in ("", "all"):
        return ()
    ids = tuple(part.strip() for part in gpu_ids.split(","))
    if "" in ids or len(set(ids)) < len(ids):
        raise wrong_value("--gpu_ids", gpu_ids, "an entry is empty or given twice", "Write for example 0,1")
    return ids


def worker_environment(settings: Settings, machine: Machine, launcher: str) -> dict[str, str]:
    """The variables that the workers get in addition to those of this process."""
    added, values = env.encode(settings), settings.values
    ids = device_ids(values["gpu_ids"])
    if ids and machine.hardware.visible_env:
        added[machine.hardware.visible_env] = ",".join(ids)
    usual = dict(INTEL_OPENMP) if launcher == "local" and values["cpu"] else {}
    degrees = (values["megatron_lm_tp_degree"], values["megatron_lm_context_parallel_size"])
    is_sharded = values["use_megatron_lm"] and any((degree or 1) > 1 for degree in degrees)
    if is_sharded and not values["megatron_lm_use_custom_fsdp"]:  # needs one queue of kernels
        usual["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    present = machine.environ or {}
    return {**added, **{name: text for name, text in usual.items() if name not in present}}
