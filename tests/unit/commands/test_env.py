from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest
import torch

from accelerate.base import patch_environment
from accelerate.commands.env import env_command, env_command_parser


def test_the_report_names_versions_devices_and_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("mixed_precision: bf16\n")
    variables = {"ACCELERATE_LOG_LEVEL": "info", "ACCELERATE_HANG_TIMEOUT": "77", "NCCL_DEBUG": "WARN"}
    hidden = {"ACCELERATE_RUN_KEY": "hunter2", "ACCELERATE_MY_TOKEN": "hunter2", "FSDP_OTHER": "hunter2"}
    with patch_environment(**variables, **hidden):
        env_command(env_command_parser().parse_args(["--config_file", str(path)]))
    out = capsys.readouterr().out
    assert "independent implementation" in out
    assert f"- torch: {torch.__version__}" in out
    assert f"- python: {platform.python_version()}" in out
    assert all(f"{name}: {text}" in out for name, text in variables.items())
    assert all(f"{name}: (set)" in out for name in hidden)
    assert "hunter2" not in out
    assert "mixed_precision: bf16" in out
    assert f"- configuration file: {path}" in out


def test_the_report_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    env_command(env_command_parser().parse_args(["--json"]))
    facts = json.loads(capsys.readouterr().out)
    assert facts["configuration"] is None
    assert facts["torch"] == torch.__version__
    assert facts["devices"] >= 1


def test_the_report_has_the_versions_of_libraries_and_imports_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    for name, version in (("trl", "7.8.9"), ("unrelated", "1.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    env_command(env_command_parser().parse_args(["--json"]))
    versions = json.loads(capsys.readouterr().out)["libraries"]
    assert versions["trl"] == "7.8.9"
    assert "unrelated" not in versions
    assert "trl" not in sys.modules
