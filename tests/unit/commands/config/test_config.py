from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from accelerate.base import ConfigurationError
from accelerate.commands import config
from accelerate.commands.config.config import main
from accelerate.commands.config.default import write_basic_config
from accelerate.devices import CPU, CUDA
from accelerate.launch import Machine
from accelerate.settings import ClusterConfig


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["accelerate-config", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_default_writes_a_file_for_a_machine_without_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("accelerate.commands.config.default.look", lambda environ, cpu: Machine(CPU, 1))
    path = tmp_path / "deep" / "c.yaml"
    assert run(monkeypatch, "default", "--config_file", str(path), "--mixed_precision", "bf16") == 0
    assert str(path) in capsys.readouterr().out
    written = yaml.safe_load(path.read_text())
    wanted = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": "bf16",
        "use_cpu": True,
        "debug": False,
        "num_processes": 1,
        "enable_cpu_affinity": False,
    }
    assert written.items() >= wanted.items()


@pytest.mark.parametrize(("devices", "kind"), [(1, "NO"), (4, "MULTI_GPU")])
def test_all_devices_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, devices: int, kind: str
) -> None:
    monkeypatch.setattr(
        "accelerate.commands.config.default.look", lambda environ, cpu: Machine(CUDA, devices)
    )
    path = write_basic_config(save_location=str(tmp_path / "c.json"))
    loaded = config.load_config_from_file(str(path))
    assert isinstance(loaded, ClusterConfig)
    assert (loaded.num_processes, loaded.distributed_type, loaded.use_cpu) == (devices, kind, False)


def test_an_existing_file_is_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("debug: true\n")
    assert write_basic_config(save_location=str(path)) is False
    assert path.read_text() == "debug: true\n"
    assert "is not changed" in capsys.readouterr().out


def test_a_wrong_number_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="mixed_precision='fp32'"):
        write_basic_config("fp32", str(tmp_path / "c.yaml"))


def test_update_migrates_an_old_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("fp16: true\ndistributed_type: MULTI_GPU\nnum_processes: 2\nhang_timeout: 60\n")
    assert run(monkeypatch, "update", "--config_file", str(path)) == 0
    written = yaml.safe_load(path.read_text())
    assert (written["mixed_precision"], written["num_processes"]) == ("fp16", 2)
    assert written["hang_timeout"] == 60
    assert "fp16" not in written


def test_show_prints_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("fp16: true\n")
    assert run(monkeypatch, "show", "--config_file", str(path)) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"# {path}\n")
    assert "mixed_precision: fp16" in out
