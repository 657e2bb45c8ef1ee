"""How programs are launched by tests."""

from __future__ import annotations

from typing import Any

from accelerate.base import environ
from accelerate.test_utils.testing.requirements import get_backend

torch_device, device_count, memory_allocated_func = get_backend()

FIRST_PORT = 29500
NOT_A_WORKER = "gw0"


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return the words of `accelerate launch` with flags.

    Args:
        **kwargs: Flags without their dashes: True stands for a flag without a value, False and None for none.
    """
    words = ["accelerate", "launch"]
    for name, value in kwargs.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words.append(f"--{name}={value}")
    return words


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)


def pytest_xdist_worker_id() -> int:
    """Return the number of this worker of pytest-xdist, from 0; without workers, 0."""
    return int(environ.current().get("PYTEST_XDIST_WORKER", NOT_A_WORKER).removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """Return a port for `torch.distributed` that no other worker of pytest-xdist takes."""
    return FIRST_PORT + pytest_xdist_worker_id()
