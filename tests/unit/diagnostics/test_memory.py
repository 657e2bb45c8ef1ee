"""Peaks of blocks, and what is written when memory runs out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from accelerate import Accelerator
from accelerate.devices import CPU, CUDA
from accelerate.diagnostics import MemoryMeter, PeakMemory, snapshot_on_exhaustion
from accelerate.state import PartialState

MIB = 2**20


class Recorder:
    """Replaces `torch.cuda.memory`."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _record_memory_history(self, **kwargs: Any) -> None:
        self.calls.append(kwargs)

    def _dump_snapshot(self, path: str) -> None:
        self.calls.append(path)
        Path(path).write_text("allocations")


def backend_with(**module: Any) -> Any:
    """A GPU whose module is a fake."""
    fake = SimpleNamespace(**module)

    class Backend(type(CUDA)):  # type: ignore[misc]
        def torch_module(self) -> Any:
            return fake

    return Backend(**{field.name: getattr(CUDA, field.name) for field in dataclasses.fields(CUDA)})


@pytest.mark.usefixtures("states")
def test_the_peak_of_a_block_is_of_that_block() -> None:
    accelerator = Accelerator(cpu=True)
    with accelerator.peak_memory() as large:
        block = np.ones(200 * MIB // 8)
        del block
    with accelerator.peak_memory() as small:
        pass
    assert large.peak - small.peak > 150 * MIB
    assert large.peaks == [large.peak]
    assert str(large) == f"rank 0: {large.peak / MIB:,.0f} MiB"


def test_each_rank_has_a_line() -> None:
    used = PeakMemory()
    used.peaks = [MIB, 2048 * MIB]
    assert str(used) == "rank 0: 1 MiB\nrank 1: 2,048 MiB"


def test_the_peak_is_read_from_the_device() -> None:
    calls: list[str] = []
    backend = backend_with(
        reset_peak_memory_stats=lambda: calls.append("reset"), max_memory_allocated=lambda: 5 * MIB
    )
    meter = MemoryMeter(backend)
    meter.start()
    assert (meter.peak(), calls) == (5 * MIB, ["reset"])


@pytest.mark.parametrize("backend", [CPU, backend_with()])
def test_without_device_statistics_the_memory_of_the_process_is_measured(backend: Any) -> None:
    meter = MemoryMeter(backend)
    meter.start()
    assert meter.peak() > MIB


@pytest.mark.usefixtures("states")
def test_a_snapshot_is_written_when_memory_runs_out(tmp_path: Path, caplog: Any) -> None:
    PartialState(cpu=True)
    recorder = Recorder()
    folder = tmp_path / "snapshots"
    with (
        pytest.raises(torch.OutOfMemoryError),
        snapshot_on_exhaustion(backend_with(memory=recorder), folder, rank=3),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    path = folder / "memory_3.pickle"
    assert path.read_text() == "allocations"
    assert recorder.calls == [{"max_entries": 100_000, "stacks": "python"}, str(path), {"enabled": None}]
    assert f"Memory ran out. The allocations are in {path}" in caplog.text


def test_other_errors_write_none(tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(KeyError), snapshot_on_exhaustion(backend_with(memory=recorder), tmp_path, rank=0):
        raise KeyError("x")
    assert recorder.calls == [{"max_entries": 100_000, "stacks": "python"}, {"enabled": None}]
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("states")
def test_a_device_without_allocation_records_gives_a_warning(tmp_path: Path, caplog: Any) -> None:
    accelerator = Accelerator(cpu=True)
    with accelerator.peak_memory(snapshot_dir=tmp_path) as used:
        pass
    assert used.peaks
    assert "keeps no record of allocations: no snapshot will be written" in caplog.text


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.usefixtures("states")
def test_the_peak_of_a_gpu_is_measured(tmp_path: Path) -> None:
    accelerator = Accelerator()
    with accelerator.peak_memory() as used:
        torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    assert 100 * MIB <= used.peak < 200 * MIB
    with pytest.raises(torch.OutOfMemoryError), accelerator.peak_memory(snapshot_dir=tmp_path):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert (tmp_path / "memory_0.pickle").stat().st_size > 0
