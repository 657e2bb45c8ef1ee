"""What a plan is made of."""

from __future__ import annotations

from argparse import Namespace

import pytest

from accelerate.base.errors import ConfigurationError
from accelerate.launch.plan import LaunchPlan, Rendezvous, Target
from accelerate.settings.sections.rendezvous import RendezvousSection


def command_line(**given: bool) -> Namespace:
    flags = {"module": False, "no_python": False, **given}
    return Namespace(**flags, training_script="train", training_script_args=["--lr", "1"])


def test_what_runs_is_a_script_a_module_or_a_program() -> None:
    assert Target.of(command_line()) == Target("script", "train", ("--lr", "1"))
    assert Target.of(command_line(module=True)) == Target("module", "train", ("--lr", "1"))
    assert Target.of(command_line(no_python=True)) == Target("program", "train", ("--lr", "1"))
    with pytest.raises(ConfigurationError, match="exclude each other"):
        Target.of(command_line(module=True, no_python=True))


def test_processes_meet_as_the_settings_say() -> None:
    wanted = RendezvousSection(
        rdzv_backend="c10d",
        main_process_ip="10.0.0.1",
        rdzv_conf="timeout=3",
        max_restarts=2,
        monitor_interval=0.5,
        role="trainer",
        tee="3",
        log_dir="logs",
    )
    assert Rendezvous.of(wanted, 3000) == Rendezvous(
        "c10d", "10.0.0.1", 3000, "timeout=3", 2, 0.5, "trainer", "3", "logs"
    )
    assert Rendezvous.of(RendezvousSection(), 3000).address == "127.0.0.1"


def test_details_are_those_of_the_launcher_that_made_the_plan() -> None:
    plan = LaunchPlan("mine", Target("script", "train"), details="details")
    assert plan.detail(str) == "details"
    with pytest.raises(TypeError, match="a plan of the mine launcher holds no int"):
        plan.detail(int)
