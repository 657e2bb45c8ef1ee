"""What this machine offers to a launch, gathered once: resolving a plan then looks at nothing else."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from accelerate.base import ConfigurationError, expanded, shortened
from accelerate.devices import CPU, DeviceBackend, count_visible
from accelerate.launch.network import get_free_port, is_port_in_use

ROOT = 0


def ask_mpirun() -> str:
    """What ``mpirun --version`` prints; it names the dialect.

    Raises:
        ConfigurationError: there is no mpirun.
    """
    try:
        asked = subprocess.run(
            ["mpirun", "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(
            f"mpirun --version does not run: {error}. Install Open MPI, MPICH or Intel MPI, or put its bin "
            f"folder on PATH."
        ) from error
    return asked.stdout + asked.stderr


def read_file(path: str) -> str:
    """The text of a file.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        return expanded(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = f"The file {shortened(path)} cannot be read: {shortened(str(error))}"
        raise ConfigurationError(f"{reason}. Check the path.") from error


def has_module(name: str) -> bool:
    """Whether a Python package or module is installed; only its parents are imported."""
    try:
        return find_spec(name) is not None
    except ImportError:
        return False


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
        mpi_version: gives what ``mpirun --version`` prints.
        read_file: gives the text of a file.
        is_root: whether this process may do everything.
        has_module: whether a Python package is installed.
    """

    hardware: DeviceBackend = CPU
    devices: int = 1
    cores: int = 1
    port_in_use: Callable[[int], bool] = is_port_in_use
    free_port: Callable[[], int] = get_free_port
    environ: Mapping[str, str] | None = None
    mpi_version: Callable[[], str] = ask_mpirun
    read_file: Callable[[str], str] = read_file
    is_root: bool = False
    has_module: Callable[[str], bool] = has_module

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
    return Machine(
        hardware=hardware,
        devices=devices,
        cores=_usable_cores(),
        environ=environ,
        is_root=hasattr(os, "geteuid") and os.geteuid() == ROOT,
    )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
