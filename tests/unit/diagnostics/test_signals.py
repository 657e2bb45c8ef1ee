"""Signals that are noted for later."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from accelerate.diagnostics.stopping import REPEAT_SECONDS, SIGNALS, SignalRecorder

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SIGTERM, SIGUSR1, SIGUSR2 = SIGNALS


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    after = [signal.getsignal(number) for number in NUMBERS]
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)
    assert after == before


def test_signals_are_noted_and_reported_once() -> None:
    notes = SignalRecorder()
    notes.install()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGTERM)
    assert notes.take() == {SIGTERM, SIGUSR1, SIGUSR2}
    signal.raise_signal(signal.SIGUSR2)
    assert notes.take() == {SIGUSR2}
    assert notes.take() == set()
    notes.restore()
    notes.restore()


def test_the_handler_before_is_called_too() -> None:
    received = []

    def listen(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = signal.signal(signal.SIGUSR1, listen)
    notes = SignalRecorder()
    notes.install()
    signal.raise_signal(signal.SIGUSR1)
    assert received == [signal.SIGUSR1]
    assert notes.take() == {SIGUSR1}
    notes.restore()
    assert signal.signal(signal.SIGUSR1, before) is listen


def test_the_handler_of_an_agent_is_not_for_its_forks() -> None:
    def end(number: int, frame: FrameType | None) -> None:
        raise AssertionError

    end.__module__ = "torch.distributed.elastic.multiprocessing.api"
    before = signal.signal(signal.SIGTERM, end)
    notes = SignalRecorder()
    notes.install()
    signal.raise_signal(signal.SIGTERM)
    assert notes.take() == {SIGTERM}
    notes.restore()
    signal.signal(signal.SIGTERM, before)


def test_a_later_run_replaces_the_handlers() -> None:
    first, second = SignalRecorder(), SignalRecorder()
    first.install()
    second.install()
    signal.raise_signal(signal.SIGUSR1)
    assert first.take() == set()
    assert second.take() == {SIGUSR1}
    first.restore()
    assert signal.getsignal(signal.SIGUSR1) == second._on_signal
    second.restore()


def test_a_handler_set_later_is_left_in_place() -> None:
    notes = SignalRecorder()
    notes.install()
    before = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    notes.restore()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    assert before == notes._on_signal
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_second_sigterm_does_what_it_did_before() -> None:
    now, received = [0.0], []

    def listen(number: int, frame: FrameType | None) -> None:
        received.append(now[0])

    before = signal.signal(signal.SIGTERM, listen)
    notes = SignalRecorder(clock=lambda: now[0])
    notes.install()
    for now[0] in (0.0, REPEAT_SECONDS / 2):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == notes._on_signal
    now[0] = REPEAT_SECONDS + 1
    signal.raise_signal(signal.SIGTERM)
    assert signal.signal(signal.SIGTERM, before) is listen
    assert received == [0.0, REPEAT_SECONDS / 2, REPEAT_SECONDS + 1]


def test_a_second_sigterm_ends_a_process_that_does_not_read_requests() -> None:
    script = (
        "import signal; from accelerate.diagnostics.stopping import SignalRecorder\n"
        "now = [0.0]; SignalRecorder(clock=lambda: now[0]).install()\n"
        "signal.raise_signal(signal.SIGTERM); now[0] = 9.0; signal.raise_signal(signal.SIGTERM)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == -signal.SIGTERM


def test_a_fork_ends_on_signals_as_without_handlers() -> None:
    script = (
        "import os, signal, time; from accelerate.diagnostics.stopping import SignalRecorder\n"
        "notes = SignalRecorder(); notes.install(); read, write = os.pipe(); child = os.fork()\n"
        "if not child: os.write(write, b'x'); time.sleep(60); os._exit(0)\n"
        "os.read(read, 1)  # Python drops signals that come while it forks\n"
        "os.kill(child, signal.SIGTERM); ended = os.waitpid(child, 0)[1]\n"
        "signal.raise_signal(signal.SIGUSR1)\n"
        "print(os.waitstatus_to_exitcode(ended), [trigger.name for trigger in notes.take()])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=50, capture_output=True, text=True)
    assert done.stdout == "-15 ['SIGUSR1']\n", done.stderr


@pytest.mark.usefixtures("states")
def test_a_thread_cannot_watch_signals(caplog: pytest.LogCaptureFixture) -> None:
    from accelerate.state import PartialState

    PartialState(cpu=True)
    notes = SignalRecorder()
    thread = threading.Thread(target=notes.install)
    thread.start()
    thread.join()
    assert "main thread" in caplog.text
    notes.restore()
