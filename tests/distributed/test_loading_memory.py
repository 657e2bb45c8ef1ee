"""Efficient loading needs the memory of the shards, and of one tensor at a time, on ranks other than 0."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin

Run = Callable[..., list[Any]]
WIDTH, LAYERS = 1024, 64


def memory(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS, or VmHWM, its peak."""
    (size,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(size) * 1024


def build(layers: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


def prepare(layers: int, accelerator: Any) -> tuple[float, float]:
    """Prepare a model that only rank 0 has; return the peak and the end, in sizes of the model."""
    with torch.device("cpu" if accelerator.is_main_process else "meta"):
        model = build(layers)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is used now
    before, size = memory("VmRSS"), 4 * layers * WIDTH**2
    model = accelerator.prepare(model)
    return (memory("VmHWM") - before) / size, (memory("VmRSS") - before) / size


def load() -> tuple[float, float]:
    ctypes.CDLL(None).mallopt(-3, 2**17)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=True,
        auto_wrap_policy="size_based_wrap",
        min_num_params=1000,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    prepare(1, accelerator)  # what torch loads once
    return prepare(LAYERS, accelerator)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_other_ranks_hold_their_shard_and_one_tensor(run: Run) -> None:
    env = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    (_, end_of_main), (peak, end) = run(load, processes=2, env=env)
    assert 0.4 < end < 0.6
    assert peak < 0.5 + 0.2
    assert end_of_main < -0.3  # rank 0 keeps its half of the model
