"""One job at a time, whose error is raised where one waits for it."""

from __future__ import annotations

import threading

import pytest

from accelerate import PartialState
from accelerate.checkpointing import Background


def test_a_job_runs_while_the_caller_goes_on() -> None:
    background, go, done = Background(), threading.Event(), []
    background.wait()
    background.start(lambda: done.append(go.wait(5)))
    assert done == []
    go.set()
    background.wait()
    assert done == [True]


def test_the_next_job_waits_for_the_one_before() -> None:
    background, go, order = Background(), threading.Event(), []
    background.start(lambda: (go.wait(5), order.append("first")))
    threading.Timer(0.05, go.set).start()
    background.start(lambda: order.append("second"))
    background.wait()
    assert order == ["first", "second"]


@pytest.mark.usefixtures("states")
def test_an_error_is_raised_once(caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    background = Background()

    def fail() -> None:
        raise OSError(28, "No space left on device")

    background.start(fail)
    with pytest.raises(OSError, match="No space left"):
        background.start(lambda: None)
    background.wait()
    background.start(fail)
    with pytest.raises(OSError, match="No space left"):
        background.wait()
    background.wait()
    assert "A checkpoint was not saved" in caplog.text
