"""Requests to a process that still starts are neither lost nor its end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.diagnostics import SignalNotes
from accelerate.launch import ENTRY, REQUESTS, RequestNotes, blocked


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
def test_a_script_that_never_asks_goes_on(tmp_path: Path, number: int) -> None:
    assert start(tmp_path, "print('end')", number) == (0, "end\n")


@pytest.mark.parametrize("number", REQUESTS)
def test_a_request_that_came_first_is_seen_when_the_script_asks(tmp_path: Path, number: int) -> None:
    asks = (
        "from accelerate.diagnostics import SignalNotes\n"
        "notes = SignalNotes()\nnotes.install()\n"
        "print(*(trigger.name for trigger in notes.take()), *notes.take())\n"
    )
    assert start(tmp_path, asks, number) == (0, f"{signal.Signals(number).name}\n")


def test_a_handler_of_the_script_gets_what_comes_later(tmp_path: Path) -> None:
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


def test_what_is_sent_meanwhile_is_delivered_behind_the_block() -> None:
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
    early, before = RequestNotes(), [signal.getsignal(number) for number in REQUESTS]
    monkeypatch.setattr("accelerate.diagnostics.stopping.NOTES", early)
    try:
        early.install()
        signal.raise_signal(signal.SIGUSR1)
        notes = SignalNotes()
        notes.install()
        signal.raise_signal(signal.SIGUSR2)
        assert {trigger.name for trigger in notes.take()} == {"SIGUSR1", "SIGUSR2"}
        notes.restore()
        later = SignalNotes()
        later.install()
        assert later.take() == set()
        later.restore()
    finally:
        for number, handler in zip(REQUESTS, before, strict=True):
            signal.signal(number, handler)
