from __future__ import annotations

import argparse

import pytest

from accelerate.base import ConfigurationError, LaunchError
from accelerate.commands.utils import make_parser, run_command
from accelerate.settings import CustomArgumentParser


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigurationError("wrong"), 2), (LaunchError("failed"), 1), (KeyboardInterrupt(), 130)],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(args: argparse.Namespace) -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        run_command(command, argparse.Namespace())
    assert caught.value.code == code
    assert capsys.readouterr().err == ("" if code == 130 else f"accelerate: error: {error}\n")


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(lambda args: 1 / 0, argparse.Namespace())


def test_a_file_without_permission_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    def command(args: argparse.Namespace) -> None:
        raise PermissionError(13, "Permission denied", "/runs/rank-00000.jsonl")

    with pytest.raises(SystemExit) as caught:
        run_command(command, argparse.Namespace())
    assert caught.value.code == 1
    message = "accelerate: error: /runs/rank-00000.jsonl cannot be used: Permission denied.\n"
    assert capsys.readouterr().err == message


class Special(CustomArgumentParser):
    """A parser class of its own."""


def test_a_subcommand_may_have_a_parser_class_of_its_own() -> None:
    children = CustomArgumentParser().add_subparsers()
    assert type(make_parser("a", "A.", None, children, parser_class=Special)) is Special
    assert type(make_parser("b", "B.", None, children)) is CustomArgumentParser
    assert make_parser("b", "B.", None).prog == "accelerate b"
