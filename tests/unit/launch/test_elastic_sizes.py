"""Sizes of an elastic run, its rendezvous, and the processes that are left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate.base import ConfigurationError, environ, patch_environment
from accelerate.commands.launch import launch_command_parser, read_settings
from accelerate.devices import CPU, CUDA
from accelerate.launch import LaunchPlan, Machine, Target, resolve_plan
from accelerate.launch.backends.elastic import Devices, Ranks
from accelerate.launch.layout import Sizes
from accelerate.launch.plan import torchrun_arguments

ADDRESS = ("--main_process_ip", "first")


def plan(*words: str, devices: int = 0, **variables: str) -> LaunchPlan:
    with patch_environment(**variables):
        settings = read_settings(launch_command_parser().parse_args([*words, "train.py"]))
    machine = Machine(CUDA if devices else CPU, devices or 1, port_in_use=lambda port: False)
    return resolve_plan(settings, machine, Target("script", "train.py"))[0]


def arguments(made: LaunchPlan) -> dict[str, str]:
    words = torchrun_arguments(made)
    return dict(zip(words[:-1:2], words[1:-1:2], strict=True))


@pytest.mark.parametrize(
    ("words", "nodes", "local", "smallest"),
    [
        (("--nnodes", "2:4", "--num_processes", "8"), "2:4", 2, Sizes(2)),
        (("--nnodes", "2:2", "--num_processes", "8"), "2", 4, Sizes()),
        (("--nnodes", "2", "--num_processes", "8"), "2", 4, Sizes()),
        (("--num_machines", "4", "--num_processes", "8", "--min_processes", "3"), "2:4", 2, Sizes(2)),
        (("--num_machines", "4", "--num_processes", "8", "--min_processes", "7"), "4", 2, Sizes()),
        (("--nnodes", "1:4", "--num_processes", "8", "--min_processes", "5"), "3:4", 2, Sizes(3)),
        (("--num_processes", "4", "--min_processes", "2"), "1", 4, Sizes(None, 2)),
        (("--num_processes", "4", "--min_processes", "4"), "1", 4, Sizes()),
        (("--num_machines", "4", "--nnodes", "2:4", "--num_processes", "4"), "2:4", 1, Sizes(2)),
    ],
)
def test_sizes(words: tuple[str, ...], nodes: str, local: int, smallest: Sizes) -> None:
    made = plan(*words, *ADDRESS)
    assert (made.nodes, made.local_processes, made.smallest) == (nodes, local, smallest)
    assert arguments(made)["--nnodes"] == nodes
    assert arguments(made)["--max_restarts"] == ("10" if smallest != Sizes() else "0")
    backend = "c10d" if smallest.machines else "static"
    assert arguments(made)["--rdzv_backend"] == backend
    assert ("--node_rank" in arguments(made)) == (backend == "static")


def test_each_machine_has_its_devices() -> None:
    assert plan("--nnodes", "1:3", *ADDRESS, devices=4).local_processes == 4


def test_settings_of_the_rendezvous_that_are_given_are_kept() -> None:
    words = ("--nnodes", "1:2", "--num_processes", "2", "--max_restarts", "3")
    found = arguments(plan(*words, *ADDRESS, "--rdzv_conf", "last_call_timeout=60,timeout=9"))
    assert found["--max_restarts"] == "3"
    assert (
        found["--rdzv_conf"]
        == "last_call_timeout=60,timeout=9,keep_alive_interval=1,keep_alive_max_attempt=5"
    )


def test_the_total_names_both_sizes() -> None:
    (note,) = plan("--nnodes", "2:4", "--num_processes", "8", *ADDRESS).notes
    assert note == "8 processes in total: 2 on each of 2 to 4 machines"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--nnodes", "4:2"),
            "^--nnodes='4:2': it is neither a number of machines, from 1 on, nor a smallest",
        ),
        (("--nnodes", "1:"), "^--nnodes='1:': it is neither a number of machines"),
        (("--nnodes", "1:2", "--rdzv_conf", "foo"), "^--rdzv_conf='foo': a setting has no name or no value"),
        (("--nnodes", "0:2"), "^--nnodes='0:2'"),
        (("--nnodes", "1:2:3"), "^--nnodes='1:2:3'"),
        (("--nnodes", "1:2", "--num_machines", "3"), "^--nnodes='1:2': --num_machines is 3, and the largest"),
        (
            ("--nnodes", "1:2", "--rdzv_backend", "static", "--num_processes", "2"),
            "^--rdzv_backend='static': its number of machines cannot change. Leave it out, or use c10d",
        ),
        (("--num_processes", "2", "--min_processes", "3"), "^--min_processes=3: the largest number .* is 2"),
        (
            ("--processes_per_machine", "2,1", "--nnodes", "1:2"),
            "^--processes_per_machine='2,1': each machine",
        ),
        (
            ("--nnodes", "1:2", "--num_processes", "4", "--replicas", "2"),
            "^--nnodes='1:2': the replicas launcher starts a fixed number of processes. Leave it out",
        ),
    ],
)
def test_bad_sizes(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(*words, *ADDRESS)


def test_a_static_rendezvous_of_a_variable_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="its number of machines cannot change"):
        plan("--nnodes", "1:2", "--num_processes", "2", *ADDRESS, PET_RDZV_BACKEND="static")


class Context:
    """Processes of an attempt, as the agent of torch holds them."""

    def __init__(self, codes: list[int], restarts: int) -> None:
        self.envs = {
            rank: {
                "RANK": str(rank),
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
                "TORCHELASTIC_MAX_RESTARTS": "9",
            }
            for rank in range(len(codes))
        }
        self.subprocess_handlers = {
            rank: SimpleNamespace(proc=SimpleNamespace(poll=lambda code=code: code))
            for rank, code in enumerate(codes)
        }


def sizes_after(ranks: Ranks, *attempts: list[int]) -> list[int]:
    size, sizes = len(attempts[0]), []
    for number, codes in enumerate(attempts):
        context: Any = Context(codes, number)
        ranks.start(context, lambda: None)
        size = ranks.next_size(size)
        sizes.append(size)
    return sizes


def test_a_process_that_fails_twice_in_succession_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(tmp_path, Sizes(processes=2), Devices("VISIBLE", ("4", "5", "6")))
    with patch_environment(VISIBLE="4,5,6"):
        assert sizes_after(ranks, [0, -9, 0], [0, -9, 0]) == [3, 2]
        assert environ.current()["VISIBLE"] == "4,6"
    assert "rank 1 has failed twice and is left out: the run continues with 2" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("least", "attempts", "sizes"),
    [
        (1, [[0, -9, 0], [-9, 0, 0], [0, -9, 0]], [3, 3, 3]),
        (3, [[0, -9, 0], [0, -9, 0]], [3, 3]),
        (None, [[0, -9, 0], [0, -9, 0]], [3, 3]),
        (1, [[-9, 0, 0], [-9, 0, 0], [-9, 0], [-9, 0]], [3, 2, 2, 1]),
    ],
    ids=["others", "smallest", "fixed", "again"],
)
def test_sizes_after_failures(
    tmp_path: Path, least: int | None, attempts: list[list[int]], sizes: list[int]
) -> None:
    assert sizes_after(Ranks(tmp_path, Sizes(processes=least)), *attempts) == sizes
