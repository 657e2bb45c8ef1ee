"""One table of environments, and the rank that each describes."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from accelerate.base import ConfigurationError, current, detached_environment, patch_environment
from accelerate.devices import hardware_table
from accelerate.state import CPUInformation, Topology, environments, get_cpu_distributed_information

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "n0",
}
SLURM = {
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
SAGEMAKER = {
    "ACCELERATE_USE_SAGEMAKER": "true",
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL",
    "SM_HOSTS": '["algo-1", "algo-2"]',
    "OMPI_COMM_WORLD_RANK": "9",
    "OMPI_COMM_WORLD_SIZE": "16",
    "SMDATAPARALLEL_LOCAL_RANK": "1",
    "SM_NUM_GPUS": "8",
}


@pytest.mark.parametrize(
    ("environ", "topology"),
    [
        ({}, Topology()),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}, Topology()),
        ({"WORLD_SIZE": "1"}, Topology()),
        (TORCHRUN, Topology(5, 8, 1, 4, 1, "10.0.0.1", 1234, "torchrun")),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, Topology(started_by="torchrun")),
        # On one machine much may be left out.
        ({"RANK": "1", "WORLD_SIZE": "2"}, Topology(1, 2, 1, 2, 0, "127.0.0.1", 29500, "torchrun")),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "-1", "MASTER_ADDR": "localhost"},
            Topology(1, 2, 1, 2, 0, "localhost", 29500, "torchrun"),
        ),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "n0"},
            Topology(5, 8, 1, 4, 1, "n0", 29500, "torchrun"),
        ),
        # A launcher of notebooks tells neither the size of the machine nor its index.
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1", "MASTER_ADDR": "n0"},
            Topology(3, 4, 1, 2, 1, "n0", 29500, "torchrun"),
        ),
        (OPEN_MPI, Topology(3, 4, 1, 2, 1, "n0", 29500, "openmpi")),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            Topology(1, 2, 1, 2, 0, "127.0.0.1", 29500, "pmi"),
        ),
        (
            {
                "MV2_COMM_WORLD_RANK": "2",
                "MV2_COMM_WORLD_SIZE": "3",
                "MV2_COMM_WORLD_LOCAL_RANK": "2",
                "MV2_COMM_WORLD_LOCAL_SIZE": "3",
                "MASTER_PORT": "77",
            },
            Topology(2, 3, 2, 3, 0, "127.0.0.1", 77, "mvapich"),
        ),
        (SLURM, Topology(4, 5, 0, 1, 1, "gpu07", 12102, "slurm")),
        (SLURM | {"MASTER_ADDR": "x", "MASTER_PORT": "9"}, Topology(4, 5, 0, 1, 1, "x", 9, "slurm")),
        # srun with PMI: SLURM knows more.
        (SLURM | {"PMI_RANK": "4", "PMI_SIZE": "5"}, Topology(4, 5, 0, 1, 1, "gpu07", 12102, "slurm")),
        # torchrun inside a task of srun, and mpirun inside an allocation.
        (SLURM | TORCHRUN, Topology(5, 8, 1, 4, 1, "10.0.0.1", 1234, "torchrun")),
        (SLURM | OPEN_MPI, Topology(3, 4, 1, 2, 1, "n0", 29500, "openmpi")),
        # One task, a batch script, an interactive shell: no launcher started several processes.
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, Topology()),
        ({**SLURM, "SLURM_STEP_ID": ""}, Topology()),
        (SLURM | {"SLURM_PTY_PORT": "40000"}, Topology()),
        (SAGEMAKER, Topology(9, 16, 1, 8, 1, "algo-1", 29500, "sagemaker")),
        # One process for each pod: the ranks have to exchange host names.
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"},
            Topology(1, 2, 0, 1, 1, "job-master-0", 23456, "torchrun", needs_hosts=True),
        ),
        # An ordinary job on SageMaker is read as Open MPI.
        (
            SAGEMAKER | {"ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "NO", "MASTER_ADDR": "algo-1"},
            Topology(9, 16, 0, 1, 9, "algo-1", 29500, "openmpi", needs_hosts=True),
        ),
    ],
)
def test_detect(environ: dict[str, str], topology: Topology) -> None:
    assert environments.detect(environ) == topology


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: with WORLD_SIZE=2 it must be 0 to 1"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one': not a whole number"),
        ({"RANK": "-3", "WORLD_SIZE": "2"}, "RANK=-3: a negative number"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0: at least one process"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2: RANK is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"RANK": "1"}, "RANK=1: WORLD_SIZE is not set"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4: with LOCAL_WORLD_SIZE=4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9: more processes on this node"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999: there is no such port"),
        (TORCHRUN | {"MASTER_ADDR": "5"}, "MASTER_ADDR='5': a number is no address of a node"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR=None: the run has 8 processes on several nodes"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            "MASTER_ADDR=None: the run has 2 processes on several nodes",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "n0"}, "RANK=2: with WORLD_SIZE=2"),
        ({**OPEN_MPI, "MASTER_ADDR": ""}, "MASTER_ADDR=None: the run has 4 processes on several nodes"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "5"}, "SLURM_STEP_TASKS_PER_NODE='5'"),
        (
            {"ACCELERATE_USE_SAGEMAKER": "1", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL"},
            "ACCELERATE_USE_SAGEMAKER asks for a data-parallel job",
        ),
    ],
)
def test_contradictions_are_named(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        environments.detect(environ)
    assert text in str(error.value)


def test_the_topology_is_that_of_the_xla_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(
        global_ordinal=lambda: 6,
        world_size=lambda: 8,
        local_ordinal=lambda: 2,
        local_device_count=lambda: 4,
        host_index=lambda: 1,
    )
    monkeypatch.setattr(type(hardware_table.XLA), "installed", lambda row: True)
    monkeypatch.setattr(hardware_table, "detect", lambda: hardware_table.XLA)
    monkeypatch.setattr(environments, "import_module", {"torch_xla.runtime": runtime}.__getitem__)
    assert environments.detect({}) == Topology(6, 8, 2, 4, 1, started_by="xla")
    assert environments.detect({"ACCELERATE_USE_CPU": "true"}) == Topology()
    monkeypatch.setattr(hardware_table, "detect", lambda: hardware_table.CUDA)
    assert environments.detect({}) == Topology()


def test_get_cpu_distributed_information() -> None:
    assert get_cpu_distributed_information() == CPUInformation()
    with patch_environment(**TORCHRUN):
        assert get_cpu_distributed_information() == CPUInformation(5, 8, 1, 4)


@pytest.mark.parametrize(("answer", "local"), [("127.0.1.1", (1, 2)), ("10.0.0.7", (0, 1)), (None, (0, 1))])
def test_without_a_group_the_address_of_rank_0_decides_whether_it_is_this_machine(
    answer: str | None, local: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(name: str) -> str:
        if answer is None:
            raise socket.gaierror(name)
        return answer

    monkeypatch.setattr(environments.socket, "gethostbyname", resolve)
    with patch_environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="job-master-0"):
        assert get_cpu_distributed_information() == CPUInformation(1, 2, *local)


@pytest.mark.parametrize(
    ("environ", "topology"),
    [
        (TORCHRUN, Topology(5, 8, 1, 4, 1, "10.0.0.1", 1234, "torchrun")),
        ({"WORLD_SIZE": "8"}, Topology(5, 8, 5, 8, 0, "127.0.0.1", 29500, "process group")),
        ({}, Topology(5, 8, 5, 8, 0, "127.0.0.1", 29500, "process group")),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "n0"},
            Topology(5, 8, 1, 4, 1, "n0", 29500, "process group"),
        ),
    ],
)
def test_rank_and_size_are_those_of_an_open_group(environ: dict[str, str], topology: Topology) -> None:
    assert environments.detect_in_group(environ, 5, 8) == topology


@pytest.mark.parametrize(
    "text", ["[" * 5000, "algo-1", "[1]", "{}", "null"], ids=["deep", "word", "number", "object", "null"]
)
def test_hosts_that_are_no_list_are_refused(text: str) -> None:
    variables = {"ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL"}
    with pytest.raises(ConfigurationError, match="^SM_HOSTS="):
        environments.detect({**variables, "SM_HOSTS": text})


@pytest.mark.parametrize(
    "text",
    ["x", "9" * 400, "9" * 5000, "1e999", "\u00b2"],
    ids=lambda text: text[:9] if text.isascii() else "superscript",
)
def test_invalid_numbers_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigurationError, match="^RANK="):
        environments.detect({"RANK": text, "WORLD_SIZE": "2"})


def test_flags_that_are_neither_true_nor_false_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="^ACCELERATE_USE_SAGEMAKER='perhaps'"):
        environments.detect({"ACCELERATE_USE_SAGEMAKER": "perhaps"})


@pytest.mark.parametrize(
    "launch", [TORCHRUN, OPEN_MPI, SLURM, SAGEMAKER], ids=["torchrun", "mpi", "slurm", "aws"]
)
def test_a_detached_environment_describes_a_single_process(launch: dict[str, str]) -> None:
    with patch_environment(**launch):
        assert environments.detect(current()).size > 1
        with detached_environment() as detached:
            assert environments.detect(detached) == environments.detect(current()) == Topology()
        assert environments.detect(current()).size > 1
