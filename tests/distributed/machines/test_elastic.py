"""Two hosts that train together by `accelerate launch`, and the errors when they cannot."""

from __future__ import annotations

import time

import pytest

from .conftest import LAUNCH, TRAIN, Hosts

pytestmark = pytest.mark.slow
PORT = "29611"
TWO = (*LAUNCH, "--cpu", "--num_machines", "2", "--main_process_port", PORT)
KILLED_ONCE = """
import os, signal
if os.environ["RANK"] == "1" and not os.path.exists("killed"):
    open("killed", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def words(host: int, *more: str) -> tuple[str, ...]:
    return (*TWO, "--main_process_ip", "nodea", "--machine_rank", str(host), *more)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_hosts_train_together(hosts: Hosts, backend: str) -> None:
    script = hosts.write("train.py", TRAIN)
    options = ("--num_processes", "4", "--rdzv_backend", backend)
    started = [hosts.start(host, *words(host, *options, script)) for host in (0, 1)]
    ended = [hosts.end(process) for process in started]
    assert [each.code for each in ended] == [0, 0], ended
    lines = sorted(line for each in ended for line in each.out.splitlines())
    assert lines == [f"trained node{'ab'[rank // 2]} {rank} 4 True" for rank in range(4)]
    assert "4 processes in total: 2 on each of 2 machines; machine 1 has ranks 2 to 3" in ended[1].err


def test_hosts_that_differ_train_together(hosts: Hosts) -> None:
    script = hosts.write("train.py", TRAIN)
    started = [hosts.start(host, *words(host, "--processes_per_machine", "2,1", script)) for host in (0, 1)]
    ended = [hosts.end(process) for process in started]
    assert [each.code for each in ended] == [0, 0], ended
    lines = sorted(line for each in ended for line in each.out.splitlines())
    assert lines == [f"trained node{'aab'[rank]} {rank} 3 True" for rank in range(3)]


def test_a_killed_worker_is_started_again_and_the_run_ends_well(hosts: Hosts) -> None:
    script = hosts.write("train.py", KILLED_ONCE + TRAIN)
    options = ("--num_processes", "2", "--rdzv_backend", "c10d", "--max_restarts", "2")
    started = [hosts.start(host, *words(host, *options, script)) for host in (0, 1)]
    ended = [hosts.end(process) for process in started]
    assert [each.code for each in ended] == [0, 0], ended
    assert (hosts.folder / "killed").exists()
    lines = sorted(line.split(" ", 2)[2] for each in ended for line in each.out.splitlines())
    assert lines == ["0 2 True", "1 2 True"]


@pytest.mark.parametrize(
    ("address", "reason"),
    [("nowhere.invalid", "this name has no address"), ("10.99.0.1", "network is unreachable")],
)
def test_a_machine_that_cannot_reach_the_first_fails_at_once(hosts: Hosts, address: str, reason: str) -> None:
    script = hosts.write("train.py", TRAIN)
    begun = time.monotonic()
    ended = hosts.run(
        1, *TWO, "--num_processes", "4", "--main_process_ip", address, "--machine_rank", "1", script
    )
    assert ended.code == 1
    assert f"machine 1 (ranks 2 to 3) cannot reach {address}:{PORT}: {reason}. Check that" in ended.err
    assert "Traceback" not in ended.err
    assert time.monotonic() - begun < 30
