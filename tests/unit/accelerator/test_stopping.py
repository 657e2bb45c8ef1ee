"""Stop and save as a script asks for them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from accelerate import Accelerator
from accelerate.base import ConfigurationError

pytestmark = pytest.mark.usefixtures("states")


def until_asked(accelerator: Accelerator, seconds: float = 10.0) -> tuple[bool, bool]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answers = accelerator.should_save, accelerator.should_stop
        if any(answers):
            return answers
        time.sleep(0.001)
    return False, False


@pytest.mark.parametrize(("name", "stops"), [("SIGTERM", True), ("SIGUSR1", True), ("SIGUSR2", False)])
def test_signals_request_a_save_or_a_stop(name: str, stops: bool) -> None:
    before = signal.getsignal(getattr(signal, name))
    accelerator = Accelerator(cpu=True)
    assert not accelerator.should_save
    assert not accelerator.should_stop
    os.kill(os.getpid(), getattr(signal, name))
    assert until_asked(accelerator) == (True, stops)
    assert (accelerator.should_save, accelerator.should_stop) == (False, stops)
    accelerator.end_training()
    assert signal.getsignal(getattr(signal, name)) == before
    assert accelerator.should_stop is stops


def test_a_file_and_a_time_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCELERATE_SAVE_FILE", str(tmp_path / "save"))
    monkeypatch.setenv("ACCELERATE_STOP_FILE", str(tmp_path / "stop"))
    monkeypatch.setenv("ACCELERATE_MAX_TIME", "1-00:00:00")
    accelerator = Accelerator(cpu=True)
    assert until_asked(accelerator, 0.1) == (False, False)
    (tmp_path / "save").touch()
    assert until_asked(accelerator) == (True, False)
    (tmp_path / "stop").touch()
    assert until_asked(accelerator) == (True, True)
    accelerator.end_training()


def test_a_run_that_reads_no_requests_sets_no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MAX_TIME", "10")
    before = signal.getsignal(signal.SIGTERM)
    Accelerator(cpu=True)
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_invalid_time_budget_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MAX_TIME", "tomorrow")
    with pytest.raises(ConfigurationError, match="tomorrow"):
        Accelerator(cpu=True)
