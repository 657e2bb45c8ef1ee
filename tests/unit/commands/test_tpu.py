from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from accelerate.commands.tpu import main

PLACE = ("--tpu_name", "pod", "--tpu_zone", "us-central2-b")
SSH = "compute tpus tpu-vm ssh pod --zone us-central2-b --command"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["accelerate-tpu", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((*PLACE, "--command", "echo a"), f"gcloud {SSH} 'echo a' --worker all"),
        (
            (*PLACE, "--command", "echo", "a", "--command", "ls -l"),
            f"gcloud {SSH} 'echo a; ls -l' --worker all",
        ),
        (
            (*PLACE, "--use_alpha", "--install_accelerate", "--command", "ls"),
            f"gcloud alpha {SSH} 'pip install -U accelerate; ls' --worker all",
        ),
        (
            (*PLACE, "--install_accelerate", "--accelerate_version", "1.15.0"),
            f"gcloud {SSH} 'pip install accelerate==1.15.0' --worker all",
        ),
    ],
)
def test_debug_prints_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], wanted: str
) -> None:
    assert run(monkeypatch, *words, "--debug") == 0
    assert capsys.readouterr().out == f"Running {wanted}\n"


def test_the_configuration_file_gives_what_flags_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: XLA\ntpu_name: pod\ntpu_zone: us-central2-b\ncommands: [echo a, ls]\n")
    assert run(monkeypatch, "--config_file", str(path), "--debug") == 0
    assert capsys.readouterr().out == f"Running gcloud {SSH} 'echo a; ls' --worker all\n"
    assert (
        run(monkeypatch, "--config_file", str(path), "--tpu_name", "other", "--command", "x", "--debug") == 0
    )
    assert capsys.readouterr().out == f"Running gcloud {SSH.replace('pod', 'other')} x --worker all\n"


def test_commands_are_read_from_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "set_up.sh"
    path.write_text("# set up\n\nsudo apt update\npip list\n")
    assert run(monkeypatch, *PLACE, "--command_file", str(path), "--debug") == 0
    assert "'sudo apt update; pip list'" in capsys.readouterr().out


@pytest.mark.parametrize("code", [0, 3])
def test_gcloud_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    program = tmp_path / "gcloud"
    program.write_text(f'#!/bin/sh\nprintf "%s|" "$@"\nexit {code}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert run(monkeypatch, *PLACE, "--command", "echo a") == (1 if code else 0)
    out, err = capfd.readouterr()
    wanted = shlex.split(SSH) + ["echo a", "--worker", "all"]
    assert out.startswith("|".join(wanted) + "|")
    assert ("exit code 3" in err) == bool(code)
    assert ("is set up" in out) == (not code)


@pytest.mark.parametrize(
    ("words", "problem", "code"),
    [
        (("--command", "ls"), "--tpu_name is missing", 2),
        (("--tpu_name", "pod", "--command", "ls"), "--tpu_zone is missing", 2),
        (PLACE, "There is nothing to run", 2),
        ((*PLACE, "--command_file", "nowhere"), "--command_file='nowhere': there is no such file", 2),
        (("--config_file", "nowhere"), "--config_file='nowhere': there is no such file", 2),
        ((*PLACE, "--command", "ls"), "gcloud was not found", 1),
    ],
)
def test_bad_input_is_one_message(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    problem: str,
    code: int,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(monkeypatch, *words) == code
    assert problem in capsys.readouterr().err
