"""Two hosts on this machine: each a network namespace with its own name, address and hosts file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")
SECONDS = 120
REDUCE = """
import socket, sys, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
total = accelerator.reduce(torch.tensor([float(accelerator.process_index + 1)])).item()
place = (accelerator.process_index, accelerator.num_processes)
print(" ".join(map(str, ("reduced", socket.gethostname(), *place, total))) + "\\n", end="", flush=True)
accelerator.end_training()
"""
TRAIN = """
import socket, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.arange(32.0).reshape(8, 4) / 32, batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    loss = (model(batch) - 1).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
weights = accelerator.gather(torch.cat([p.detach().flatten() for p in model.parameters()]).unsqueeze(0))
same = bool((weights == weights[0]).all())
summary = ("trained", socket.gethostname(), accelerator.process_index, accelerator.num_processes, same)
print(" ".join(map(str, summary)) + "\\n", end="", flush=True)  # one write: two processes share the output
accelerator.end_training()
"""


def need(*programs: str) -> None:
    """Skip where a program is not installed."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Hosts:
    """Two hosts, `nodea` (10.78.0.1) and `nodeb` (10.78.0.2), and a folder that both see."""

    addresses = ("10.78.0.1", "10.78.0.2")
    names = ("nodea", "nodeb")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spaces = tuple(f"acc{os.getpid()}{letter}" for letter in "ab")
        self._domain = ""
        self._started: list[subprocess.Popen[str]] = []

    def rename(self, first: str, second: str, domain: str) -> None:
        """Give both hosts the names of pods; the names have addresses from `publish` on."""
        self.names = (first, second)
        self._write_tables("")
        self._domain = domain

    def publish(self) -> None:
        """Give the names of pods addresses, as the DNS of a cluster does when a pod is started."""
        self._write_tables(
            "".join(
                f"{address} {name} {name}.{self._domain}\n"
                for address, name in zip(self.addresses, self.names, strict=True)
            )
        )

    def _write_tables(self, lines: str) -> None:
        for space in self.spaces:
            (Path("/etc/netns", space) / "hosts").write_text(f"127.0.0.1 localhost\n{lines}")

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def inside(self, host: int, words: Sequence[str]) -> list[str]:
        """The command line that runs a command on a host."""
        named = f'hostname {self.names[host]}; exec "$@"'
        return ["ip", "netns", "exec", self.spaces[host], "unshare", "-u", "sh", "-c", named, "sh", *words]

    def start(self, host: int, *words: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.inside(host, words),
            env={**os.environ, **variables},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, host: int, *words: str, **variables: str) -> Ended:
        return self.end(self.start(host, *words, **variables))

    def end(self, process: subprocess.Popen[str]) -> Ended:
        out, err = process.communicate(timeout=SECONDS)
        return Ended(process.returncode, out, err)

    def write_remote_shell(self) -> str:
        """A program that is called like ssh, and runs the command on that host."""
        cases = "\n".join(
            f'  {name}|{address}) exec ip netns exec {space} unshare -u sh -c "hostname {name}; $*" ;;'
            for name, address, space in zip(self.names, self.addresses, self.spaces, strict=True)
        )
        skip = 'while [ "${1#-}" != "$1" ]; do shift; done'
        path = self.folder / "remote_shell"
        path.write_text(f'#!/bin/sh\n{skip}\nhost=$1; shift\ncase "$host" in\n{cases}\nesac\nexit 9\n')
        path.chmod(0o755)
        return str(path)

    def set_up(self) -> None:
        for space in self.spaces:
            folder = Path("/etc/netns", space)
            folder.mkdir(parents=True)
            (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # it refuses at once
            ip("netns", "add", space)
        self._write_tables(
            "".join(f"{address} {name}\n" for address, name in zip(self.addresses, self.names, strict=True))
        )
        ends = [f"{space}v" for space in self.spaces]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for space, end, address in zip(self.spaces, ends, self.addresses, strict=True):
            ip("link", "set", end, "netns", space)
            ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", end, "up")

    def tear_down(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns", space), ignore_errors=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts, for as long as the test runs."""
    need("ip", "unshare")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    made = Hosts(tmp_path)
    try:
        made.set_up()
        yield made
    finally:
        made.tear_down()
