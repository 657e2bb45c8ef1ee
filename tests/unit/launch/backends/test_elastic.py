"""The processes of this machine: one child, or those of torch's elastic agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from torch.distributed import DistNetworkError, DistStoreError

from accelerate.base import ConfigurationError, LaunchError
from accelerate.launch import GRACE_VARIABLE, Failure, LaunchPlan, Target
from accelerate.launch.backends import elastic
from accelerate.launch.backends.elastic import ATTEMPTS, ElasticLauncher, LocalLauncher, Ranks
from accelerate.launch.children import FORWARDED, REQUESTS, exit_code

PLAN = LaunchPlan("elastic", Target("script", "a.py"), processes=2)
OTHER = json.JSONDecodeError("Expecting value", "", 0)  # the value of another program
TAKEN = DistNetworkError("The server socket has failed to listen. name: EADDRINUSE")


class Agent:
    """Replaces torch's agent: fails as often as asked, then succeeds, and records the ports."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.ports: list[int] = []

    def __call__(self, plan: LaunchPlan, ranks: Ranks) -> int:
        self.ports.append(plan.port)
        if self.errors:
            raise self.errors.pop(0)
        return 7


@pytest.mark.parametrize("error", [TAKEN, OTHER])
def test_a_port_that_is_in_use_is_replaced(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    agent = Agent(error)
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
        (PLAN, [OTHER] * ATTEMPTS, ATTEMPTS),
        (replace(PLAN, machines=2), [OTHER], 1),
    ],
)
def test_a_failed_rendezvous_is_one_error(
    monkeypatch: pytest.MonkeyPatch, plan: LaunchPlan, errors: list[Exception], attempts: int
) -> None:
    agent = Agent(*errors)
    monkeypatch.setattr(elastic, "_run_agent", agent)
    with pytest.raises(LaunchError, match="The rendezvous at 127.0.0.1:"):
        ElasticLauncher().run(plan)
    assert len(agent.ports) == attempts


def test_a_store_with_values_of_another_program_is_no_error_of_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(arguments: object) -> None:
        raise OTHER

    monkeypatch.setattr("torch.distributed.run.run", fail)
    with pytest.raises(LaunchError, match="values that are not those of this launch"):
        ElasticLauncher().run(PLAN)


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


def run(code: str, **environment: str) -> int:
    return LocalLauncher().run(
        LaunchPlan("local", Target("program", sys.executable, ("-c", code)), environment=environment)
    )


@pytest.mark.parametrize("code", [0, 1, 7])
def test_the_exit_code_is_that_of_the_script(code: int) -> None:
    assert run(f"raise SystemExit({code})") == code


def test_the_environment_is_added(tmp_path: Path) -> None:
    assert run("import os; raise SystemExit(int(os.environ['SAMPLE']))", SAMPLE="5") == 5


def test_a_script_that_a_signal_ends_has_the_exit_code_of_a_shell() -> None:
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)") == 137
    assert exit_code(-15) == 143
    assert exit_code(3) == 3


def test_signals_are_forwarded_and_handlers_put_back() -> None:
    before = {number: signal.getsignal(number) for number in FORWARDED}
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    assert run(code) == 143
    assert {number: signal.getsignal(number) for number in FORWARDED} == before


def test_another_thread_can_launch_too() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run("raise SystemExit(3)")))
    thread.start()
    thread.join()
    assert codes == [3]


def test_a_missing_program_is_named() -> None:
    plan = LaunchPlan("local", Target("program", "/nowhere/program"))
    with pytest.raises(ConfigurationError, match="/nowhere/program cannot be started: No such file"):
        LocalLauncher().run(plan)


SLEEP = "import time; time.sleep(60)"
IGNORES = "import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); " + SLEEP
CAUSE = Failure.of(ValueError("mine"), {"RANK": "1"})
LOST = replace(CAUSE, rank=0, headline="RuntimeError: gloo: Connection closed by peer")


class Handle:
    """What torch holds of a process; it leads a group of its own."""

    def __init__(self, code: str) -> None:
        command = [sys.executable, "-c", code]
        self.proc = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)

    def close(self, death_sig: signal.Signals) -> None:
        os.killpg(self.proc.pid, death_sig)


class Context:
    """Replaces the class of torch: ranks 4, 5 ... of a machine that is not the first."""

    def __init__(self, codes: list[str], attempt: int = 0) -> None:
        self.codes = codes
        self.subprocess_handlers: dict[int, Handle] = {}
        self.envs = {
            at: {"RANK": str(at + 4), "TORCHELASTIC_RESTART_COUNT": str(attempt)} for at in range(len(codes))
        }

    def start(self) -> None:
        self.subprocess_handlers = {at: Handle(code) for at, code in enumerate(self.codes)}

    def wait(self, at: int) -> int:
        return self.subprocess_handlers[at].proc.wait(timeout=20)


@pytest.fixture
def started() -> Iterator[Callable[..., Context]]:
    contexts: list[Context] = []

    def start(ranks: Ranks, *codes: str, attempt: int = 0) -> Context:
        contexts.append(Context(list(codes), attempt))
        ranks.start(contexts[-1], contexts[-1].start)
        return contexts[-1]

    yield start
    for handle in (each for context in contexts for each in context.subprocess_handlers.values()):
        handle.proc.kill()
        handle.proc.wait()
        assert handle.proc.stdout is not None
        handle.proc.stdout.close()


Start = Callable[..., Context]


def test_a_request_reaches_all_ranks(started: Start) -> None:
    ranks = Ranks(None)
    context = started(ranks, SLEEP, SLEEP)
    ranks.on_request(signal.SIGUSR1, None)
    assert [context.wait(at) for at in (0, 1)] == [-signal.SIGUSR1] * 2


def test_a_request_before_the_start_waits_for_it(started: Start, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(None)
    ranks.on_request(signal.SIGUSR2, None)
    assert "SIGUSR2 received: no process runs now" in capfd.readouterr().err
    context = started(ranks, SLEEP, SLEEP)
    assert [context.wait(at) for at in (0, 1)] == [-signal.SIGUSR2] * 2
    assert "SIGUSR2 received and passed on to 2 processes." in capfd.readouterr().err


def test_a_request_while_the_ranks_end_is_for_those_that_are_started_again(started: Start) -> None:
    ranks = Ranks(None)
    started(ranks, SLEEP)
    ranks.end(signal.SIGTERM)
    ranks.on_request(signal.SIGUSR1, None)
    again = started(ranks, SLEEP, attempt=1)
    assert again.wait(0) == -signal.SIGUSR1
    assert ranks.exits().attempt == 1


def test_ranks_of_the_entry_start_with_requests_blocked(started: Start, tmp_path: Path) -> None:
    asks = "import signal; raise SystemExit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    assert started(Ranks(tmp_path), asks).wait(0) == len(REQUESTS)
    assert started(Ranks(None), asks).wait(0) == 0


def stop(context: Context, at: int) -> psutil.Process:
    """Stop a process, and return when it is."""
    process = psutil.Process(context.subprocess_handlers[at].proc.pid)
    process.send_signal(signal.SIGSTOP)
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    return process


def test_a_stopped_rank_ends_on_a_signal(started: Start) -> None:
    ranks = Ranks(None)
    context = started(ranks, SLEEP, SLEEP)
    stop(context, 0)
    ranks.end(signal.SIGTERM)
    assert [context.wait(at) for at in (0, 1)] == [-signal.SIGTERM] * 2
    assert ranks.exits().killed == ()
    assert ranks.exits().asked == (4, 5)


def test_a_stopped_rank_stays_stopped_while_the_run_continues(started: Start) -> None:
    ranks = Ranks(None)
    context = started(ranks, SLEEP, SLEEP)
    stopped = stop(context, 0)
    ranks.on_request(signal.SIGUSR1, None)
    assert context.wait(1) == -signal.SIGUSR1
    assert stopped.status() == psutil.STATUS_STOPPED


def test_ranks_that_do_not_end_are_known(
    started: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(GRACE_VARIABLE, "1")
    ranks = Ranks(None)
    context = started(ranks, IGNORES, SLEEP, "raise SystemExit(3)", "")
    assert context.subprocess_handlers[0].proc.stdout is not None
    context.subprocess_handlers[0].proc.stdout.readline()
    assert (context.wait(2), context.wait(3)) == (3, 0)
    ranks.end(signal.SIGTERM)
    assert "rank 4 did not end within 1 s after SIGTERM and is killed." in capfd.readouterr().err
    context.subprocess_handlers[0].close(signal.SIGKILL)
    assert context.wait(0) == -signal.SIGKILL
    seen = ranks.exits()
    assert seen.codes == {4: -9, 5: -15, 6: 3, 7: 0}
    assert (seen.asked, seen.killed, seen.asked_by) == ((4, 5), (4,), signal.SIGTERM)
    assert seen.asked_at == pytest.approx(time.time(), abs=60)


def test_a_failing_rank_gets_time_to_write_its_error(started: Start, tmp_path: Path) -> None:
    """Rank 4 has lost rank 5, which is about to end by itself."""
    replace(LOST, rank=4).write(tmp_path)
    ranks = Ranks(tmp_path)
    context = started(ranks, "raise SystemExit(1)", "import time; time.sleep(0.5); raise SystemExit(7)")
    assert context.wait(0) == 1
    ranks.end(signal.SIGTERM)
    assert context.wait(1) == 7
    assert ranks.exits().asked == ()


def test_where_the_cause_is_known_the_others_are_ended_at_once(started: Start, tmp_path: Path) -> None:
    replace(CAUSE, rank=4).write(tmp_path)
    ranks = Ranks(tmp_path)
    context = started(ranks, "raise SystemExit(1)", "import time; time.sleep(0.5); raise SystemExit(7)")
    assert context.wait(0) == 1
    ranks.end(signal.SIGTERM)
    assert context.wait(1) == -signal.SIGTERM
    assert ranks.exits().asked == (5,)


def test_sighup_is_ignored_under_nohup_though_the_agent_sets_a_handler(started: Start) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ranks = Ranks(None)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as the agent does, with a handler
        asks = "import signal; raise SystemExit(3 + (signal.getsignal(1) == signal.SIG_IGN))"
        assert started(ranks, asks).wait(0) == 4
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_rank_that_failed_first_may_exit_without_a_signal(started: Start, tmp_path: Path) -> None:
    """Rank 5 has written its error down, and rank 4, which lost it, is the first to have ended."""
    replace(LOST, rank=4).write(tmp_path)
    replace(CAUSE, rank=5).write(tmp_path)
    ranks = Ranks(tmp_path)
    context = started(ranks, "raise SystemExit(1)", "import time; time.sleep(0.5); raise SystemExit(7)")
    assert context.wait(0) == 1
    ranks.end(signal.SIGTERM)
    assert context.wait(1) == 7
