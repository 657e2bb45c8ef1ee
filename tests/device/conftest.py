"""Tests on the simulated accelerator, which `make test-device` registers in all their processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.distributed.conftest import ON_SIMULATED_DEVICE, rank_server, run

__all__ = ["rank_server", "run"]

if not ON_SIMULATED_DEVICE:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out FSDP 1: it replaces the data of parameters, which devices of other packages do not allow."""
    left_out = [item for item in items if ON_SIMULATED_DEVICE and trains_with_fsdp1(item)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def trains_with_fsdp1(item: pytest.Item) -> bool:
    values = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    is_named = "fsdp1" in item.name or "fsdp_1" in item.name
    variables = values.get("variables")
    has_variable = isinstance(variables, dict) and variables.get("FSDP_VERSION") == "1"
    return is_named or has_variable or values.get("version") == 1


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
