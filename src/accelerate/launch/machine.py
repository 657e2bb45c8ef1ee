"""What this machine offers to a launch, gathered once: resolving a plan then looks at nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from accelerate.devices.backend import DeviceBackend
from accelerate.devices.catalogue import CPU, count_visible
from accelerate.launch.ports import get_free_port, is_port_in_use


@dataclass(frozen=True)
class Machine:
    """Facts about this machine.

    Attributes:
        hardware: the devices that launched processes would find.
        devices: how many of them are visible; 1 for the CPU.
        cores: CPU cores that this process may use.
        port_in_use: whether a port is taken.
        free_port: gives one that is not.
        environ: this process's variables.
    """

    hardware: DeviceBackend = CPU
    devices: int = 1
    cores: int = 1
    port_in_use: Callable[[int], bool] = is_port_in_use
    free_port: Callable[[], int] = get_free_port
    environ: Mapping[str, str] | None = None

    @property
    def has_accelerator(self) -> bool:
        """Whether there is anything but the CPU."""
        return self.hardware.name != CPU.name


def look(environ: Mapping[str, str], *, cpu: bool) -> Machine:
    """Gather the facts, without importing torch where nvidia-smi can answer.

    Args:
        environ: this process's variables; they say which devices are visible.
        cpu: the run stays on the CPU: do not look for devices.
    """
    hardware, devices = (CPU, 1) if cpu else count_visible(environ)
    return Machine(hardware=hardware, devices=devices, cores=_usable_cores(), environ=environ)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
