"""Processes write down what ends them, and the launcher reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from accelerate.launch import Exits, Failure, collect, count_of, shortened


def describe(message: str, **variables: str) -> Failure:
    try:
        raise ValueError(message)
    except ValueError as error:
        return Failure.of(error, variables)


def test_a_failure_survives_the_way_through_its_file(tmp_path: Path) -> None:
    failure = describe("no\nway", RANK="3", WORLD_SIZE="4", TORCHELASTIC_RESTART_COUNT="1")
    assert failure.headline == "ValueError: no way"
    assert failure.kind[:2] == ("ValueError", "Exception")
    assert failure.place.startswith(__file__)
    assert failure.write(tmp_path)
    outcome = collect(tmp_path, 1)
    assert outcome.failures == (failure,)
    assert outcome.seen == Exits({})


def test_only_the_last_attempt_counts_and_the_earliest_comes_first(tmp_path: Path) -> None:
    late = replace(describe("late", RANK="0", TORCHELASTIC_RESTART_COUNT="2"), moment=9.0)
    early = replace(describe("early", RANK="1", TORCHELASTIC_RESTART_COUNT="2"), moment=5.0)
    before = describe("before", RANK="2", TORCHELASTIC_RESTART_COUNT="1")
    for failure in (late, early, before):
        failure.write(tmp_path)
    assert collect(tmp_path, 1).failures == (early, late)


def test_a_folder_that_is_gone_is_no_second_failure(tmp_path: Path) -> None:
    assert not describe("x").write(tmp_path / "gone")


def test_what_the_launcher_saw_survives_the_way_through_its_file(tmp_path: Path) -> None:
    seen = Exits({0: -15, 1: 7, 2: 0}, attempt=2, asked=(0,), asked_by=2, asked_at=1.5, killed=(0,))
    seen.write(tmp_path)
    outcome = collect(tmp_path, 7)
    assert outcome.seen == seen
    assert outcome.finished == [2]


def test_errors_of_an_attempt_before_the_one_that_was_seen_do_not_count(tmp_path: Path) -> None:
    describe("before", RANK="0").write(tmp_path)
    Exits({0: -9}, attempt=1).write(tmp_path)
    assert collect(tmp_path, 137).failures == ()


def test_a_long_line_is_cut() -> None:
    assert shortened("x" * 300) == "x" * 300
    assert shortened("x" * 1000, 10) == "xxxxxxxxxx ... (990 more characters)"


def test_a_wrong_count_does_not_take_the_place_of_the_failure() -> None:
    assert count_of({"RANK": "3"}, "RANK", 0) == 3
    assert [count_of({"RANK": text}, "RANK", 7) for text in ("", "x", "-1", "9" * 5000, "\u00b2")] == [7] * 5
    assert Failure.of(RuntimeError("gone"), {"RANK": "x"}).headline == "RuntimeError: gone"
