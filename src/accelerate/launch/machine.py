"""Devices, cores, files and ports of this machine, and the store of a run."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from accelerate.base import ConfigurationError, environ, expanded, shortened
from accelerate.devices import CPU, DeviceBackend, count_visible

ROOT = 0
DEFAULT_PORT = 29500
LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK = {LOOPBACK_ADDRESS: socket.AF_INET, "::1": socket.AF_INET6, "localhost": socket.AF_INET}
BACKLOG = 4096

KEY_VARIABLE = "ACCELERATE_RUN_KEY"
"""Variable with the secret key of a run, with which its ranks sign their entries in the store."""
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")


def is_port_in_use(port: int | str | None = None) -> bool:
    """Returns whether another program of this machine listens on a port.

    Args:
        port: the port. Default: 29500.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port or DEFAULT_PORT)))
        except OSError:
            return True
    return False


def get_free_port() -> int:
    """Returns a port that no program of this machine uses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def run_key(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable with the key of the launcher that started this one, or with a new key."""
    return {KEY_VARIABLE: variables.get(KEY_VARIABLE) or os.urandom(32).hex()}


def new_run_id() -> str:
    """Returns an identifier for a run that starts now, which begins the name of its folder of records."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(4).hex()}"


def is_run_id(value: object) -> bool:
    """Returns whether a value is an identifier of a run, which cannot name another path."""
    return isinstance(value, str) and _RUN_ID.fullmatch(value) is not None


def run_id_of(variables: Mapping[str, str]) -> str | None:
    """Returns the identifier that a launcher gave this process, or None."""
    value = variables.get(environ.RUN_ID)
    return value if is_run_id(value) else None


def hold_loopback_store(address: str, port: int) -> object:
    """Opens a `TCPStore` that listens on the loopback interface only.

    By default torch listens on all interfaces. A `TCPStore` that this process later opens at the same port
    with `multi_tenant=True`, as the rendezvous "static" and "env://" do, uses this one. Returns None if the
    address is not the loopback, or the port is in use. In that case torch raises the error, or uses the store
    opened before.
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
    """Returns the name of the active loopback interface, "lo" on Linux, or None."""
    import psutil

    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        has_address = any(address.address == LOOPBACK_ADDRESS for address in addresses)
        if has_address and name in states and states[name].isup:
            return name
    return None


def ask_mpirun() -> str:
    """Returns the output of `mpirun --version`, which identifies the implementation."""
    words = ["mpirun", "--version"]
    try:
        completed = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(
            f"mpirun --version does not run: {error}. Install Open MPI, MPICH or Intel MPI, or put its bin "
            f"folder on PATH."
        ) from error
    return completed.stdout + completed.stderr


def read_file(path: str) -> str:
    """Returns the text of a file.

    Raises a `ConfigurationError` if it cannot be read.
    """
    try:
        return expanded(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = f"The file {shortened(path)} cannot be read: {shortened(str(error))}"
        raise ConfigurationError(f"{reason}. Check the path.") from error


def has_module(name: str) -> bool:
    """Returns whether a Python package or module is installed, importing only its parents."""
    try:
        return find_spec(name) is not None
    except ImportError:
        return False


@dataclass(frozen=True)
class Machine:
    """Facts about this machine, which are the only input of a plan beside the settings."""

    hardware: DeviceBackend = CPU  # the devices that launched processes use
    devices: int = 1  # number of visible devices, 1 for the CPU
    cores: int = 1  # number of CPU cores that this process may use
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
    """Gathers the facts without importing torch where nvidia-smi suffices, and without devices for `cpu`."""
    hardware, devices = (CPU, 1) if cpu else count_visible(environ)
    return Machine(
        hardware=hardware,
        devices=devices,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        environ=environ,
        is_root=hasattr(os, "geteuid") and os.geteuid() == ROOT,
    )
