"""Child programs: signals reach them, none is lost while one starts, and nothing outlives the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from accelerate.diagnostics.stopping import SignalRecorder
from accelerate.launch import children, run_child
from accelerate.launch.children import REQUESTS, ChildExit, ChildTerminator, RequestRecorder, blocked
from accelerate.launch.failures import ENTRY

RUN = """
import sys
from accelerate.launch.children import run_child
sys.exit(run_child([sys.executable, "-c", sys.argv[1]], {}, {} if len(sys.argv) < 3 else {2: 15}).code)
"""
NOTE = "import os, signal, subprocess, sys, time\nopen(f'pid-{os.getpid()}', 'w').close()\n"
STUBBORN = "for number in (2, 15): signal.signal(number, signal.SIG_IGN)\n"
SLEEP = "time.sleep(60)"
WITH_CHILD = f"subprocess.Popen([sys.executable, '-c', {NOTE + STUBBORN + SLEEP!r}])\n"


def runs(pid: int) -> bool:
    """Whether a process is there and not just waiting for whoever adopted it to notice its end."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(
    folder: Path,
    code: str,
    number: signal.Signals,
    processes: int,
    *more: str,
    grace: int = 1,
    ignored: tuple[int, ...] = (),
) -> tuple[int, str]:
    """Run a program, send a signal to its launcher, and wait; nothing of it may be left.

    The launcher ignores the signals `ignored` when it starts, and no others, however these tests are run.
    """

    def ignore() -> None:
        for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN if each in ignored else signal.SIG_DFL)

    launcher = subprocess.Popen(
        [sys.executable, "-c", RUN, NOTE + code, *more],
        cwd=folder,
        env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ignore,
    )
    try:
        deadline = time.monotonic() + 30
        while len(pids := list(folder.glob("pid-*"))) < processes and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        launcher.send_signal(number)
        _, err = launcher.communicate(timeout=20)
    finally:
        launcher.kill()
        launcher.wait()
    assert len(pids) == processes
    assert not [path for path in pids if runs(int(path.name.removeprefix("pid-")))]
    return launcher.returncode, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_program_and_is_reported(tmp_path: Path, number: signal.Signals) -> None:
    code, err = end(tmp_path, SLEEP, number, 1, grace=10)
    assert code == 128 + number
    assert f"{number.name} received, ending the processes; what still runs after 10 s is killed." in err
    assert f"{number.name} ended all processes." in err


def test_a_program_that_ignores_signals_is_killed_with_its_children(tmp_path: Path) -> None:
    code, err = end(tmp_path, STUBBORN + WITH_CHILD + SLEEP, signal.SIGTERM, 2)
    assert code == 137
    assert "2 processes did not end in time and were killed." in err


def test_processes_left_by_a_program_are_killed(tmp_path: Path) -> None:
    code, err = end(tmp_path, WITH_CHILD + SLEEP, signal.SIGTERM, 2)
    assert code == 143
    assert "SIGTERM ended all processes, 1 of which had outlived the first." in err


def test_a_program_with_a_signal_handler_keeps_its_exit_code(tmp_path: Path) -> None:
    code, err = end(
        tmp_path, "signal.signal(15, lambda *_: sys.exit(4))\n" + SLEEP, signal.SIGTERM, 1, grace=10
    )
    assert code == 4
    assert "killed" not in err.replace("is killed", "")


def test_another_signal_can_be_sent_in_its_place(tmp_path: Path) -> None:
    code, err = end(tmp_path, SLEEP, signal.SIGINT, 1, "instead")
    assert code == 143
    assert "SIGINT ended all processes." in err


@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGUSR2, marks=pytest.mark.slow)])
def test_a_request_is_forwarded_and_does_not_end_the_program(tmp_path: Path, number: signal.Signals) -> None:
    """The program runs for longer than the grace period after a signal."""
    program = f"signal.signal({int(number)}, lambda *_: (time.sleep(1.5), sys.exit(3)))\n"
    code, said = end(tmp_path, program + SLEEP, number, 1, grace=1)
    assert code == 3
    assert said == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_a_launcher_in_the_background_of_a_shell_ends_its_program_as_well(
    tmp_path: Path, number: signal.Signals
) -> None:
    ignored = (signal.SIGINT, signal.SIGQUIT)
    code, err = end(tmp_path, SLEEP, number, 1, grace=30, ignored=ignored)
    assert code == 128 + number
    assert f"{number.name} ended all processes." in err


def test_under_nohup_sighup_does_not_end_the_run(tmp_path: Path) -> None:
    """The program reports what it has for SIGHUP, sends SIGHUP to its launcher, and runs to its end."""
    hangs_up = (
        "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, flush=True, file=sys.stderr)\n"
        "os.kill(os.getppid(), signal.SIGHUP)\ntime.sleep(0.5)\nsys.exit(5)\n"
    )
    code, err = end(tmp_path, hangs_up, signal.SIGHUP, 1, ignored=(signal.SIGHUP,))
    assert (code, err) == (5, "True\n")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_stopped_program_and_what_it_started_end_at_once(tmp_path: Path, number: signal.Signals) -> None:
    stops = "os.kill(os.getpid(), signal.SIGSTOP)\n"
    child = f"subprocess.Popen([sys.executable, '-c', {NOTE + stops + SLEEP!r}])\n"
    ends = "signal.signal(signal.SIGTERM, lambda *_: (print('saved', file=sys.stderr), sys.exit(7)))\n"
    code, err = end(tmp_path, child + ends + "time.sleep(0.5)\n" + stops + SLEEP, number, 2, grace=60)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 7}[number]
    assert "killed" not in err.replace("is killed", "")
    assert ("saved" in err) == (number == signal.SIGTERM)


def test_signals_before_the_program_runs_are_sent_to_it(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", SLEEP])
    ending = ChildTerminator({})
    ending.on_signal(signal.SIGTERM, None)
    assert child.poll() is None
    ending.begin(child)
    assert child.wait(timeout=10) == -signal.SIGTERM
    ending.finish()
    assert ending.killed_after == 0


def test_a_signal_while_the_family_is_listed_is_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", SLEEP])
    ending, listed = ChildTerminator({}), []

    def list_family(pid: int) -> list[int]:  # which imports psutil
        listed.append(pid)
        ending.on_signal(signal.SIGTERM, None)
        return []

    monkeypatch.setattr(children, "_descendants", list_family)
    ending.begin(child)
    ending.on_signal(signal.SIGTERM, None)
    assert child.wait(timeout=10) == -signal.SIGTERM
    ending.finish()
    assert listed == [child.pid]


def test_a_request_to_a_program_that_starts_with_it_blocked_waits_there(tmp_path: Path) -> None:
    asks = (
        "import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\n"
        "raise SystemExit(40 + len(signal.sigpending() & {signal.SIGUSR1}))"
    )
    assert run_child([sys.executable, "-c", asks], {}, blocked_at_start=REQUESTS) == ChildExit(41, 0)
    assert run_child([sys.executable, "-c", asks], {}) == ChildExit(128 + signal.SIGUSR1, 0)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(REQUESTS)


def start(folder: Path, script: str, number: int) -> tuple[int, str]:
    """Run a script by the entry, with a request that was sent before Python itself had started."""
    (folder / "script.py").write_text(script)
    with blocked(REQUESTS):
        process = subprocess.Popen(
            [sys.executable, str(ENTRY), "script.py"], cwd=folder, stdout=subprocess.PIPE, text=True
        )
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


@pytest.mark.parametrize("number", REQUESTS)
def test_a_script_that_never_reads_requests_runs_to_its_end(tmp_path: Path, number: int) -> None:
    assert start(tmp_path, "print('end')", number) == (0, "end\n")


@pytest.mark.parametrize("number", [REQUESTS[0], pytest.param(REQUESTS[1], marks=pytest.mark.slow)])
def test_a_request_before_the_first_read_is_seen(tmp_path: Path, number: int) -> None:
    asks = (
        "from accelerate.diagnostics.stopping import SignalRecorder\n"
        "notes = SignalRecorder()\nnotes.install()\n"
        "print(*(trigger.name for trigger in notes.take()), *notes.take())\n"
    )
    assert start(tmp_path, asks, number) == (0, f"{signal.Signals(number).name}\n")


def test_a_handler_of_the_script_receives_later_signals(tmp_path: Path) -> None:
    own = (
        "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('mine'))\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
    )
    assert start(tmp_path, own, signal.SIGUSR2) == (0, "mine\nset()\n")


def test_in_a_fork_and_in_programs_a_request_does_what_it_does_by_default(tmp_path: Path) -> None:
    forks = (
        "import os, signal, subprocess, sys\n"
        "pid = os.fork()\n"
        "if not pid: os.kill(os.getpid(), signal.SIGUSR1)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "kill = 'import os, signal; os.kill(os.getpid(), signal.SIGUSR2)'\n"
        "print(code, subprocess.run([sys.executable, '-c', kill]).returncode)\n"
    )
    assert start(tmp_path, forks, signal.SIGUSR2) == (0, f"{-signal.SIGUSR1} {-signal.SIGUSR2}\n")


def test_signals_within_the_block_are_delivered_after_it() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with blocked(REQUESTS):
            signal.raise_signal(signal.SIGUSR1)  # to this thread; others of the tests do not block it
            assert seen == []
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_notes_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    early, before = RequestRecorder(), [signal.getsignal(number) for number in REQUESTS]
    monkeypatch.setattr("accelerate.diagnostics.stopping.NOTES", early)
    try:
        early.install()
        signal.raise_signal(signal.SIGUSR1)
        notes = SignalRecorder()
        notes.install()
        signal.raise_signal(signal.SIGUSR2)
        assert {trigger.name for trigger in notes.take()} == {"SIGUSR1", "SIGUSR2"}
        notes.restore()
        later = SignalRecorder()
        later.install()
        assert later.take() == set()
        later.restore()
    finally:
        for number, handler in zip(REQUESTS, before, strict=True):
            signal.signal(number, handler)


def test_killed_processes_have_ended() -> None:
    """A process with much memory takes a moment to end."""
    holds = "memory = bytes([1]) * (300 << 20)\nprint(flush=True)\n"
    code = "import time\n" + holds + SLEEP
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        children.kill_trees([child.pid])
        assert not runs(child.pid)
