"""Real mpirun: Open MPI and MPICH, on this host and on two."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .conftest import LAUNCH, REDUCE, SECONDS, TRAIN, Ended, Hosts, need

pytestmark = pytest.mark.slow
KINDS = ("openmpi", "mpich")
LINES = {"openmpi": "{} slots={}\n", "mpich": "{}:{}\n"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """One kind of mpirun, which is put first on the search path."""
    name: str = request.param
    need(f"mpirun.{name}")
    program = tmp_path / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec mpirun.{name} "$@"\n')
    program.chmod(0o755)
    return name


def search_path(folder: Path) -> str:
    return f"{folder / 'bin'}:{os.environ['PATH']}"


def launch(folder: Path, *words: str) -> Ended:
    ended = subprocess.run(
        [*LAUNCH, "--cpu", *words],
        env={**os.environ, "PATH": search_path(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def test_processes_of_this_host_find_each_other(kind: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(LINES[kind].format("localhost", 2))
    (tmp_path / "script.py").write_text(REDUCE)
    ended = launch(tmp_path, "--mpirun_hostfile", "hosts", "--num_processes", "2", "script.py")
    assert ended.code == 0, ended
    lines = sorted(line.split(" ", 2)[2] for line in ended.out.splitlines())
    assert lines == ["0 2 3.0", "1 2 3.0"]


def test_the_exit_code_is_that_of_the_script(kind: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(LINES[kind].format("localhost", 2))
    (tmp_path / "script.py").write_text("raise SystemExit(5)")
    ended = launch(tmp_path, "--mpirun_hostfile", "hosts", "--num_processes", "2", "script.py")
    assert ended.code == 5, ended
    assert "Traceback" not in ended.err


def test_two_hosts_train_together(kind: str, hosts: Hosts) -> None:
    hosts.write("hosts", "".join(LINES[kind].format(name, 1) for name in hosts.names))
    script = hosts.write("train.py", TRAIN)
    shell = hosts.write_remote_shell()
    ended = hosts.run(
        0,
        *(*LAUNCH, "--cpu", "--mpirun_hostfile", "hosts", "--num_processes", "2", script),
        PATH=search_path(hosts.folder),
        OMPI_MCA_plm_rsh_agent=shell,
        HYDRA_LAUNCHER="ssh",
        HYDRA_LAUNCHER_EXEC=shell,
    )
    assert ended.code == 0, ended
    assert sorted(ended.out.splitlines()) == ["trained nodea 0 2 True", "trained nodeb 1 2 True"]
