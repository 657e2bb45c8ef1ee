"""Parsing the variables of SLURM."""

import pytest

from accelerate.base import ConfigurationError, slurm


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("login1", "login1"),
        ("gpu01,gpu02", "gpu01"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("rack[1-2]node[08-10]", "rack1node08"),
        ("a-b[001-128].cluster.org", "a-b001.cluster.org"),
    ],
)
def test_the_first_host_of_a_node_list_is_expanded(node_list: str, host: str) -> None:
    assert slurm.first_host(node_list) == host


@pytest.mark.parametrize(
    "node_list", ["", "gpu[01", ",gpu1", "[" * 10**5, "[" + "a" * 10**5], ids=lambda text: text[:9]
)
def test_first_host_of_an_invalid_list_is_an_error(node_list: str) -> None:
    with pytest.raises(ConfigurationError, match="names no host"):
        slurm.first_host(node_list)


@pytest.mark.parametrize(
    ("text", "node", "tasks"),
    [("4", 0, 4), ("2(x3),1", 0, 2), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("1,3", 1, 3)],
)
def test_tasks_on_node(text: str, node: int, tasks: int) -> None:
    assert slurm.tasks_on_node(text, node) == tasks


@pytest.mark.parametrize(("text", "node"), [("2(x3),1", 4), ("two", 0), ("2,", 0), ("1(x999999999)", 10**9)])
def test_tasks_on_a_missing_node_are_refused(text: str, node: int) -> None:
    with pytest.raises(ConfigurationError, match=f"node {node}"):
        slurm.tasks_on_node(text, node)


def test_only_srun_starts_steps() -> None:
    assert slurm.is_step_of_tasks({"SLURM_STEP_ID": "0"})
    assert not slurm.is_step_of_tasks({"SLURM_JOB_ID": "17"})
    assert not slurm.is_step_of_tasks({"SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "40000"})


def test_port_follows_from_job_and_step() -> None:
    first = slurm.port_of_step({"SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "0"})
    second = slurm.port_of_step({"SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "1"})
    assert first == slurm.FIRST_PORT + 1234567 % slurm.PORTS
    assert second == first + 1
    assert slurm.port_of_step({}) == slurm.FIRST_PORT
