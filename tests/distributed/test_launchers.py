"""Processes started by the launchers."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerate.base import LaunchError, patch_environment
from accelerate.launch import get_free_port
from accelerate.launchers import LocalWorkers, debug_launcher, notebook_launcher, run_elastic
from accelerate.ops import gather_object
from accelerate.state import PartialState

Start = Callable[[Callable[..., Any], tuple[Any, ...], int], None]


def start_elastic(function: Callable[..., Any], args: tuple[Any, ...], num_processes: int) -> None:
    """What `notebook_launcher` does on GPUs, on the CPU."""
    port = get_free_port()
    workers = LocalWorkers(num_processes, 1, 0, "127.0.0.1", port, "bf16")
    with patch_environment(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1"):
        options = {"rdzv_endpoint": f"127.0.0.1:{port}", "run_id": "none", "max_restarts": 0}
        run_elastic(function, args, workers, on_cpu=True, **options)


def start_notebook(function: Callable[..., Any], args: tuple[Any, ...], num_processes: int) -> None:
    with patch_environment(ACCELERATE_USE_CPU="true"):
        notebook_launcher(function, args, num_processes, mixed_precision="bf16", use_port=0)


@pytest.fixture(autouse=True)
def no_log_records() -> Iterator[None]:
    """The agent logs its exceptions; pytest keeps the records, and they the agent with its port."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


STARTS = [start_notebook, debug_launcher, start_elastic]


@pytest.fixture(params=STARTS, ids=lambda start: start.__name__)
def start(request: pytest.FixtureRequest) -> Start:
    return request.param


def test_all_processes_run_in_one_process_group(start: Start, tmp_path: Path) -> None:
    before = dict(os.environ)

    def train(folder: Path, name: str) -> None:
        state = PartialState()
        facts = {
            "ranks": gather_object([state.process_index]),
            "local": state.local_process_index,
            "device": str(state.device),
            "forked": state.fork_launched,
            "precision": os.environ["ACCELERATE_MIXED_PRECISION"],
        }
        (folder / f"{name}{state.process_index}").write_text(repr(facts))

    start(train, (tmp_path, "rank"), 2)
    expected = {
        "ranks": [0, 1],
        "device": "cpu",
        "forked": True,
        "precision": "no" if start is debug_launcher else "bf16",
    }
    for rank in range(2):
        assert eval((tmp_path / f"rank{rank}").read_text()) == {**expected, "local": rank}
    assert dict(os.environ) == before
    for child in multiprocessing.active_children():  # the agent of torch 2.9 does not wait for their end
        child.join(10)
    assert multiprocessing.active_children() == []
    assert PartialState._shared_state == {}


def test_the_traceback_of_a_failing_process_is_raised(start: Start) -> None:
    before = dict(os.environ)

    def train() -> None:
        if PartialState().process_index == 1:
            raise KeyError("no such column")
        PartialState().wait_for_everyone()

    with pytest.raises(LaunchError) as failed:
        start(train, (), 2)
    assert "KeyError: 'no such column'" in str(failed.value)
    assert "Traceback (most recent call last)" in str(failed.value)
    assert "in train" in str(failed.value)
    assert dict(os.environ) == before
    assert multiprocessing.active_children() == []


def test_one_process_can_be_debugged(tmp_path: Path) -> None:
    def train() -> None:
        state = PartialState()
        (tmp_path / "size").write_text(f"{state.num_processes} {state.device}")

    debug_launcher(train, num_processes=1)
    assert (tmp_path / "size").read_text() == "1 cpu"
