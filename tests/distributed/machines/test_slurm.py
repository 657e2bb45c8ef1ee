"""Real SLURM: a controller and two nodes on this host."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .conftest import LAUNCH, REDUCE, SECONDS, Ended, need

pytestmark = pytest.mark.slow
DAEMONS = ("slurmctld", "slurmd", "munged")
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldPort={port}
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs=2 RealMemory=500
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Daemons of SLURM in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def set_up(self) -> None:
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        port = free_ports(3)
        text = CONFIGURATION.format(
            host=socket.gethostname().split(".")[0],
            folder=self.folder,
            port=port,
            first=port + 1,
            second=port + 2,
        )
        (self.folder / "slurm.conf").write_text(text)
        place = {name: f"--{name}={self.folder}/munge.{name}" for name in ("socket", "pid-file", "log-file")}
        seed = f"--seed-file={self.folder}/munge.seed"
        self._start("munged", "--foreground", "--force", f"--key-file={key}", seed, *place.values())
        self._start("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        for node in ("n1", "n2"):
            self._start("slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", node)
        self._wait_until_idle()

    def _start(self, *words: str) -> None:
        log = (self.folder / f"{words[0]}.out").open("ab")
        with log:
            self._daemons.append(subprocess.Popen(words, env=self.variables, stdout=log, stderr=log))

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self.run("sinfo", "-h", "-o", "%T %D").out.strip() == "idle 2":
                return
            time.sleep(0.2)
        logs = "\n".join(path.read_text() for path in self.folder.glob("*.log"))
        pytest.fail(f"the nodes of SLURM did not come up:\n{logs[-3000:]}")

    def run(self, *words: str) -> Ended:
        ended = subprocess.run(
            words,
            env=self.variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def tear_down(self) -> None:
        self.run("scancel", "--full", "--user=root")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def free_ports(count: int) -> int:
    """The first of several ports in a row that no process listens on."""
    busy = {each.laddr.port for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    start = range(17000, 19000, count)
    return next(port for port in start if not busy & set(range(port, port + count)))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes of SLURM, for as long as the test runs."""
    need(*DAEMONS, "srun", "sbatch", "salloc")
    if os.geteuid() != 0:
        pytest.skip("the daemons of SLURM need root")
    made = Cluster(tmp_path)
    try:
        made.set_up()
        yield made
    finally:
        made.tear_down()


ADDRESS = ("--main_process_ip", "127.0.0.1")
"""The two nodes are this host, whose name for each of them means nothing to the network."""


def test_the_machines_of_an_allocation_work_together(cluster: Cluster) -> None:
    (cluster.folder / "script.py").write_text(REDUCE)
    ended = cluster.run("salloc", "-N", "2", *LAUNCH, "--slurm", "--cpu", *ADDRESS, "script.py")
    assert ended.code == 0, ended
    assert sorted(line.split(" ", 2)[2] for line in ended.out.splitlines()) == ["0 2 3.0", "1 2 3.0"]
    (cluster.folder / "script.py").write_text("raise SystemExit(5)")
    ended = cluster.run("salloc", "-N", "2", *LAUNCH, "-q", "--slurm", "--cpu", *ADDRESS, "script.py")
    assert ended.code == 5, ended


def test_a_submitted_job_runs_in_its_own_allocation(cluster: Cluster) -> None:
    (cluster.folder / "script.py").write_text(REDUCE)
    words = ("--slurm", "--submit", "--num_machines", "2", "--cpu", *ADDRESS, "--slurm_options=--wait")
    ended = cluster.run(*LAUNCH, *words, "script.py")
    assert ended.code == 0, ended
    said = re.fullmatch(r"Submitted (.*)/script.sbatch as job (\d+)\.\n", ended.out)
    assert said is not None, ended
    assert Path(said[1]) == cluster.folder.resolve()
    text = (cluster.folder / f"script-{said[2]}.out").read_text()
    assert sorted(re.findall(r"reduced \S+ (.*)", text)) == ["0 2 3.0", "1 2 3.0"]


def test_an_interrupt_ends_the_step_on_all_machines(cluster: Cluster) -> None:
    (cluster.folder / "script.py").write_text(
        "import os, time\nopen(f'pid-{os.getpid()}', 'w').close()\ntime.sleep(100)"
    )
    launcher = subprocess.Popen(
        ["salloc", "-N", "2", *LAUNCH, "-q", "--slurm", "--cpu", *ADDRESS, "script.py"],
        env=cluster.variables,
        cwd=cluster.folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + SECONDS
        while len(pids := list(cluster.folder.glob("pid-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(pids) == 2
        (inner,) = psutil.Process(launcher.pid).children()
        inner.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
        launcher.wait()
    assert "SIGINT ended all processes" in err
    assert not [path for path in pids if psutil.pid_exists(int(path.name.removeprefix("pid-")))]
