"""A run on two hosts, of which one loses its network: the other does not wait for it until a timeout."""

from __future__ import annotations

import time

import pytest

from .conftest import LAUNCH, SECONDS, Hosts, ip

pytestmark = pytest.mark.slow
SCRIPT = """
import sys, time, torch
from pathlib import Path
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(2, 2))
folder = Path(sys.argv[1])
(folder / f"ready_{accelerator.process_index}").touch()
while not (folder / "lost").exists():
    time.sleep(0.1)
if accelerator.process_index == 1:
    time.sleep(600)
accelerator.save_state(folder / "saved")
"""


def test_a_save_does_not_wait_for_a_machine_without_network(hosts: Hosts) -> None:
    script = hosts.write("script.py", SCRIPT)
    words = (*LAUNCH, "--cpu", "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "nodea")
    started = [
        hosts.start(
            host,
            *words,
            "--main_process_port",
            "29614",
            "--machine_rank",
            str(host),
            script,
            str(hosts.folder),
        )
        for host in (0, 1)
    ]
    end = time.monotonic() + SECONDS
    while not all((hosts.folder / f"ready_{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < end
        time.sleep(0.1)
    ip("-n", hosts.spaces[1], "link", "set", f"{hosts.spaces[1]}v", "down")
    (hosts.folder / "lost").touch()
    ended = hosts.end(started[0])
    assert ended.code == 1
    assert "process 1 of another node has ended, or its machine does not answer" in ended.err, ended.err
