from __future__ import annotations

import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest

from accelerate.commands import accelerate_cli
from accelerate.commands.accelerate_cli import COMMANDS, make_cli_parser


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_only_the_given_command_is_loaded(name: str) -> None:
    parser = make_cli_parser([name])
    subparsers = next(a for a in parser._actions if a.choices is not None)
    assert list(subparsers.choices or ()) == [name]


def test_without_a_command_all_commands_are_loaded() -> None:
    parser = make_cli_parser([])
    subparsers = next(a for a in parser._actions if a.choices is not None)
    assert list(subparsers.choices or ()) == list(COMMANDS)


def test_help_lists_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["accelerate", "--help"])
    with pytest.raises(SystemExit) as caught:
        accelerate_cli.main()
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for name, (_, summary) in COMMANDS.items():
        assert name in out
        assert summary.split()[0] in out


def test_no_command_shows_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["accelerate"])
    with pytest.raises(SystemExit) as caught:
        accelerate_cli.main()
    assert caught.value.code == 1
    assert "usage: accelerate" in capsys.readouterr().out


MODULES = ("completion", "config", "env", "estimate", "launch", "merge", "test", "to_fsdp2", "tpu")


@pytest.mark.parametrize("name", MODULES)
def test_every_command_runs_as_a_module(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"accelerate.commands.{name}", raising=False)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module(f"accelerate.commands.{name}", run_name="__main__")
    assert caught.value.code == 0
    written = capsys.readouterr()
    assert written.out.startswith("usage: accelerate ")
    assert written.err == ""


def test_every_script_of_the_package_has_its_function() -> None:
    lines = (Path(__file__).parents[3] / "pyproject.toml").read_text().partition("[project.scripts]")[2]
    scripts = dict(re.findall(r'^(accelerate[\w-]*) = "(.+)"$', lines.partition("\n[")[0], re.MULTILINE))
    assert {"accelerate", "accelerate-launch", "accelerate-config", "accelerate-test"} <= set(scripts)
    for place in scripts.values():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_parsers_of_the_commands_can_be_imported_from_here() -> None:
    assert accelerate_cli.env_command_parser().prog == "accelerate env"
