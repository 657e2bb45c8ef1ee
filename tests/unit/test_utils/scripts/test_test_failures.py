"""The runs of `accelerate test --failures`, in this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.conftest import reset_states

from accelerate.commands.failure_check import (
    PLACES,
    Run,
    compare,
    find_problems,
    parse,
    read_events,
    read_weights,
)
from accelerate.test_utils.scripts import test_failures as script

pytestmark = pytest.mark.usefixtures("states")


class Killed(BaseException):
    """Raised in place of the end of this process."""


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill() -> None:
        raise Killed

    monkeypatch.setattr(script, "kill_this_process", kill)


def train(monkeypatch: pytest.MonkeyPatch, folder: Path, places: Sequence[str]) -> Run:
    """Trains in one process, which starts again after each failure."""
    folder.mkdir()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(sys, "argv", ["script", str(folder), *places])
    for attempt in range(len(places)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        with pytest.raises(Killed):
            script.main()
        reset_states()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(len(places)))
    script.main()
    reset_states()
    events = (event for path in folder.glob("log-*") for event in read_events(path))
    return parse(events, read_weights(folder))


def test_a_run_with_failures_has_the_result_of_an_undisturbed_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = train(monkeypatch, tmp_path / "undisturbed", ())
    assert len(expected.steps) == script.EPOCHS * script.STEPS
    found = compare(expected, train(monkeypatch, tmp_path / "failures", PLACES))
    assert find_problems(found, 0.0) == []
    assert [each.failure.place for each in found.resumptions] == list(PLACES)
    assert [each.again for each in found.resumptions] == [4, 1, 4, 5]


def test_places_of_the_command_are_those_of_the_script() -> None:
    assert PLACES == (script.BETWEEN, script.BACKWARD, script.STEP, script.SAVE)


def test_a_checkpoint_without_the_position_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = train(monkeypatch, tmp_path / "undisturbed", ())
    monkeypatch.setattr(script.Progress, "load_state_dict", lambda self, state: None)
    found = compare(expected, train(monkeypatch, tmp_path / "failures", PLACES[:2]))
    assert find_problems(found, 1e-6)


def failures(folder: Path, group: int, num_groups: int = 2) -> script.Failures:
    process = script.Process(group, num_groups, rank=0, size=1, attempt=0)
    made = script.Failures(folder, [script.BETWEEN, script.SAVE], process, script.Log(folder, process))
    made.plan(num_steps=20)
    return made


def test_the_chosen_group_fails_once_all_groups_are_members(tmp_path: Path) -> None:
    first, second = (failures(tmp_path, group) for group in range(2))
    first.mark("member")
    second.fail(script.BETWEEN, script.FIRST)  # the other group is no member
    second.mark("member")
    for place, step in ((script.BETWEEN, script.FIRST - 1), (script.BACKWARD, script.FIRST)):
        second.fail(place, step)
    first.fail(script.BETWEEN, script.FIRST)
    with pytest.raises(Killed):
        second.fail(script.BETWEEN, script.FIRST)
    second.fail(script.BETWEEN, script.FIRST)
    assert (tmp_path / "failure-0").exists()


def test_groups_wait_for_one_that_failed_after_the_next_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(script.time, "sleep", waits.append)
    waiting = failures(tmp_path, 0)
    waiting.wait(0.0)
    (tmp_path / "failure-0").touch()
    waiting.wait(0.0)  # the step after the failure
    assert waits == []
    waiting.wait(0.0)
    assert waits == [script.PAUSE]
    for number in range(3):
        (tmp_path / f"member-{number}").touch()
        (tmp_path / f"ready-{number}").touch()
    waiting.wait(60.0)
    assert waits == [script.PAUSE]
