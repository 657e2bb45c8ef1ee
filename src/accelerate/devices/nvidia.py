"""Queries of NVIDIA GPUs and their nearby CPU cores through nvidia-smi, without CUDA and torch."""

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from packaging.version import parse

from accelerate.base import StateError, current, parse_flag_from_env, wrong_value

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# GPUs whose drivers before this version offer peer-to-peer copies that do not work.
WITHOUT_PEER_TO_PEER = ("RTX 40",)
PEER_TO_PEER_DRIVER = "550.40.07"
FP8_CAPABILITY = (8, 9)
# The installer of the Windows driver puts it here, outside of the PATH.
WINDOWS_NVIDIA_SMI = Path("C:/Program Files/NVIDIA Corporation/NVSMI/nvidia-smi.exe")

CPU_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
PCI_DEVICES = Path("/sys/bus/pci/devices")
"""Folder of the Linux kernel with a folder for each PCI device."""

_logger = logging.getLogger(__name__)


def executable() -> str | None:
    path = shutil.which("nvidia-smi")
    if path is None and WINDOWS_NVIDIA_SMI.exists():
        return str(WINDOWS_NVIDIA_SMI)
    return path


@cache
def driver_present() -> bool:
    """Returns whether nvidia-smi works, and logs a warning once where it is installed but fails."""
    if executable() is None:
        return False
    try:
        query("index", "uuid")
    except StateError as error:  # a node without a GPU, whose programs run on the CPU
        _logger.warning("%s NVIDIA GPUs are not used.", error)
        return False
    return True


@cache
def query(*fields: str) -> tuple[tuple[str, ...], ...]:
    """Returns a row of texts for each GPU with fields of `nvidia-smi --help-query-gpu`.

    The result is cached.
    """
    command = executable()
    if command is None:
        raise StateError("nvidia-smi was not found: install the NVIDIA driver, or put it on the PATH.")
    completed = subprocess.run(
        [command, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode != 0:
        reason = (completed.stderr or completed.stdout).strip() or f"exit code {completed.returncode}"
        raise StateError(f"nvidia-smi failed: {reason}. Check that the NVIDIA driver is loaded.")
    return tuple(
        tuple(cell.strip() for cell in line.split(","))
        for line in completed.stdout.splitlines()
        if line.strip()
    )


def get_gpu_info() -> tuple[list[str], int]:
    """Returns the names and the number of the NVIDIA GPUs of this machine.

    Raises:
        StateError: If nvidia-smi fails.
    """
    names = [row[0] for row in query("name")]
    return names, len(names)


def get_driver_version() -> str:
    """Returns the version of the NVIDIA driver.

    Raises:
        StateError: If nvidia-smi fails or lists no GPU.
    """
    rows = query("driver_version")
    if not rows:
        raise StateError("nvidia-smi lists no GPU: check that the NVIDIA driver sees one.")
    return rows[0][0]


def check_cuda_p2p_ib_support() -> bool:
    """Returns whether peer-to-peer and InfiniBand transports may stay enabled.

    They must be disabled with several GPUs that offer them without support. A machine without nvidia-smi has
    nothing to disable.
    """
    if not driver_present():
        return True
    names, count = get_gpu_info()
    affected = any(model in name for model in WITHOUT_PEER_TO_PEER for name in names)
    if count < 2 or not affected:
        return True
    return parse(get_driver_version()) >= parse(PEER_TO_PEER_DRIVER)


def check_cuda_fp8_capability() -> bool:
    """Returns whether the GPUs of this machine compute in FP8 (compute capability of at least 8.9)."""
    if not driver_present():
        return False
    capabilities = [tuple(map(int, row[0].split("."))) for row in query("compute_cap")]
    return bool(capabilities) and min(capabilities) >= FP8_CAPABILITY


def visible_indices(environ: Mapping[str, str]) -> list[int]:
    """Returns the physical indices of the GPUs that a process sees, in the order of the process.

    `CUDA_VISIBLE_DEVICES` is parsed as CUDA parses it. Entries are numbers or prefixes of UUIDs, and parsing
    ends at the first entry that names no GPU. An entry for a part of a GPU (MIG) counts as GPU 0, because its
    name does not contain its parent.
    """
    gpus = query("index", "uuid")
    entries = environ.get(VISIBLE_DEVICES)
    if entries is None:
        return [int(index) for index, _ in gpus]
    indices: list[int] = []
    for entry in (part.strip() for part in entries.split(",")):
        is_uuid = entry.startswith("GPU-")
        numbers = [number for number, uuid in gpus if entry == number or (is_uuid and uuid.startswith(entry))]
        if not numbers and not entry.startswith("MIG-"):
            break
        indices.append(int(numbers[0]) if numbers else 0)
    return indices


def parse_cpu_list(text: str) -> list[int]:
    """Converts a CPU list of the Linux kernel to core numbers, such as `"0-2,8"` to `[0, 1, 2, 8]`."""
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
    """Returns the cores near the GPU of a process, or none where the kernel does not list them."""
    visible = visible_indices(environ)
    if not visible:
        return []
    index = visible[local_process_index % len(visible)]
    address = next(row[1] for row in query("index", "pci.bus_id") if row[0] == str(index)).lower()
    # nvidia-smi writes the PCI domain with eight digits, the kernel with four.
    domain, _, rest = address.partition(":")
    cpu_list = PCI_DEVICES / f"{int(domain, 16):04x}:{rest}" / "local_cpulist"
    return parse_cpu_list(cpu_list.read_text(encoding="ascii")) if cpu_list.exists() else []


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Binds this process to the cores near its GPU and replaces an earlier binding.

    Each call runs nvidia-smi. `set_numa_affinity` runs it once.

    Args:
        local_process_index: Rank of the process on its node.
        verbose: Log the chosen cores. Default: in debug mode (`ACCELERATE_DEBUG_MODE`).
    """
    if verbose is None:
        verbose = parse_flag_from_env("ACCELERATE_DEBUG_MODE")
    reason = ""
    if not hasattr(os, "sched_setaffinity"):
        reason = "this system cannot bind a process to cores"
    elif not driver_present():
        reason = "without nvidia-smi the nearby cores are not known"
    elif not (cores := near_cores(local_process_index, current())):
        reason = "it is not known which cores are near its GPU"
    else:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:  # none of them is in the CPU set of this process
            reason = f"cores {cores} cannot be used: {error}"
    if reason:
        _logger.warning("CPU affinity was asked for, but %s; ignored.", reason)
    elif verbose:
        _logger.info("Bound process %d to the cores %s.", local_process_index, cores)


@cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Binds this process to the cores near its GPU on the first call.

    Args:
        local_process_index: Rank of the process on its node.
        verbose: Log the chosen cores. Default: in debug mode (`ACCELERATE_DEBUG_MODE`).
    """
    override_numa_affinity(local_process_index, verbose)
