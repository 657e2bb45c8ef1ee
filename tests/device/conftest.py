"""Tests on the simulated accelerator, which `make test-device` registers in all their processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.distributed.conftest import ON_SIMULATED_DEVICE, rank_server, run

__all__ = ["rank_server", "run"]

if not ON_SIMULATED_DEVICE:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def whole_memory() -> Iterator[None]:
    """Each test starts and ends with devices that are idle, prompt, and have the usual memory."""
    from tests.simulated_device import sim

    yield
    sim.set_late()
    for index in range(sim.device_count()):
        sim.synchronize(index)
        sim.set_memory_limit(index, 2 << 30)
    torch.accelerator.set_device_index(0)
