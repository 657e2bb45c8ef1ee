"""DeepSpeed's real launchers on two hosts, over ssh where they use it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from .conftest import LAUNCH, Hosts, need

pytestmark = pytest.mark.slow
SCRIPT = """
import os, socket, sys, torch
from accelerate import PartialState
state = PartialState(cpu=True)
total = torch.ones(1) * (state.process_index + 1)
torch.distributed.all_reduce(total)
stage = os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"]
print("reduced", socket.gethostname(), state.process_index, total.item(), stage, sys.argv[1:], flush=True)
state.destroy_process_group()
"""
SERVER = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PasswordAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
"""
CLIENT = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o IdentitiesOnly=yes -o LogLevel=ERROR"


@pytest.fixture
def search_path(hosts: Hosts, tmp_path: Path) -> Iterator[str]:
    """A path on which `ssh` reaches both hosts with a key that is thrown away."""
    need("pdsh", "ssh", "ssh-keygen")
    server = "/usr/sbin/sshd"
    need(server)
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed not installed")
    folder = tmp_path / "ssh"
    folder.mkdir()
    for name in ("key", "host_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    (folder / "sshd_config").write_text(SERVER.format(folder=folder))
    (folder / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh {CLIENT} -i {folder}/key "$@"\n')
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    words = [server, "-D", "-e", "-f", str(folder / "sshd_config")]
    servers = [subprocess.Popen(hosts.inside(host, words), stderr=subprocess.DEVNULL) for host in (0, 1)]
    try:
        yield f"{folder}:{os.environ['PATH']}"
    finally:
        for each in servers:
            each.terminate()
            each.wait()


def words(launcher: str, *more: str) -> tuple[str, ...]:
    flags = ("--cpu", "--use_deepspeed", "--zero_stage", "2", "--deepspeed_hostfile", "hostfile")
    return (*LAUNCH, *flags, "--deepspeed_multinode_launcher", launcher, *more, "script.py", "--a", "1")


def check(out: str) -> None:
    lines = sorted(line[line.index("reduced") :] for line in out.splitlines() if "reduced node" in line)
    expected = ["reduced nodea 0 3.0 2 ['--a', '1']", "reduced nodeb 1 3.0 2 ['--a', '1']"]
    assert lines == expected, out


def test_pdsh_starts_both_hosts(hosts: Hosts, search_path: str) -> None:
    hosts.write("hostfile", "nodea slots=1\nnodeb slots=1\n")
    hosts.write("script.py", SCRIPT)
    started = words("pdsh", "--num_processes", "2")
    ended = hosts.run(0, *started, PATH=search_path, DS_ACCELERATOR="cpu")
    assert ended.code == 0, ended
    check(ended.out)


def test_each_host_can_be_started_without_ssh(hosts: Hosts, search_path: str) -> None:
    hosts.write("hostfile", "nodea slots=1\nnodeb slots=1\n")
    hosts.write("script.py", SCRIPT)
    more = ("--num_processes", "2", "--main_process_ip", "nodea", "--machine_rank")
    started = [
        hosts.start(host, *words("nossh", *more, str(host)), PATH=search_path, DS_ACCELERATOR="cpu")
        for host in (0, 1)
    ]
    ended = [hosts.end(process) for process in started]
    assert [each.code for each in ended] == [0, 0], ended
    check("".join(each.out for each in ended))
