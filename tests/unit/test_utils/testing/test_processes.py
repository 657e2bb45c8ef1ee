"""Commands that launch."""

from __future__ import annotations

import pytest

from accelerate.test_utils import DEFAULT_LAUNCH_COMMAND, device_count, torch_device
from accelerate.test_utils.testing import (
    get_launch_command,
    get_torch_dist_unique_port,
    memory_allocated_func,
    pytest_xdist_worker_id,
)


def test_flags_become_words() -> None:
    words = get_launch_command(num_processes=2, multi_gpu=True, config_file=None, debug=False)
    assert words == ["accelerate", "launch", "--num_processes=2", "--multi_gpu"]
    assert get_launch_command(num_processes=device_count, monitor_interval=0.1) == DEFAULT_LAUNCH_COMMAND


def test_what_this_machine_has() -> None:
    assert device_count >= 1
    assert isinstance(torch_device, str)
    assert memory_allocated_func() >= 0


@pytest.mark.parametrize(("worker", "number"), [("gw0", 0), ("gw3", 3), (None, 0)])
def test_workers_have_ports_of_their_own(
    worker: str | None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    assert pytest_xdist_worker_id() == number
    assert get_torch_dist_unique_port() == 29500 + number
