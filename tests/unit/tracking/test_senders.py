"""A slow tracker receives all values, in order, in a thread."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, senders

pytestmark = pytest.mark.usefixtures("states", "_short_idleness")


@pytest.fixture
def _short_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(senders, "IDLE_SECONDS", 0.05)


class Slow(GeneralTracker):
    """Waits in `log` until it is released."""

    name = "slow"
    requires_logging_directory = False
    blocks = True

    def __init__(self, work: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.work = work
        self.logged: list[Any] = []
        self.threads: set[str] = set()
        self.ended = False

    @property
    def tracker(self) -> Any:
        return self.logged

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.work()
        self.logged.append((values, step, kwargs))

    def finish(self) -> None:
        self.ended = True


class Quick(Slow):
    blocks = False


def running(tracker: GeneralTracker, *others: GeneralTracker) -> Accelerator:
    accelerator = Accelerator(cpu=True, log_with=[tracker, *others])
    accelerator.init_trackers("project")
    return accelerator


def test_a_slow_tracker_slows_no_step() -> None:
    gate = threading.Event()
    tracker = Slow(gate.wait)
    accelerator = running(tracker)
    for step in range(20):
        accelerator.log({"loss": step}, step=step, log_kwargs={"slow": {"a": step}})
    assert tracker.logged == []  # nothing has been sent, and nothing has waited
    gate.set()
    accelerator.end_training()
    assert tracker.logged == [({"loss": step}, step, {"a": step}) for step in range(20)]
    assert tracker.threads == {"log-slow"}
    assert tracker.ended


def test_a_quick_tracker_is_called_at_once() -> None:
    tracker = Quick()
    accelerator = running(tracker)
    accelerator.log({"loss": 1})
    assert tracker.logged == [({"loss": 1}, None, {})]
    assert tracker.threads == {threading.current_thread().name}
    accelerator.end_training()


def test_logged_values_are_copied() -> None:
    gate = threading.Event()
    tracker = Slow(gate.wait)
    accelerator = running(tracker)
    loss, values = torch.ones(1), {"n": 1}
    accelerator.log({"loss": loss, "inner": values})
    accelerator.log(values)
    loss += 1
    values["n"] = 2
    gate.set()
    accelerator.end_training()
    first, second = (logged[0] for logged in tracker.logged)
    assert (first["loss"].item(), first["inner"], second) == (1.0, {"n": 1}, {"n": 1})


def test_trackers_are_handed_out_when_everything_is_sent() -> None:
    tracker = Slow(lambda: time.sleep(0.01))
    accelerator = running(tracker)
    for step in range(5):
        accelerator.log({"loss": step})
    assert accelerator.get_tracker("slow") is tracker
    assert len(tracker.logged) == 5
    accelerator.log({"loss": 5})
    assert len(accelerator.trackers[0].logged) == 6
    accelerator.end_training()


def fail() -> None:
    raise ConnectionError("the server is away")


def test_an_error_is_raised_by_the_next_log() -> None:
    tracker = Slow(fail)
    accelerator = running(tracker)
    accelerator.log({"loss": 1})
    accelerator.trackers  # noqa: B018  # waits
    with pytest.raises(ConnectionError, match="the server is away"):
        accelerator.log({"loss": 2})
    tracker.work = lambda: None
    accelerator.log({"loss": 3})  # the error was reported
    accelerator.end_training()
    assert [logged[0] for logged in tracker.logged] == [{"loss": 3}]


def test_an_error_is_raised_at_the_end_and_ends_everything_else() -> None:
    broken, other = Slow(fail), Quick()
    accelerator = running(broken, other)
    accelerator.log({"loss": 1})
    with pytest.raises(ConnectionError, match="the server is away"):
        accelerator.end_training()
    assert broken.ended
    assert other.ended


def test_the_number_of_queued_values_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(senders, "CAPACITY", 2)
    gate = threading.Event()
    tracker = Slow(gate.wait)
    accelerator = running(tracker)
    for step in range(3):  # one is being sent, two wait
        accelerator.log({"loss": step})
        time.sleep(0.02)
    late = threading.Thread(target=accelerator.log, args=({"loss": 3},))
    late.start()
    late.join(0.1)
    assert late.is_alive()
    gate.set()
    late.join(5)
    accelerator.end_training()
    assert [logged[0]["loss"] for logged in tracker.logged] == [0, 1, 2, 3]


def test_an_idle_sender_thread_ends_and_is_started_again() -> None:
    tracker = Slow()
    accelerator = running(tracker)
    for step in range(2):
        accelerator.log({"loss": step})
        deadline = time.monotonic() + 5
        while any(thread.name == "log-slow" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    accelerator.end_training()
    assert len(tracker.logged) == 2


def test_an_ended_tracker_can_still_be_read_and_logged_to() -> None:
    accelerator = running(tracker := Slow())
    accelerator.log({"loss": 0})
    accelerator.end_training()
    accelerator.log({"loss": 1})
    assert accelerator.get_tracker("slow") is tracker
    assert [logged[0]["loss"] for logged in tracker.logged] == [0, 1]


def test_a_tracker_that_hangs_does_not_hold_the_end_of_the_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(senders, "EXIT_SECONDS", 0.05)
    gate = threading.Event()
    accelerator = running(tracker := Slow(gate.wait))
    for step in range(3):
        accelerator.log({"loss": step})
    at_exit = accelerator._trackers.senders.of(tracker)
    assert isinstance(at_exit, senders.QueuedSender)
    at_exit._wait_at_exit()
    assert "3 calls of log did not reach slow within 0.05 s. Call end_training()" in caplog.text
    gate.set()
    accelerator.end_training()


def test_an_error_that_was_not_raised_is_logged_at_exit(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = running(tracker := Slow(fail))
    accelerator.log({"loss": 1})
    at_exit = accelerator._trackers.senders.of(tracker)
    assert isinstance(at_exit, senders.QueuedSender)
    at_exit._wait_at_exit()
    assert "slow did not log all values: ConnectionError('the server is away')" in caplog.text
    with pytest.raises(ConnectionError):
        accelerator.end_training()


SCRIPT = """
    import time
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    class Slow(GeneralTracker):
        name, requires_logging_directory, blocks, tracker = "slow", False, True, None
        def log(self, values, step=None, **kwargs):
            time.sleep(0.02)
            print("logged", step, flush=True)

    accelerator = Accelerator(cpu=True, log_with=Slow())
    accelerator.init_trackers("project")
    for step in range(5):
        accelerator.log({"loss": 1.0}, step=step)
"""


def test_queued_values_are_sent_at_exit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [word for step in range(5) for word in ("logged", str(step))]
