from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from accelerate.base import LaunchError
from accelerate.launch import LaunchPlan, Target
from accelerate.launch.backends import ATTEMPTS, ElasticLauncher, Ranks, elastic

PLAN = LaunchPlan("elastic", Target("script", "a.py"), processes=2)
TAKEN = DistNetworkError("The server socket has failed to listen. name: EADDRINUSE")


class Agent:
    """Stands in for torch's agent: fails as told, then succeeds, and remembers the ports."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.ports: list[int] = []

    def __call__(self, plan: LaunchPlan, ranks: Ranks) -> int:
        self.ports.append(plan.rendezvous.port)
        if self.errors:
            raise self.errors.pop(0)
        return 7


def test_a_port_that_was_taken_meanwhile_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(TAKEN)
    monkeypatch.setattr(elastic, "_run_agent", agent)
    assert ElasticLauncher().run(PLAN) == 7
    first, second = agent.ports
    assert first == 29500
    assert second != first


@pytest.mark.parametrize(
    ("plan", "errors", "attempts"),
    [
        (replace(PLAN, machines=2), [TAKEN], 1),
        (PLAN, [TAKEN] * ATTEMPTS, ATTEMPTS),
        (PLAN, [DistStoreError("timed out after 5 seconds")], 1),
    ],
)
def test_processes_that_do_not_meet_are_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, plan: LaunchPlan, errors: list[Exception], attempts: int
) -> None:
    agent = Agent(*errors)
    monkeypatch.setattr(elastic, "_run_agent", agent)
    with pytest.raises(LaunchError, match="The processes did not meet at 127.0.0.1:"):
        ElasticLauncher().run(plan)
    assert len(agent.ports) == attempts


@pytest.mark.parametrize(
    ("number", "step", "code"),
    [(signal.SIGTERM, None, 143), (signal.SIGINT, "0", 130), (signal.SIGTERM, "0", 1)],
)
def test_a_signal_of_srun_does_not_hide_the_code_of_the_task_that_failed(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, step: str | None, code: int
) -> None:
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    if step is not None:
        monkeypatch.setenv("SLURM_STEP_ID", step)
    assert elastic._code_after(number) == code


def test_an_interrupt_before_the_agent_runs_ends_the_launcher_where_it_was_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the background of a shell; the agent, when it runs, has a handler of its own."""
    monkeypatch.setattr(elastic, "_run_agent", lambda plan, ranks: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            ElasticLauncher().run(PLAN)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
