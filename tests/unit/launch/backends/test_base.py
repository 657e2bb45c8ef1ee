from __future__ import annotations

import pytest

from accelerate.launch import LaunchPlan, Target
from accelerate.launch.backends import Launcher, launcher_for
from accelerate.launch.backends.base import LAUNCHERS

TARGET = Target("script", "a.py")


@pytest.mark.parametrize("name", sorted(LAUNCHERS))
def test_each_launcher_can_be_loaded(name: str) -> None:
    assert isinstance(launcher_for(LaunchPlan(name, TARGET)), Launcher)


def test_a_plan_of_another_launcher_is_refused() -> None:
    with pytest.raises(TypeError, match="a plan of the mpi launcher holds no int"):
        LaunchPlan("mpi", TARGET).detail(int)
