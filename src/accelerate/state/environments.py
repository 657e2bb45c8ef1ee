"""Detection of the launcher that started this process, and of its rank and world size.

There is one detector for each launcher, and the first that matches determines the `Topology`, which
`PartialState` uses. A detector reads environment variables only, does not call torch or query the node, and
returns None if another launcher started the process. Only XLA keeps this information in its runtime.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module

from accelerate.base import (
    ConfigurationError,
    SageMakerDistributedType,
    current,
    read_flag,
    slurm,
    whole_number,
    wrong_value,
)
from accelerate.devices import hardware_table
from accelerate.settings import parse_json

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Topology:
    """Rank and world size of this process, and the address of rank 0."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0  # index of this node
    address: str | None = None  # host of rank 0, or None for a single process
    port: int | None = None
    started_by: str = "no launcher"  # name of the detector that recognised the process
    needs_hosts: bool = False  # whether ranks exchange host names, because the local rank is not known

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that torch reads, or none for a single process."""
        if self.size == 1:
            return {}
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": str(self.address),
            "MASTER_PORT": str(self.port),
        }


@dataclass(frozen=True)
class LauncherVariables:
    """Detector of a launcher that sets the rank and world size in environment variables.

    Attributes:
        name: Name of the launcher, which becomes `Topology.started_by`.
        rank: Names of variables with the rank, separated by spaces, of which the first that is set counts.
        size: The same for the world size.
        local_rank: The same for the local rank.
        local_size: The same for the number of ranks on this node.
        node: The same for the index of the node.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str = ""

    def __call__(self, environ: Mapping[str, str]) -> Topology | None:
        rank, size = _number(environ, self.rank), _number(environ, self.size)
        if rank is None or size is None:
            return None
        local_rank = _number(environ, self.local_rank, unset=-1)
        local_size = _number(environ, self.local_size)
        node = _number(environ, self.node)
        if size == 0:
            name = _first(self.size)
            raise wrong_value(name, size, "at least one process takes part", f"correct {name}")
        if size == 1 and rank == 0:
            return Topology(started_by=self.name, node=node or 0)
        address = environ.get("MASTER_ADDR") or None
        spans_nodes = (node or 0) > 0 or (local_size or size) < size or local_rank not in (None, rank)
        if address is None and (local_size is not None or local_rank is not None) and spans_nodes:
            reason = (
                f"the run has {size} processes on several nodes, and this one (rank {rank}) does not know "
            )
            fix = "set MASTER_ADDR, on every node, to the address of the node of rank 0"
            raise wrong_value("MASTER_ADDR", None, f"{reason}the address of rank 0", fix)
        if address and address.isdecimal() and 0 < int(address) < 2**24:  # sockets would connect to 0.0.0.5
            fix = "set MASTER_ADDR to the host name or the IP address of the node of rank 0"
            raise wrong_value("MASTER_ADDR", address, "a number is no address of a node", fix)
        is_one_node = address is None or _is_loopback(address)
        _check_below(self.rank, rank, self.size, size)
        port = _number(environ, "MASTER_PORT")
        if port is not None and not 0 < port < 65536:
            raise wrong_value("MASTER_PORT", port, "there is no such port", "choose one from 1024 to 65535")
        port = DEFAULT_PORT if port is None else port
        if local_rank is None and local_size is None and not is_one_node:
            return Topology(rank, size, 0, 1, rank, address, port, self.name, needs_hosts=True)
        if local_rank is None:
            local_rank = rank % local_size if local_size else rank
        local_size = local_size or (size if is_one_node else local_rank + 1)
        _check_below(self.local_rank, local_rank, self.local_size, local_size)
        if local_size > size:
            reason = f"more processes on this node than there are on all ({_first(self.size)}={size})"
            fix = f"correct {_first(self.local_size)} or {_first(self.size)}"
            raise wrong_value(_first(self.local_size), local_size, reason, fix)
        node = rank // local_size if node is None else node
        return Topology(rank, size, local_rank, local_size, node, address or LOOPBACK, port, self.name)


def _first(names: str) -> str:
    return names.partition(" ")[0]


def _check_below(names: str, value: int, limit_names: str, limit: int) -> None:
    if not 0 <= value < limit:
        name, limit_name = _first(names), _first(limit_names)
        reason = f"with {limit_name}={limit} it must be 0 to {limit - 1}"
        raise wrong_value(name, value, reason, f"correct {name} or {limit_name}")


def _number(environ: Mapping[str, str], names: str, unset: int | None = None) -> int | None:
    """Returns the first of these variables that is set as a number, or None if its value is `unset`."""
    name = next((name for name in names.split() if environ.get(name)), None)
    if name is None:
        return None
    try:
        number = whole_number(environ[name])
    except ValueError:
        reason = "not a whole number of at most 64 bits"
        raise wrong_value(name, environ[name], reason, f"correct or unset {name}") from None
    if number == unset:
        return None
    if number < 0:
        raise wrong_value(name, number, "a negative number has no meaning here", f"correct or unset {name}")
    return number


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _resolves_to_loopback(name: str) -> bool:
    try:
        return _is_loopback(socket.gethostbyname(name))
    except OSError:
        return False


def _mpi(name: str, prefix: str) -> LauncherVariables:
    return LauncherVariables(
        name, f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"
    )


from_torchrun = LauncherVariables(
    "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", node="GROUP_RANK NODE_RANK"
)
from_open_mpi = _mpi("openmpi", "OMPI_COMM_WORLD")
_pmi = LauncherVariables("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
from_mvapich = _mpi("mvapich", "MV2_COMM_WORLD")
_sagemaker = LauncherVariables(
    "sagemaker",
    rank="RANK OMPI_COMM_WORLD_RANK",
    size="WORLD_SIZE OMPI_COMM_WORLD_SIZE",
    local_rank="SMDATAPARALLEL_LOCAL_RANK LOCAL_RANK OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE SM_NUM_GPUS",
)
_slurm = LauncherVariables(
    "slurm",
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS SLURM_NTASKS",
    local_rank="SLURM_LOCALID",
    local_size="SLURM_TASKS_HERE",
    node="SLURM_NODEID",
)


def from_pmi(environ: Mapping[str, str]) -> Topology | None:
    """Detects Intel MPI and MPICH, but not srun, which also sets the variables of PMI."""
    if slurm.is_step_of_tasks(environ) and not environ.get("MPI_LOCALRANKID"):
        return None
    return _pmi(environ)


def from_slurm(environ: Mapping[str, str]) -> Topology | None:
    """Detects one of several tasks of srun, with the address and port from its node list and job."""
    if not slurm.is_step_of_tasks(environ) or (_number(environ, _slurm.size) or 1) < 2:
        return None
    node = _number(environ, _slurm.node) or 0
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    known = dict(environ)
    if tasks:
        known["SLURM_TASKS_HERE"] = str(slurm.tasks_on_node(tasks, node))
    if nodes and not environ.get("MASTER_ADDR"):
        known["MASTER_ADDR"] = slurm.first_host(nodes)
    if not environ.get("MASTER_PORT"):
        known["MASTER_PORT"] = str(slurm.port_of_step(environ))
    return _slurm(known)


def uses_sagemaker(environ: Mapping[str, str]) -> bool:
    """Returns whether this process belongs to a data-parallel job of Amazon SageMaker."""
    kind = environ.get("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE") or SageMakerDistributedType.NO.value
    return read_flag(environ, "ACCELERATE_USE_SAGEMAKER") and kind != SageMakerDistributedType.NO.value


def from_sagemaker(environ: Mapping[str, str]) -> Topology | None:
    """Detects a data-parallel job of Amazon SageMaker, with rank 0 on the first of its hosts."""
    if not uses_sagemaker(environ):
        return None
    text, fix = environ.get("SM_HOSTS") or "[]", 'set it as SageMaker does: ["algo-1", "algo-2"]'
    try:
        hosts = parse_json(text)
    except ValueError as error:
        raise wrong_value("SM_HOSTS", text, f"it is not JSON ({error})", fix) from None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise wrong_value("SM_HOSTS", text, "it is not a list of hosts", fix)
    topology = _sagemaker({"MASTER_ADDR": hosts[0], **environ} if hosts else environ)
    if topology is None:
        raise ConfigurationError(
            "ACCELERATE_USE_SAGEMAKER asks for a data-parallel job, but neither RANK nor "
            "OMPI_COMM_WORLD_RANK says which process this is. Use SageMaker's distribution settings."
        )
    return topology


def from_xla(environ: Mapping[str, str]) -> Topology | None:
    """Detects a process of the XLA runtime, and reads its rank from the runtime instead of variables."""
    if not hardware_table.XLA.installed() or read_flag(environ, "ACCELERATE_USE_CPU"):
        return None
    if not hardware_table.detect().own_runtime:
        return None
    runtime = import_module("torch_xla.runtime")
    return Topology(
        rank=runtime.global_ordinal(),
        size=runtime.world_size(),
        local_rank=runtime.local_ordinal(),
        local_size=runtime.local_device_count(),
        node=runtime.host_index(),
        started_by="xla",
    )


def single_process(environ: Mapping[str, str]) -> Topology:
    """Returns the topology of a single process, or raises an error if variables contradict it."""
    size, rank = _number(environ, from_torchrun.size), _number(environ, from_torchrun.rank)
    fix = "start the script with `accelerate launch` or torchrun, or unset"
    if (size or 1) > 1:
        reason = "RANK is not set, so this process does not know which one it is"
        raise wrong_value("WORLD_SIZE", size, reason, f"{fix} WORLD_SIZE")
    if (rank or 0) > 0:
        reason = "WORLD_SIZE is not set, so this process does not know how many there are"
        raise wrong_value("RANK", rank, reason, f"{fix} RANK")
    return Topology()


DETECTORS: tuple[Callable[[Mapping[str, str]], Topology | None], ...]
DETECTORS = (from_xla, from_sagemaker, from_torchrun, from_open_mpi, from_pmi, from_mvapich, from_slurm)


def recognise(environ: Mapping[str, str]) -> Topology | None:
    """Returns the topology in these variables, or None if no launcher started the process."""
    detected = (detector(environ) for detector in DETECTORS)
    return next((topology for topology in detected if topology is not None), None)


def detect(environ: Mapping[str, str]) -> Topology:
    """Returns the topology of this process."""
    return recognise(environ) or single_process(environ)


def detect_in_group(environ: Mapping[str, str], rank: int, size: int) -> Topology:
    """Returns the topology of this process in an open process group, with the rest from the variables."""
    topology = recognise(environ)
    if topology is not None and (topology.rank, topology.size) == (rank, size):
        return topology
    known = {**environ, "RANK": str(rank), "WORLD_SIZE": str(size)}
    return replace(detect(known), started_by="process group")


@dataclass
class CPUInformation:
    """Rank and world size of this process according to its environment variables.

    Needs no process group.

    Attributes:
        rank: Index among all processes.
        world_size: Number of processes.
        local_rank: Index on this node.
        local_world_size: Number of processes on this node.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Returns the rank and world size of this process according to its environment variables.

    If these do not contain the local rank, all ranks count as on this node if the address of rank 0 resolves
    to the loopback interface, and otherwise this counts as the only rank of its node. `PartialState`
    exchanges host names instead.

    Returns:
        Rank, world size, local rank and local world size.

    Raises:
        ConfigurationError: The variables contradict each other or are not numbers.
    """
    topology = detect(current())
    if topology.needs_hosts and _resolves_to_loopback(str(topology.address)):
        return CPUInformation(topology.rank, topology.size, topology.rank, topology.size)
    return CPUInformation(topology.rank, topology.size, topology.local_rank, topology.local_size)
