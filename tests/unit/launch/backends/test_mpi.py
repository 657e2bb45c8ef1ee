from __future__ import annotations

import sys
from typing import Any

import pytest

from accelerate.base import ConfigurationError
from accelerate.launch import LaunchPlan, Machine, Target, resolve_plan
from accelerate.launch.backends import launcher_for
from accelerate.launch.backends.hostfile import dialect_of, hosts_of
from accelerate.settings import FLAG, Layer, merge_layers

VERSIONS = {
    "Open MPI": "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n",
    "MPICH": "HYDRA build details:\n    Version:                                 4.0.2\n"
    "    Configure options: '--prefix=/usr'\n",
    "Intel MPI": "Intel(R) MPI Library for Linux* OS, Version 2021.19 Build 20260101\n",
    "MVAPICH": "HYDRA build details:\n    Version: 3.3.2\n    Configure options: '--prefix=/opt/mvapich2'\n",
}


def made(
    version: str,
    *,
    hosts: str = "first slots=2\nsecond slots=2\n",
    root: bool = False,
    environ: dict[str, str] | None = None,
    **more: Any,
) -> LaunchPlan:
    machine = Machine(
        cores=8,
        environ=environ or {},
        port_in_use=lambda port: False,
        mpi_version=lambda: version,
        read_file=lambda path: hosts,
        is_root=root,
    )
    flags = {"cpu": True, "mpirun_hostfile": "hosts", "num_processes": 4, "main_process_port": 5, **more}
    plan, _ = resolve_plan(merge_layers(Layer(FLAG, flags)), machine, Target("script", "a.py", ("--lr", "1")))
    return plan


def words(plan: LaunchPlan) -> list[str]:
    return launcher_for(plan).command(plan)


@pytest.mark.parametrize("name", sorted(VERSIONS))
def test_each_kind_of_mpirun_is_recognised(name: str) -> None:
    assert dialect_of(VERSIONS[name]).name == name


def test_an_unknown_mpirun_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="mpirun --version says 'other 1'. Use an mpirun of Intel"):
        dialect_of("other 1\nmore")


def test_host_files_of_all_kinds_are_read() -> None:
    assert hosts_of("# mine\na slots=4\n\nb:2 # two\n  c\na slots=1\n") == ["a", "b", "c"]
    assert hosts_of("2001:db8::1 slots=4\n::1\n") == ["2001:db8::1", "::1"]


HEADS = {
    "Open MPI": "mpirun --hostfile hosts -n 4 --map-by ppr:2:node --bind-to none",
    "MPICH": "mpirun -f hosts -n 4 -ppn 2 -bind-to none",
    "Intel MPI": "mpirun -f hosts -n 4 -ppn 2",
    "MVAPICH": "mpirun -f hosts -n 4 -ppn 2 -genv MV2_ENABLE_AFFINITY 0",
}


@pytest.mark.parametrize("name", sorted(HEADS))
def test_each_dialect_has_its_command(name: str) -> None:
    plan = made(VERSIONS[name], environ={"PYTHONPATH": "/mine"}, dynamo_backend="eager")
    written = words(plan)
    head = HEADS[name].split()
    assert written[: len(head)] == head
    assert written[-4:] == [sys.executable, "a.py", "--lr", "1"]
    handed = written[len(head) : -4]
    if name == "Open MPI":
        assert handed[::2] == ["-x"] * (len(handed) // 2)
        pairs = dict(pair.split("=", 1) for pair in handed[1::2])
    else:
        assert handed[::3] == ["-genv"] * (len(handed) // 3)
        pairs = dict(zip(handed[1::3], handed[2::3], strict=True))
    assert pairs == {**plan.environment, "MASTER_ADDR": "first", "MASTER_PORT": "5", "PYTHONPATH": "/mine"}
    assert pairs["OMP_NUM_THREADS"] == "4"


def test_open_mpi_run_by_root_gets_allow_run_as_root() -> None:
    assert words(made(VERSIONS["Open MPI"], root=True))[1] == "--allow-run-as-root"
    assert "--allow-run-as-root" not in words(made(VERSIONS["MPICH"], root=True))


def test_machines_and_address_are_those_of_the_host_file() -> None:
    plan = made(VERSIONS["MPICH"])
    assert (plan.machines, plan.address) == (2, "first")
    assert made(VERSIONS["MPICH"], main_process_ip="10.0.0.1").address == "10.0.0.1"
    assert made(VERSIONS["MPICH"], hosts="localhost\n").address == "127.0.0.1"


def test_threads_of_oneccl_are_handed_on() -> None:
    layer = Layer("c.yaml", {"mpirun_hostfile": "hosts", "mpirun_ccl": 2})
    machine = Machine(mpi_version=lambda: VERSIONS["Intel MPI"], read_file=lambda path: "localhost")
    plan, _ = resolve_plan(merge_layers(layer), machine, Target("script", "a.py"))
    assert " ".join(words(plan)).count("-genv CCL_WORKER_COUNT 2") == 1


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ("# none\n", "--mpirun_hostfile='hosts': it names no host"),
        ("localhost\nsecond\n", "the first host of hosts is localhost. Pass the address by which"),
    ],
)
def test_host_files_that_cannot_work_are_refused(hosts: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        made(VERSIONS["MPICH"], hosts=hosts)
    assert problem in str(caught.value)
