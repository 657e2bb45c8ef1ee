"""Processes of a benchmark that are the ranks of one run on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(run_rank: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Runs a function on all ranks, and returns the results that are not None.

    Args:
        run_rank: Function of a module, which is called with the arguments.
        size: Number of ranks.
        *args: Picklable arguments.
    """
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_join, (size, free_port(), results, run_rank, args), size)
    found = []
    while not results.empty():
        found.append(results.get())
    return found


def _join(rank: int, size: int, port: int, results: Any, run_rank: Callable[..., Any], args: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    result = run_rank(*args)
    if result is not None:
        results.put(result)
