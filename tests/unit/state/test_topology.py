"""The facts under the names that others read."""

from dataclasses import FrozenInstanceError

import pytest

from accelerate.state import Topology


def test_variables_of_one_among_several() -> None:
    topology = Topology(3, 4, 1, 2, 1, "n0", 29500, "openmpi")
    assert topology.variables() == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n0",
        "MASTER_PORT": "29500",
    }


def test_a_single_process_sets_no_variables() -> None:
    assert Topology().variables() == {}


def test_topologies_are_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        Topology().rank = 1  # type: ignore[misc]
