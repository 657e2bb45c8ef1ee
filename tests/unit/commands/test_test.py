"""`accelerate test`: what is launched."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from accelerate.commands import test as command


def test_the_self_check_is_launched_as_a_script_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(command, "launch_command", launched.append)
    command.test_command(command.test_command_parser().parse_args(["--config_file", "mine.yaml"]))
    (args,) = launched
    assert (args.config_file, args.module, args.training_script) == ("mine.yaml", True, command.SCRIPT)


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--resume"], []), (["--resume", "--config_file", "mine.yaml"], ["--config_file", "mine.yaml"])],
)
def test_resume_checks_something_else(
    monkeypatch: pytest.MonkeyPatch, words: list[str], expected: list[str]
) -> None:
    checked: list[Sequence[str]] = []
    monkeypatch.setattr(command, "check_resume", checked.append)
    command.test_command(command.test_command_parser().parse_args(words))
    assert checked == [expected]
