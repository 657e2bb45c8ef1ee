"""A run on two hosts, of which a process is killed during training: it resumes automatically."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import LAUNCH, Hosts

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[3] / "examples" / "restart.py"
TWO = (*LAUNCH, "--cpu", "--num_machines", "2", "--num_processes", "2", "--main_process_port", "29613")
END = re.compile(r"^starting at step (\d+)\n|^weights: ([0-9a-f]{64})$", re.MULTILINE)


def train(hosts: Hosts, name: str, *options: str) -> tuple[list[str], list[str]]:
    """Return the steps that the starts of the run began at, and the checksum of the weights."""
    rendezvous = ("--main_process_ip", "nodea", "--rdzv_backend", "c10d", "--max_restarts", "2")
    script = (str(SCRIPT), "--project", str(hosts.folder / name), "--num_epochs", "1", *options)
    started = [hosts.start(host, *TWO, *rendezvous, "--machine_rank", str(host), *script) for host in (0, 1)]
    ended = [hosts.end(process) for process in started]
    assert [each.code for each in ended] == [0, 0], ended
    print("".join(each.err for each in ended))
    printed, other = (END.findall(each.out) for each in ended)  # each host prints
    assert printed == other
    return [step for step, _ in printed if step], [weights for _, weights in printed if weights]


def test_a_killed_run_on_two_hosts_resumes_from_its_checkpoint(hosts: Hosts) -> None:
    starts, whole = train(hosts, "whole")
    assert starts == ["0"]
    starts, weights = train(hosts, "killed", "--die_at", "25", "--save_every", "10")
    assert (hosts.folder / "killed" / "died_at_step_25").exists()
    assert starts == ["0", "20"]
    assert weights == whole
