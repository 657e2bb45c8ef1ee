"""What this machine offers to a launch: its devices, cores, files and ports, and the store of a run."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from accelerate.base import ConfigurationError, expanded, shortened
from accelerate.devices import CPU, DeviceBackend, count_visible

ROOT = 0
DEFAULT_PORT = 29500
LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK = {LOOPBACK_ADDRESS: socket.AF_INET, "::1": socket.AF_INET6, "localhost": socket.AF_INET}
BACKLOG = 4096

KEY_VARIABLE = "ACCELERATE_RUN_KEY"
"""Secret of one run, with which its ranks sign what they write to the store."""


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether another program of this machine listens on a port.

    Args:
        port: default 29500.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port or DEFAULT_PORT)))
        except OSError:
            return True
    return False


def get_free_port() -> int:
    """A port that no program of this machine uses now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def run_key(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with the key of a run: that of the launcher that started this one, or a new one."""
    return {KEY_VARIABLE: environ.get(KEY_VARIABLE) or os.urandom(32).hex()}


def hold_loopback_store(address: str, port: int) -> object:
    """Open a store of `torch.distributed` that listens on the loopback interface alone.

    By default torch listens on all interfaces. A `TCPStore` that this process opens later at the same port
    with `multi_tenant=True`, as the rendezvous "static" and "env://" do, uses this one. None where the
    address is not the loopback, or the port is in use: torch then says so, or finds the store opened before.
    """
    if address not in LOOPBACK:
        return None
    try:
        listener = socket.create_server((address, port), family=LOOPBACK[address], backlog=BACKLOG)
    except OSError:
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    options: Any = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    host = str(listener.getsockname()[0])
    return TCPStore(host, port, master_listen_fd=listener.detach(), **options)


def loopback_interface() -> str | None:
    """Return the name of the loopback interface, "lo" on Linux; None where there is none that is up."""
    import psutil

    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        has_address = any(address.address == LOOPBACK_ADDRESS for address in addresses)
        if has_address and name in states and states[name].isup:
            return name
    return None


def ask_mpirun() -> str:
    """What ``mpirun --version`` prints; it names the dialect."""
    words = ["mpirun", "--version"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(
            f"mpirun --version does not run: {error}. Install Open MPI, MPICH or Intel MPI, or put its bin "
            f"folder on PATH."
        ) from error
    return answer.stdout + answer.stderr


def read_file(path: str) -> str:
    """The text of a file; a `ConfigurationError` where it cannot be read."""
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
    """Facts about this machine, gathered once: resolving a plan looks at nothing else."""

    hardware: DeviceBackend = CPU  # the devices that launched processes would find
    devices: int = 1  # that are visible; 1 for the CPU
    cores: int = 1  # of the CPU, that this process may use
    port_in_use: Callable[[int], bool] = is_port_in_use
    free_port: Callable[[], int] = get_free_port
    environ: Mapping[str, str] | None = None
    mpi_version: Callable[[], str] = ask_mpirun
    read_file: Callable[[str], str] = read_file
    is_root: bool = False
    has_module: Callable[[str], bool] = has_module

    @property
    def has_accelerator(self) -> bool:
        return self.hardware.name != CPU.name


def look(environ: Mapping[str, str], *, cpu: bool) -> Machine:
    """Gather the facts, without importing torch where nvidia-smi can answer; with `cpu` find no devices."""
    hardware, devices = (CPU, 1) if cpu else count_visible(environ)
    return Machine(
        hardware=hardware,
        devices=devices,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        environ=environ,
        is_root=hasattr(os, "geteuid") and os.geteuid() == ROOT,
    )
