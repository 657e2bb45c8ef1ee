"""The launch half runs without torch: a launcher that loads it costs every start seconds."""

from __future__ import annotations

import json
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
RUN_ALL = """
import json
from accelerate.commands.accelerate_cli import main

for words in json.loads(sys.argv.pop()):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
"""


def run_without_torch(source: str, *arguments: str) -> None:
    """Run a program in a fresh interpreter in which importing torch is an error."""
    command = [sys.executable, "-c", BLOCK_TORCH + source, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_packages_of_the_launcher_import_without_torch(sources: list[Any]) -> None:
    modules = [source.module for source in sources if source.parts[1] in TORCH_FREE]
    assert {name.split(".")[1] for name in modules} == set(TORCH_FREE)
    run_without_torch("import importlib\nfor name in sys.argv[1:]: importlib.import_module(name)", *modules)


def test_commands_run_without_torch(tmp_path: Path) -> None:
    from accelerate.checkpointing import Manifest
    from accelerate.monitoring import RecordWriter, Values

    folder, records = str(tmp_path), tmp_path / "records"
    (tmp_path / "best").mkdir()
    Manifest({}, world_size=1).write(tmp_path / "best")
    records.mkdir()
    writer = RecordWriter(records, 0)
    writer.write(Values(time=1.0, step=1, values={"loss": 1.0}))
    writer.close()
    calls = [["--help"], ["launch", "--help"], ["config", "--help"]]
    calls += [
        ["checkpoint", "list", folder],
        ["checkpoint", "verify", folder],
        ["report", str(records)],
    ]
    run_without_torch(RUN_ALL, json.dumps(calls))
    assert (records / "report.html").exists()


def test_the_guard_refuses_torch() -> None:
    with pytest.raises(AssertionError, match="torch was imported without need"):
        run_without_torch("import torch")
