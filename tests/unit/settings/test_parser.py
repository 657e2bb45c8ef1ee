from __future__ import annotations

import argparse
import io
import re

import pytest

from accelerate.base import patch_environment
from accelerate.commands.accelerate_cli import make_cli_parser
from accelerate.settings import CustomArgumentParser
from accelerate.settings.parser import BOLD, CYAN, YELLOW, colored, nearest, wants_color, wrong_choice

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
def test_environment_variables_turn_colors_off(variables: dict[str, str], wanted: bool) -> None:
    assert wants_color(Terminal(), variables) is wanted
    assert wants_color(io.StringIO(), variables) is False


PRECISIONS = ("no", "fp16", "bf16", "fp8")
DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
FLAGS = ("--config_file", "--cpu", "--resume")


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("bfloat16", PRECISIONS, "bf16"),
        ("float16", PRECISIONS, "fp16"),
        ("BF16", PRECISIONS, "bf16"),
        ("fp32", PRECISIONS, "no"),
        ("bf16", DTYPES, "bfloat16"),
        ("fp16", DTYPES, "float16"),
        ("floot32", DTYPES, "float32"),
        ("8bit", DTYPES, "int8"),
        ("--cfg", FLAGS, "--config_file"),
        ("--confg_file", FLAGS, "--config_file"),
        ("--np", ("--tpu", "--num_processes"), None),
        ("moon", DTYPES, None),
        ("--zz", FLAGS, None),
    ],
)
def test_the_nearest_option_is_suggested(word: str, known: tuple[str, ...], meant: str | None) -> None:
    assert nearest(word, known) == meant


def test_the_nearest_text_choice_is_suggested() -> None:
    assert wrong_choice("bad", "bfloat16", PRECISIONS) == "bad. Did you mean 'bf16'?"
    assert wrong_choice("bad", 3, (1, 2)) == "bad"
