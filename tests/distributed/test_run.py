"""The fixture `run` itself: what it gives, and how it fails."""

from __future__ import annotations

import atexit
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist

Run = Callable[..., list[Any]]


def join() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))


def sum_over_ranks(offset: int) -> int:
    join()
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)


def end_the_group_at_exit() -> int:
    atexit.register(dist.destroy_process_group)
    join()
    return dist.get_rank()


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def fail_on_rank_one() -> None:
    join()
    if dist.get_rank() == 1:
        raise LookupError("rank one has lost its way")
    dist.barrier()


def sleep_on_rank_zero() -> None:
    if os.environ["RANK"] == "0":
        time.sleep(60)


def leave_a_process() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid


def end_badly() -> None:
    os._exit(7)


class EndsBadly:
    def __del__(self) -> None:
        os._exit(9)


def leave_an_object_that_ends_badly() -> None:
    globals()["kept"] = EndsBadly()


def print_at_the_end() -> None:
    atexit.register(print, "at the end")
    sys.exit(3)


def draw() -> list[float]:
    return [float(numpy.random.random()), random.random()]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_returns_the_value_of_each_rank(run: Run, processes: int) -> None:
    expected = sum(rank + 10 for rank in range(processes))
    assert run(sum_over_ranks, 10, processes=processes) == [expected] * processes


def test_ranks_end_as_scripts_do(run: Run) -> None:
    assert run(end_the_group_at_exit, timeout=20) == [0, 1]


def test_sets_the_variables_of_torchrun(run: Run) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_CPU")
    expected = [[str(rank), str(rank), "2", "2", "127.0.0.1", "true"] for rank in range(2)]
    assert run(variables, *names) == expected


def test_takes_variables_from_the_test(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_THE_TEST", "here")
    env = {"MINE": "yes", "ACCELERATE_USE_CPU": None}
    assert (
        run(variables, "MINE", "ACCELERATE_USE_CPU", "FROM_THE_TEST", env=env) == [["yes", None, "here"]] * 2
    )


def test_shows_the_traceback_of_the_first_rank_that_fails(run: Run) -> None:
    with pytest.raises(pytest.fail.Exception, match="rank one has lost its way") as caught:
        run(fail_on_rank_one)
    text = str(caught.value)
    assert text.index("rank 1:") < text.index("rank 0:"), "the cause comes before what followed from it"
    assert "fail_on_rank_one" in text


def test_shows_the_stack_of_a_rank_that_does_not_end(run: Run) -> None:
    with pytest.raises(pytest.fail.Exception, match="did not end within 3 s") as caught:
        run(sleep_on_rank_zero, timeout=3)
    assert "in sleep_on_rank_zero" in str(caught.value)
    assert "rank 1:" not in str(caught.value)


def test_refuses_processes_left_behind(run: Run) -> None:
    with pytest.raises(pytest.fail.Exception, match="left processes running") as caught:
        run(leave_a_process, processes=1)
    pid = int(str(caught.value).split("[")[1].split("]")[0])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_reports_a_rank_that_exits_before_its_function_returns(run: Run) -> None:
    with pytest.raises(pytest.fail.Exception, match="exit code 7 before its function returned"):
        run(end_badly, processes=1)


def test_a_rank_runs_its_exit_handlers(run: Run, end: Run) -> None:
    with pytest.raises(pytest.fail.Exception, match="exit code 9 after its function had returned"):
        run(leave_an_object_that_ends_badly, processes=1)
    codes, outputs = end(print_at_the_end, processes=1)
    assert (codes, outputs) == ([3], ["at the end\n"])


def test_generators_without_a_seed_differ(run: Run) -> None:
    first, second = run(draw)
    assert not set(first) & set(second)


def test_refuses_a_function_that_other_processes_cannot_find(run: Run) -> None:
    with pytest.raises(ValueError, match="at the top of a test file"):
        run(lambda: None)
