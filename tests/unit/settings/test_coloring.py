from __future__ import annotations

import argparse
import io
import re

import pytest

from accelerate.base import patch_environment
from accelerate.commands.accelerate_cli import make_cli_parser
from accelerate.settings import BOLD, CYAN, YELLOW, CustomArgumentParser, colored, wants_color

CONTROL = re.compile(r"\x1b\[\d+m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def all_parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [each for child in action.choices.values() for each in all_parsers(child)]
    return found


@pytest.fixture(scope="module")
def parsers() -> list[argparse.ArgumentParser]:
    return all_parsers(make_cli_parser([]))


def test_every_help_fits_80_columns_and_colours_change_no_character(
    parsers: list[argparse.ArgumentParser],
) -> None:
    assert len(parsers) > 10
    with patch_environment(COLUMNS=80):
        for parser in parsers:
            text = parser.format_help()
            assert max(map(len, text.splitlines())) <= 80, parser.prog
            assert CONTROL.sub("", colored(text)) == text
            assert "_" not in text or not re.search(r"--(\w+_\w+) \S+, --", text), "one spelling of each flag"


def test_headings_flags_and_values_are_coloured() -> None:
    parser = CustomArgumentParser(prog="program")
    group = parser.add_argument_group("Some Arguments")
    group.add_argument("--some_size", metavar="N_BYTES", help="A size; see --help.")
    with patch_environment(TERM="xterm", NO_COLOR=""):
        target = Terminal()
        parser.print_help(target)
        assert f"{BOLD}Some Arguments:" in target.getvalue()
        assert f"  {CYAN}--some_size" in target.getvalue()
        assert f"{YELLOW}N_BYTES" in target.getvalue()
        plain = io.StringIO()
        parser.print_help(plain)
        assert CONTROL.search(plain.getvalue()) is None
        assert CONTROL.sub("", target.getvalue()) == plain.getvalue()


@pytest.mark.parametrize(
    ("variables", "wanted"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_the_environment_can_say_no(variables: dict[str, str], wanted: bool) -> None:
    assert wants_color(Terminal(), variables) is wanted
    assert wants_color(io.StringIO(), variables) is False
