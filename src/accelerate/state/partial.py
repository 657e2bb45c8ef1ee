"""State of the process, with its rank and device, which opens the default process group.

Every `Accelerator` creates a `PartialState`, and clients create it directly.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from accelerate.base import (
    DistributedType,
    SageMakerDistributedType,
    current,
    parse_flag_from_env,
    wrong_value,
)
from accelerate.devices import DeviceBackend, hardware_table, set_numa_affinity
from accelerate.launch import SCRIPT
from accelerate.state import environments, process_group
from accelerate.state.environments import Topology
from accelerate.state.processes import ProcessControl
from accelerate.state.shared import SharedDict, SharedState, services

_logger = logging.getLogger(__name__)


PICKLED_ENTRIES = (
    "distributed_type",
    "num_processes",
    "process_index",
    "local_process_index",
    "device",
    "backend",
    "debug",
    "fork_launched",
    "topology",
    "device_backend",
    "_cpu",
)
"""Entries of both states that are pickled."""


class RunState(SharedState, ProcessControl):
    """Base class of both states of a run, with rank, world size and device of the process."""

    distributed_type: DistributedType | str
    num_processes: int
    process_index: int
    local_process_index: int
    device: torch.device
    backend: str | None
    debug: bool
    topology: Topology
    device_backend: DeviceBackend

    @property
    def use_distributed(self) -> bool:
        """True if the run has several processes."""
        return self.num_processes > 1

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Closes a process group without waiting for other ranks.

        Args:
            group: The process group. None closes all groups, including the default one.
        """
        process_group.close_group(group)


class PartialState(RunState):
    """State of the process, with its rank, its device and the default process group.

    All instances share one state. Called on all ranks. The first instance detects the launcher and the
    hardware, opens the process group, and returns after all ranks have opened it.

    Args:
        cpu: Whether to use the CPU even if there is an accelerator. The default is False, or the value of
            `ACCELERATE_USE_CPU`.
        **kwargs: Arguments of `torch.distributed.init_process_group` (`backend`, `timeout`, ...). None is the
            same as no argument. `timeout` also sets the timeout of a process group that is open already.
            `_use_sagemaker_dp` sets whether this is a data-parallel SageMaker job.

    Attributes:
        distributed_type: Label of the strategy. An assignment changes nothing else.
        num_processes: World size.
        process_index: Rank of this process.
        local_process_index: Local rank, which is the index of this process on its node.
        device: Device of this process.
        backend: Name of the backend of the process group, such as "nccl", or None for a single process.
        debug: Whether calls and shapes are compared before each collective (`ACCELERATE_DEBUG_MODE`).
        fork_launched: Whether a launcher forked this process from a running one (`FORK_LAUNCHED`).
        topology: Rank, world size, node, launcher and address of rank 0.
        device_backend: Row of the hardware table with the type of `device`.

    Raises:
        ConfigurationError: The environment variables of the launcher contradict each other, a device or a
            backend does not exist, or an argument is unknown.
    """

    _shared_state: ClassVar[dict[str, Any]] = SharedDict()
    _pickled = PICKLED_ENTRIES

    fork_launched: bool
    _cpu: bool

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        super().__init__()
        if self.initialized:
            if (timeout := kwargs.get("timeout")) is not None:
                process_group.set_timeout(timeout)
            return
        sagemaker = kwargs.pop("_use_sagemaker_dp", None)
        process_group.check_arguments(kwargs)
        SCRIPT.uses_ranks = True
        environ = _with_sagemaker(current(), sagemaker)
        use_cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
        device_backend, named_device = _choose_hardware(use_cpu, environ)
        if device_backend.is_host:  # so that no detector queries the runtime of an accelerator
            environ = {**environ, "ACCELERATE_USE_CPU": "true"}
        if process_group.is_open():
            topology = environments.detect_in_group(environ, dist.get_rank(), dist.get_world_size())
        else:
            topology = environments.detect(environ)
        topology = process_group.find_hosts(topology, kwargs)
        device = named_device or _device_of_rank(device_backend, topology)
        _prepare_process(device_backend, device, topology, environ)
        comm = _join_group(topology, device_backend, device, kwargs)
        self.__dict__.update(
            _cpu=use_cpu,
            backend=comm,
            device=device,
            debug=parse_flag_from_env("ACCELERATE_DEBUG_MODE"),
            distributed_type=device_backend.distributed_type_of(topology.size),
            num_processes=topology.size,
            process_index=topology.rank,
            local_process_index=topology.local_rank,
            fork_launched=parse_flag_from_env("FORK_LAUNCHED"),
            topology=topology,
            device_backend=device_backend,
        )

    @property
    def default_device(self) -> torch.device:
        """Device type that is the default on this node, without an index."""
        return hardware_table.detect().device()

    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool | None = False, backend: str | None = None
    ) -> tuple[str | None, DistributedType]:
        """Returns the backend of the process group and the label that a state with these arguments has."""
        environ = _with_sagemaker(current(), sagemaker_dp or None)
        hardware, _ = _choose_hardware(cpu, environ)
        topology = environments.detect(environ)
        label = hardware.distributed_type_of(topology.size)
        if backend is None and topology.size > 1 and not hardware.own_runtime:
            backend = _backend_of(topology) or hardware.comm or "gloo"
        return backend, label

    def set_device(self) -> None:
        """Makes the device of this process the current device of its type."""
        if self.device.index is not None:
            self.device_backend.set_current(self.device.index)

    @staticmethod
    def _reset_state() -> None:
        """Clears the state and the services of the run.

        An open process group stays open, and the next instance uses it.
        """
        PartialState._shared_state.clear()
        services.reset()

    def __repr__(self) -> str:
        # Programs parse these lines, so the words and their order are fixed.
        backend = f"  Backend: {self.backend}" if self.backend else ""
        rows = {
            "Distributed environment": f"{self.distributed_type!s}{backend}",
            "Num processes": self.num_processes,
            "Process index": self.process_index,
            "Local process index": self.local_process_index,
            "Device": self.device,
        }
        return "".join(f"{name}: {value}\n" for name, value in rows.items())


def wait_for_everyone() -> None:
    """Waits until all ranks have called this.

    Called on all ranks. A single process does not wait.

    Raises:
        StateError: The process group is closed.
    """
    PartialState().wait_for_everyone()


def _with_sagemaker(environ: Mapping[str, str], is_used: bool | None) -> Mapping[str, str]:
    if is_used is None:
        return environ
    kind = SageMakerDistributedType.DATA_PARALLEL if is_used else SageMakerDistributedType.NO
    return {
        **environ,
        "ACCELERATE_USE_SAGEMAKER": str(is_used),
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": kind.value,
    }


def _choose_hardware(use_cpu: bool, environ: Mapping[str, str]) -> tuple[DeviceBackend, torch.device | None]:
    """Returns the row of the hardware table, and the device if `ACCELERATE_TORCH_DEVICE` has an index."""
    name = environ.get("ACCELERATE_TORCH_DEVICE")
    if not name:
        return (hardware_table.CPU if use_cpu else hardware_table.detect()), None
    backend = hardware_table.named(name.partition(":")[0], "ACCELERATE_TORCH_DEVICE")
    if use_cpu and not backend.is_host:
        _logger.warning("The CPU was requested: ACCELERATE_TORCH_DEVICE=%s is not used.", name)
        return hardware_table.CPU, None
    return backend, _named_device(name, backend)


def _named_device(name: str, backend: DeviceBackend) -> torch.device | None:
    """Returns the device of this name, or None if the name has no index."""
    count = backend.count() if backend.available() else 0
    number = name.partition(":")[2]
    if count and not number:
        return None
    last = count - 1 if backend.largest_index is None else backend.largest_index
    if not number.isdecimal() or len(number) > len(str(count + last)) or int(number) > last:
        reason = f"this process sees {count} devices of that kind"
        if backend.largest_index is not None:
            reason = f"torch counts {backend.label}s up to {last}"
        fix = "name one that exists, counted from 0, or unset ACCELERATE_TORCH_DEVICE"
        raise wrong_value("ACCELERATE_TORCH_DEVICE", name, reason, fix)
    return torch.device(name)


def _device_of_rank(backend: DeviceBackend, topology: Topology) -> torch.device:
    if topology.size == 1:
        return backend.device()  # the current one, which the user may have set
    return backend.device(topology.local_rank % max(backend.count(), 1))


def _prepare_process(
    backend: DeviceBackend, device: torch.device, topology: Topology, environ: Mapping[str, str]
) -> None:
    """Sets the device, CPU affinity and number of threads of this process, before the group is opened."""
    if device.index is not None:
        backend.set_current(device.index)
    if parse_flag_from_env("ACCELERATE_CPU_AFFINITY"):
        set_numa_affinity(topology.local_rank)
    if backend.is_host and topology.local_size > 1 and not environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, _cores() // topology.local_size))


def _cores() -> int:
    """Returns the number of physical cores that this process may use."""
    import psutil

    physical = psutil.cpu_count(logical=False) or 1
    process = psutil.Process()
    allowed = len(process.cpu_affinity() or ()) if hasattr(process, "cpu_affinity") else 0
    return min(physical, allowed) if allowed else physical


def _join_group(
    topology: Topology, backend: DeviceBackend, device: torch.device, kwargs: dict[str, Any]
) -> str | None:
    if process_group.is_open():
        if (timeout := kwargs.get("timeout")) is not None:
            process_group.set_timeout(timeout)
        services.own_group()
        return str(dist.get_backend())
    if topology.size == 1 or backend.own_runtime:
        return None
    comm = kwargs.pop("backend", None) or _backend_of(topology)
    if backend.binds_group and not comm:
        kwargs.setdefault("device_id", device)
    return process_group.open_group(topology, backend, comm, **kwargs)


def _backend_of(topology: Topology) -> str | None:
    """Returns the backend that a launcher requires, or None for that of the hardware."""
    return "smddp" if topology.started_by == "sagemaker" else None
