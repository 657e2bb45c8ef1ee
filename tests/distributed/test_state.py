"""The state over real processes: ranks, barriers, parts of inputs, and how a run ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate.base import detached_environment, environ
from accelerate.logging import get_logger
from accelerate.rng import set_seed, synchronize_rng_states
from accelerate.state import (
    AcceleratorState,
    GradientState,
    PartialState,
    get_cpu_distributed_information,
    wait_for_everyone,
)

Run = Callable[..., list[Any]]

NOT_TORCHRUN: dict[str, str | None] = dict.fromkeys(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"), None
)


def describe() -> dict[str, Any]:
    state = PartialState(timeout=timedelta(seconds=30))
    return {
        "place": (state.process_index, state.num_processes, state.local_process_index),
        "label": str(state.distributed_type.value),  # type: ignore[union-attr]
        "backend": state.backend,
        "device": str(state.device),
        "started_by": state.topology.started_by,
        "flags": (state.is_main_process, state.is_local_main_process, state.is_last_process),
        "words": repr(state),
    }


POD: dict[str, str | None] = {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, "GROUP_RANK": None}


def train_in_pod(opens_first: bool) -> dict[str, Any]:
    if opens_first:
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    before = get_cpu_distributed_information()
    state = PartialState(timeout=timedelta(seconds=30))
    state.wait_for_everyone()
    return {
        "place": (state.process_index, state.num_processes, state.local_process_index),
        "local_size": state.topology.local_size,
        "before": (before.local_rank, before.local_world_size),
        "knows": not state.topology.needs_hosts,
    }


@pytest.mark.parametrize("opens_first", [False, True])
def test_one_process_for_each_pod_needs_no_local_rank(run: Run, opens_first: bool) -> None:
    pod = {**POD, "MASTER_ADDR": socket.gethostname()}
    for rank, facts in enumerate(run(train_in_pod, opens_first, processes=2, env=pod)):
        assert facts["place"] == (rank, 2, rank)
        assert facts["local_size"] == 2
        assert facts["knows"]


@pytest.mark.cpu_only
def test_every_process_has_its_ranks(run: Run) -> None:
    for rank, facts in enumerate(run(describe, processes=3)):
        assert facts == {
            "place": (rank, 3, rank),
            "label": "MULTI_CPU",
            "backend": "gloo",
            "device": "cpu",
            "started_by": "torchrun",
            "flags": (rank == 0, rank == 0, rank == 2),
            "words": "Distributed environment: DistributedType.MULTI_CPU  Backend: gloo\n"
            f"Num processes: 3\nProcess index: {rank}\nLocal process index: {rank}\nDevice: cpu\n",
        }


def one_process() -> tuple[int, str, bool]:
    state = PartialState()
    return state.num_processes, str(state.distributed_type.value), dist.is_initialized()  # type: ignore[union-attr]


def test_one_process_opens_no_group(run: Run) -> None:
    assert run(one_process, processes=1) == [(1, "NO", False)]


def pose_as(starter: dict[str, str]) -> tuple[dict[str, Any], dict[str, str | None], Any]:
    """Rank and size are set under other names, as by another launcher than torchrun."""
    rank, size = os.environ["MINE"], "2"
    values = {"rank": rank, "size": size}
    environ.unset(*NOT_TORCHRUN)
    environ.assign({name: values.get(value, value) for name, value in starter.items()})
    information = get_cpu_distributed_information()
    facts = describe()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    published = {name: os.environ.get(name) for name in names}
    return facts, published, (information.rank, information.world_size)


def start_as(starter: dict[str, str]) -> tuple[dict[str, Any], dict[str, str | None], Any]:
    environ.assign({"MINE": os.environ["RANK"]})
    return pose_as(starter)


@pytest.mark.parametrize(
    ("name", "starter"),
    [
        (
            "openmpi",
            {
                "OMPI_COMM_WORLD_RANK": "rank",
                "OMPI_COMM_WORLD_SIZE": "size",
                "OMPI_COMM_WORLD_LOCAL_RANK": "rank",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "size",
            },
        ),
        (
            "slurm",
            {
                "SLURM_JOB_ID": "11",
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "rank",
                "SLURM_STEP_NUM_TASKS": "size",
                "SLURM_LOCALID": "rank",
                "SLURM_NODEID": "0",
                "SLURM_STEP_TASKS_PER_NODE": "size",
                "SLURM_STEP_NODELIST": "localhost",
            },
        ),
    ],
)
def test_other_starters_and_what_torch_reads(run: Run, name: str, starter: dict[str, str]) -> None:
    for rank, (facts, published, information) in enumerate(run(start_as, starter)):
        assert facts["place"] == (rank, 2, rank)
        assert facts["started_by"] == name
        assert information == (rank, 2)
        assert published == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        }


def use_a_group_of_the_users() -> tuple[tuple[int, int], bool, int]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    group = dist.group.WORLD
    environ.unset(*NOT_TORCHRUN)
    state = PartialState()
    same = dist.group.WORLD is group
    state.wait_for_everyone()
    total = torch.ones(())
    dist.all_reduce(total)
    return (state.process_index, state.num_processes), same, int(total)


def test_a_group_that_is_open_is_used(run: Run) -> None:
    assert run(use_a_group_of_the_users) == [((0, 2), True, 2), ((1, 2), True, 2)]


def reset_and_build_again() -> list[Any]:
    PartialState()
    group = dist.group.WORLD
    AcceleratorState._reset_state(reset_partial_state=True)
    empty = PartialState._shared_state == {} and AcceleratorState._shared_state == {}
    state = AcceleratorState(mixed_precision="bf16", _from_accelerator=True)
    wait_for_everyone()
    state.wait_for_everyone()
    return [
        empty,
        dist.group.WORLD is group,
        state.num_processes,
        state.mixed_precision,
        state.is_last_process,
    ]


def test_a_reset_keeps_the_group(run: Run) -> None:
    first, second = run(reset_and_build_again)
    assert first == [True, True, 2, "bf16", False]
    assert second == [True, True, 2, "bf16", True]


def destroy_and_wait() -> str:
    state = PartialState()
    state.destroy_process_group()
    try:
        state.wait_for_everyone()
    except RuntimeError as error:
        return str(error)
    return "it did not raise"


def test_a_barrier_after_the_group_was_closed_is_an_error(run: Run) -> None:
    assert all("the process group is closed" in text for text in run(destroy_and_wait))


def wait_for_the_last() -> float:
    state = PartialState()
    start = time.monotonic()
    if state.is_last_process:
        time.sleep(0.5)
    state.wait_for_everyone()
    return time.monotonic() - start


def test_wait_for_everyone_waits_for_all_ranks(run: Run) -> None:
    assert min(run(wait_for_the_last, processes=3)) > 0.4  # clocks and timers are not exact


def build_once(context: str) -> bool:
    state = PartialState()
    found = Path("built").exists()
    state.wait_for_everyone()
    with getattr(state, context)():
        found = Path("built").exists()
        if not found:
            time.sleep(0.2)
            Path("built").touch()
    return found


@pytest.mark.parametrize("context", ["main_process_first", "local_main_process_first"])
def test_the_main_process_runs_the_block_first(run: Run, context: str) -> None:
    assert run(build_once, context, processes=3) == [False, True, True]


def fail_first() -> str:
    state = PartialState()
    try:
        with state.main_process_first():
            if state.is_main_process:
                raise LookupError("no disk")
    except LookupError as error:
        return str(error)
    return "continued"


def test_the_others_continue_when_the_main_process_fails(run: Run) -> None:
    assert run(fail_first) == ["no disk", "continued"]


def decorated() -> list[Any]:
    state = PartialState()
    with ExitStack() as stack:
        share = stack.enter_context(state.split_between_processes([1, 2, 3, 4], apply_padding=True))
        rows = stack.enter_context(state.split_between_processes({"x": torch.arange(4)}))["x"].tolist()

    def name() -> str:
        return "ran"

    state.print("printed")
    return [
        share,
        rows,
        state.on_main_process(name)(),
        state.on_last_process(name)(),
        state.on_process(process_index=1)(name)(),
    ]


def test_split_between_processes_gives_each_rank_its_share(run: Run) -> None:
    assert run(decorated, processes=3) == [
        [[1, 2], [0, 1], "ran", None, None],
        [[3, 3], [2], None, None, "ran"],
        [[4, 4], [3], None, "ran", None],
    ]


def log_in_order() -> str:
    state = PartialState()
    logger = get_logger("test.order", "INFO")
    handler = __import__("logging").FileHandler("log.txt")
    logger.logger.addHandler(handler)
    for step in range(5):
        time.sleep(0.02 * (state.num_processes - state.process_index))
        logger.info("%d.%d", step, state.process_index, main_process_only=False, in_order=True)
        logger.info("main %d", step)
        state.wait_for_everyone()
    return Path("log.txt").read_text()


def test_lines_are_logged_in_rank_order(run: Run) -> None:
    ranks = "".join(f"[RANK {rank}] {{0}}.{rank}\n" for rank in range(3))
    expected = "".join(f"{ranks}[RANK 0] main {{0}}\n".format(step) for step in range(5))
    for text in run(log_in_order, processes=3):
        assert text == expected


def synchronise() -> list[list[float]]:
    set_seed(3, device_specific=True)
    state = PartialState()
    generator = torch.Generator().manual_seed(state.process_index)
    before = [float(torch.rand(())), float(torch.rand((), generator=generator))]
    synchronize_rng_states(["torch", "generator"], generator)
    return [before, [float(torch.rand(())), float(torch.rand((), generator=generator))]]


def test_synchronized_generators_have_equal_states(run: Run) -> None:
    answers = run(synchronise, processes=3)
    befores, afters = zip(*answers, strict=True)
    assert len({tuple(before) for before in befores}) == 3
    assert len({tuple(after) for after in afters}) == 1


def share_threads() -> int:
    environ.unset("OMP_NUM_THREADS")
    torch.set_num_threads(7)
    PartialState()
    return torch.get_num_threads()


@pytest.mark.cpu_only
def test_processes_share_the_cores(run: Run) -> None:
    threads = set(run(share_threads))
    assert len(threads) == 1
    assert 1 <= threads.pop() < 7 or (os.cpu_count() or 1) >= 14


def gradient_states() -> bool:
    PartialState()
    return GradientState().sync_gradients


def test_the_gradient_state_needs_no_peer(run: Run) -> None:
    assert run(gradient_states) == [True, True]


# How a script ends: in fresh interpreters, since it is their end that matters.

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
from accelerate.state import PartialState
state = PartialState()
total = torch.ones(())
dist.all_reduce(total)
assert total == 2
last = state.is_last_process
{ending}
"""
ENDINGS = {
    "end": ("", (0, 0)),
    "exit": ("sys.exit(3 if last else 0)", (0, 3)),
    "raise": ("if last: raise LookupError('lost')", (0, 1)),
    # The peer takes no part in what is under way, and is asleep for longer than the test may take.
    "raise with work under way": (
        "work = dist.all_reduce(total, async_op=True) if last else None\nif last: raise LookupError('lost')\n"
        "sys.stdin.read()",
        (0, 1),
    ),
    "die": ("if last: os._exit(9)\ntime.sleep(0.5)\nwork = dist.all_reduce(total, async_op=True)", (0, 9)),
}

IN_GATE = ("raise with work under way",)


def end_two(code: str, port: int) -> list[tuple[int, str]]:
    """Run a script on two ranks; the first one's stdin is closed when the second one has ended."""
    ranks = []
    for rank in range(2):
        variables = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                env=variables,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    answers = []
    try:
        for process in reversed(ranks):
            _, errors = process.communicate(timeout=60)
            answers.append((process.returncode, errors))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return answers[::-1]


@pytest.fixture
def port() -> int:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


@pytest.mark.parametrize(
    "ending", [pytest.param(name, marks=[] if name in IN_GATE else pytest.mark.slow) for name in ENDINGS]
)
def test_the_exit_code_of_a_script_is_kept(ending: str, port: int) -> None:
    lines, codes = ENDINGS[ending]
    answers = end_two(textwrap.dedent(SCRIPT).format(ending=lines), port)
    assert tuple(code for code, _ in answers) == codes, answers
    assert all("terminate called" not in errors for _, errors in answers)


def start_child() -> tuple[str, bool]:
    """Start a process that creates a state: rank 0 passes the environment, rank 1 lets it be inherited."""
    PartialState()
    program = "from accelerate import PartialState as S; print(S().num_processes, S().process_index)"
    with detached_environment() as detached:
        env = detached if PartialState().is_main_process else None
        child = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
    return child.stdout.strip(), "RANK" in environ.current()


@pytest.mark.slow
def test_a_child_of_a_detached_environment_is_one_process(run: Run) -> None:
    assert run(start_child) == [("1 0", True), ("1 0", True)]
