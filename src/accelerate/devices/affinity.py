"""Bind a process to the CPU cores near its device."""

import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from accelerate.base import current, parse_flag_from_env, wrong_value
from accelerate.devices import nvidia

CPU_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
# The kernel's folder of PCI devices.
PCI_DEVICES = Path("/sys/bus/pci/devices")

_logger = logging.getLogger(__name__)


def parse_cpu_list(text: str) -> list[int]:
    """Read the kernel's way to write a set of cores: `"0-2,8"` is `[0, 1, 2, 8]`.

    Raises:
        ConfigurationError: If it is not of that form.
    """
    cores: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = CPU_RANGE.fullmatch(part)
        if match is None:
            raise wrong_value(
                "cpu list", text, f"{part!r} is neither a core nor a range", "write it like 0-3,8"
            )
        first, last = match.groups()
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def near_cores(local_process_index: int, environ: Mapping[str, str]) -> list[int]:
    """Return the cores that sit next to the GPU of one process.

    Args:
        local_process_index: The process's number on its machine; it uses the GPU of that number.
        environ: Its variables, for the GPUs it sees.

    Returns:
        Their numbers; empty where the kernel does not say.
    """
    visible = nvidia.visible_indices(environ)
    if not visible:
        return []
    index = visible[local_process_index % len(visible)]
    address = next(row[1] for row in nvidia.query("index", "pci.bus_id") if row[0] == str(index)).lower()
    # nvidia-smi writes the PCI domain with eight digits, the kernel with four.
    domain, _, rest = address.partition(":")
    cpu_list = PCI_DEVICES / f"{int(domain, 16):04x}:{rest}" / "local_cpulist"
    return parse_cpu_list(cpu_list.read_text()) if cpu_list.exists() else []


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores near its GPU, whatever it was bound to before.

    Costs a call of nvidia-smi; `set_numa_affinity` does it once.

    Args:
        local_process_index: The process's number on its machine.
        verbose: Log the cores chosen; default: in debug mode (`ACCELERATE_DEBUG_MODE`).
    """
    if verbose is None:
        verbose = parse_flag_from_env("ACCELERATE_DEBUG_MODE")
    if not hasattr(os, "sched_setaffinity"):
        _logger.warning(
            "CPU affinity was asked for, but this system cannot bind a process to cores; ignored."
        )
        return
    if not nvidia.driver_present():
        _logger.warning(
            "CPU affinity was asked for, but without nvidia-smi the near cores are not known; ignored."
        )
        return
    cores = near_cores(local_process_index, current())
    if not cores:
        _logger.warning(
            "CPU affinity was asked for, but it is not known which cores are near its GPU; ignored."
        )
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:  # none of them is in the set that the machine's owner gave this process
        _logger.warning("CPU affinity was asked for, but cores %s cannot be used: %s; ignored.", cores, error)
        return
    if verbose:
        _logger.info("Bound process %d to the cores %s.", local_process_index, cores)


@cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores near its GPU, once: later calls do nothing.

    Args:
        local_process_index: The process's number on its machine.
        verbose: Log the cores chosen; default: in debug mode (`ACCELERATE_DEBUG_MODE`).
    """
    override_numa_affinity(local_process_index, verbose)
