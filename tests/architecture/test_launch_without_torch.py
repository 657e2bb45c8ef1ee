"""The launch half runs without torch: a launcher that loads it costs every start seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BLOCK_TORCH = """
import sys

class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise AssertionError(f"{name} was imported without need")

sys.meta_path.insert(0, Guard())
"""
TORCH_FREE = ("base", "settings", "monitoring", "report", "devices", "launch")
PROGRAMS = ("accelerate.commands.launch", "accelerate.commands.accelerate_cli", "accelerate.commands.config")


def run_without_torch(source: str, *arguments: str) -> None:
    """Run a program in a fresh interpreter in which importing torch is an error."""
    command = [sys.executable, "-c", BLOCK_TORCH + source, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("entry", TORCH_FREE)
def test_entry_imports_without_torch(entry: str, sources: list[Any]) -> None:
    modules = [source.module for source in sources if source.parts[1] == entry]
    assert modules
    run_without_torch("import importlib\nfor name in sys.argv[1:]: importlib.import_module(name)", *modules)


@pytest.mark.parametrize("module", PROGRAMS)
def test_program_imports_without_torch(module: str) -> None:
    run_without_torch(f"import {module}")


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["config", "--help"]], ids=" ".join)
def test_help_runs_without_torch(arguments: list[str]) -> None:
    run_without_torch("from accelerate.commands.accelerate_cli import main\nmain()", *arguments)


@pytest.mark.parametrize("action", ["list", "verify"])
def test_checkpoint_commands_run_without_torch(action: str, tmp_path: Path) -> None:
    from accelerate.checkpointing import Manifest

    (tmp_path / "best").mkdir()
    Manifest({}, world_size=1).write(tmp_path / "best")
    run_without_torch(
        "from accelerate.commands.accelerate_cli import main\nmain()", "checkpoint", action, str(tmp_path)
    )


def test_the_report_command_runs_without_torch(tmp_path: Path) -> None:
    from accelerate.monitoring import RecordWriter, Values

    writer = RecordWriter(tmp_path, 0)
    writer.write(Values(time=1.0, step=1, values={"loss": 1.0}))
    writer.close()
    run_without_torch("from accelerate.commands.accelerate_cli import main\nmain()", "report", str(tmp_path))
    assert (tmp_path / "report.html").exists()


def test_the_guard_refuses_torch() -> None:
    with pytest.raises(AssertionError, match="torch was imported without need"):
        run_without_torch("import torch")
