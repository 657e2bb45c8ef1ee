from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accelerate.base import patch_environment
from accelerate.commands import launch
from accelerate.commands.launch import launch_command, launch_command_parser, make_plan, read_settings
from accelerate.commands.utils import run_command
from accelerate.launch import choose_cpu_or_devices
from accelerate.launch.layout import CHOSEN


def parse(*words: str) -> argparse.Namespace:
    return launch_command_parser().parse_args(list(words))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("import sys; sys.exit(int(sys.argv[1]))\n")
    return path


@pytest.mark.parametrize(
    "own",
    [
        ["--num_processes", "7", "--cpu"],
        ["--", "-m", "x"],
        ["-h"],
        ["a b", "--config_file=x", ""],
        ["--unknown", "--mixed-precision", "fp8"],
    ],
)
def test_arguments_after_the_script_belong_to_the_script(own: list[str]) -> None:
    plan, settings = make_plan(parse("--cpu", "train.py", *own))
    assert list(plan.target.arguments) == own
    assert plan.target.name == "train.py"
    assert plan.processes == 1
    assert settings.source("num_processes") == CHOSEN


def test_flag_over_environment_over_file_over_default_file(tmp_path: Path) -> None:
    default = tmp_path / "accelerate" / "default_config.yaml"
    default.parent.mkdir()
    default.write_text("mixed_precision: fp16\nuse_cpu: true\n")
    given = tmp_path / "given.yaml"
    given.write_text("mixed_precision: bf16\nuse_cpu: true\n")

    def chosen(*words: str) -> tuple[str, str]:
        _, settings = make_plan(parse(*words, "--cpu", "train.py"))
        return settings.values["mixed_precision"], settings.source("mixed_precision")

    assert chosen() == ("no", "built-in")
    with patch_environment(HF_HOME=tmp_path):
        assert chosen() == ("fp16", f"default file {default}")
        assert chosen("--config_file", str(given)) == ("bf16", str(given))
        with patch_environment(ACCELERATE_MIXED_PRECISION="no"):
            assert chosen("--config_file", str(given)) == ("no", "environment")
            assert chosen("--config_file", str(given), "--mixed_precision", "fp8") == ("fp8", "flag")


def test_a_parsed_namespace_can_be_launched_as_a_function(script: Path) -> None:
    launch_command(parse("--cpu", "--quiet", str(script), "0"))
    with pytest.raises(SystemExit) as caught:
        launch_command(parse("--cpu", "--quiet", str(script), "3"))
    assert caught.value.code == 3


def test_assumed_values_are_printed_once_unless_quiet(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch_command(parse("--cpu", str(script), "0"))
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("accelerate launch: assumed 1 process on CPU")
    assert err.count("\n") == 1
    launch_command(parse("--cpu", "-q", str(script), "0"))
    assert capfd.readouterr().err == ""


def test_validate_fills_the_namespace(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("mixed_precision: bf16\nuse_cpu: true\n")
    args, config, from_file = launch._validate_launch_command(parse("--config_file", str(path), "train.py"))
    assert (args.num_processes, args.mixed_precision, from_file) == (1, "bf16", True)
    assert config.mixed_precision == "bf16"
    args, config, from_file = launch._validate_launch_command(parse("--cpu", "train.py"))
    assert (args.mixed_precision, config, from_file) == ("no", None, False)


def test_help_fits_a_narrow_terminal_and_omits_other_training_methods(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def help_of(*words: str) -> str:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "argv", ["accelerate", "launch", *words, "-h"])
        with pytest.raises(SystemExit):
            launch_command_parser().parse_args([*words, "-h"])
        return capsys.readouterr().out

    everything = help_of()
    assert max(map(len, everything.splitlines())) <= 80
    assert "FSDP Arguments" in everything
    assert "DeepSpeed Arguments" in everything
    assert "in total, over all" in everything
    only_fsdp = help_of("--use_fsdp")
    assert "--fsdp_version" in only_fsdp
    assert "--zero_stage" not in only_fsdp


@pytest.mark.parametrize("name", launch._RE_EXPORTS)
def test_names_of_other_packages_can_be_imported_from_here(name: str) -> None:
    value: object = getattr(launch, name)
    assert value is not None
    assert isinstance(value, Callable | list)  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", ["--explain", "--dry_run", "--dry-run"])
def test_explaining_starts_nothing(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    launch_command(parse("--cpu", flag, "no_such_script.py", "0"))
    out, err = capsys.readouterr()
    assert "no_such_script.py" in out
    assert err == ""


@pytest.mark.parametrize(
    ("words", "environ", "stays", "note"),
    [
        (["--cpu"], {}, True, None),
        (["--multi_gpu"], {}, False, r"--multi_gpu is used, and .*config.yaml: use_cpu=true is not"),
        (["--multi_gpu"], {"ACCELERATE_USE_CPU": "1"}, False, "--multi_gpu is used, and ACCELERATE_USE_CPU="),
        ([], {}, True, r"the run stays on the CPU: .*config.yaml: use_cpu=true wins over MULTI_GPU"),
    ],
)
def test_cpu_and_multi_gpu_of_different_places(
    words: list[str], environ: dict[str, str], stays: bool, note: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("use_cpu: true\ndistributed_type: MULTI_GPU\nnum_processes: 2\n")
    with patch_environment(**environ):
        settings = choose_cpu_or_devices(read_settings(parse("--config_file", str(path), *words, "x.py")))
    assert settings.values["cpu"] is stays
    assert [bool(re.match(note, each)) for each in settings.notes] == [True] if note else not settings.notes


def test_a_flag_for_devices_without_effect_is_named() -> None:
    settings = choose_cpu_or_devices(read_settings(parse("--cpu", "--gpu_ids", "0", "x.py")))
    assert settings.notes == ("--gpu_ids has no effect on the CPU",)


def test_cpu_and_multi_gpu_as_flags_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(launch_command, parse("--cpu", "--multi_gpu", "x.py"))
    assert end.value.code == 2
    assert "--cpu and --multi_gpu exclude each other" in capsys.readouterr().err
