"""Peak memory of a block of code, on each rank, and a record of allocations when memory runs out."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from accelerate import torch_private
from accelerate.devices import DeviceBackend
from accelerate.diagnostics.batch_size import should_reduce_batch_size
from accelerate.logging import get_logger

logger = get_logger(__name__)

SNAPSHOT = "memory_{rank}.pickle"
MOST_EVENTS = 100_000  # allocations and frees that a record keeps; older ones are dropped
MIB = 2**20
# Linux alone can begin a new peak of a process: writing this to its file forgets the old one.
CLEAR_REFS, NEW_PEAK, STATUS, PEAK = Path("/proc/self/clear_refs"), "5", Path("/proc/self/status"), "VmHWM:"


class PeakMemory:
    """What a block used at most; filled in at its end.

    Attributes:
        peak: Bytes of this rank: of the device, or on the CPU of the process.
        peaks: Bytes of each rank, in order.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.peaks: list[int] = []

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {peak / MIB:,.0f} MiB" for rank, peak in enumerate(self.peaks))


class HostMeter:
    """Measures the memory of this process; what was in use at the start counts."""

    def start(self) -> None:
        """Begin a new peak, where the system can."""
        if CLEAR_REFS.exists():
            CLEAR_REFS.write_text(NEW_PEAK)

    def peak(self) -> int:
        """Return the peak, in bytes."""
        for line in STATUS.read_text().splitlines() if STATUS.exists() else ():
            if line.startswith(PEAK):
                return int(line.split()[1]) * 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
        return max(most if psutil.MACOS else most * 1024, psutil.Process().memory_info().rss)


class DeviceMeter:
    """Measures the memory that torch gives out on the current device.

    Args:
        module: The torch module that drives it.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def start(self) -> None:
        """Begin a new peak."""
        self.module.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the peak, in bytes."""
        return int(self.module.max_memory_allocated())


def meter_of(backend: DeviceBackend) -> HostMeter | DeviceMeter:
    """Return what measures the memory of a kind of hardware: of the process where its module cannot tell.

    Args:
        backend: The hardware of the run.
    """
    if backend.name == "cpu" or not hasattr(backend.torch_module(), "max_memory_allocated"):
        return HostMeter()
    return DeviceMeter(backend.torch_module())


@contextmanager
def snapshot_on_exhaustion(backend: DeviceBackend, folder: str | Path, rank: int) -> Iterator[None]:
    """Record allocations in the block; when memory runs out, write them to `memory_RANK.pickle`.

    The file is opened at https://pytorch.org/memory_viz. Devices whose module keeps no record have none: that
    is said once.

    Args:
        backend: The hardware of the run.
        folder: Where the file goes; made when it is written.
        rank: Of this process.
    """
    recorder: Any = None if backend.name == "cpu" else getattr(backend.torch_module(), "memory", None)
    if not torch_private.can_record_memory(recorder):
        logger.warning_once(f"{backend.label} keeps no record of allocations: no snapshot will be written.")
        yield
        return
    torch_private.record_memory(recorder, max_entries=MOST_EVENTS)
    try:
        yield
    except Exception as error:
        if should_reduce_batch_size(error):
            _write(recorder, Path(folder), rank)
        raise
    finally:
        torch_private.record_memory(recorder, enabled=None)


def _write(recorder: Any, folder: Path, rank: int) -> None:
    path = folder / SNAPSHOT.format(rank=rank)
    folder.mkdir(parents=True, exist_ok=True)
    torch_private.dump_memory(recorder, str(path))
    logger.warning(
        f"Memory ran out. The allocations are in {path}; look at them at https://pytorch.org/memory_viz",
        main_process_only=False,
    )
