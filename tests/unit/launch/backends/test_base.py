from __future__ import annotations

import pytest

from accelerate.base.errors import ConfigurationError
from accelerate.launch.backends.base import LAUNCHERS, MISSING, launcher_for
from accelerate.launch.plan import LaunchPlan, Target

TARGET = Target("script", "a.py")


@pytest.mark.parametrize("name", sorted(LAUNCHERS))
def test_each_launcher_can_be_loaded(name: str) -> None:
    assert callable(launcher_for(LaunchPlan(name, TARGET)).run)


@pytest.mark.parametrize("name", sorted(MISSING))
def test_a_launcher_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match="This version cannot launch on"):
        launcher_for(LaunchPlan(name, TARGET))
