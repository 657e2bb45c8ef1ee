"""What users get wrong, by flag, file and variable: one clear message, exit code 2, no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accelerate.base.environ import patch_environment
from accelerate.commands import accelerate_cli

LAUNCH = ("launch", "--dry_run", "--cpu")
TRAIN = "train.py"

FLAGS = [
    (("lanch", TRAIN), "there is no command 'lanch'. Did you mean 'launch'?"),
    (("nonsense",), "there is no command 'nonsense'. There are: checkpoint, config"),
    (("config", "defualt"), "there is no command 'defualt'. Did you mean 'default'?"),
    (("test", "--cfg", "x"), "--cfg x (did you mean --config_file? See accelerate test --help)"),
    (("config", "default", "--zzz"), "--zzz (see accelerate config default --help)"),
    (("launch",), "the script to run is missing: accelerate launch [options] train.py"),
    (("launch", "--dry_run"), "the script to run is missing: accelerate launch [options] train.py"),
    (("launch", "--config_file", TRAIN), "is missing (--config_file took 'train.py' as its value)"),
    (("launch", "--config_file=train.py"), "is missing (--config_file took 'train.py' as its value)"),
    ((*LAUNCH, "--num_proceses", "2", TRAIN), "did you mean --num_processes?"),
    ((*LAUNCH, "--num_processes", "two", TRAIN), "--num_processes/--num-processes: invalid int value: 'two'"),
    ((*LAUNCH, "--num_processes", TRAIN), "is missing (--num_processes took 'train.py' as its value)"),
    ((*LAUNCH, "--num_processes", "0", TRAIN), "--num_processes=0: at least one process is needed"),
    ((*LAUNCH, "--num_processes", "-3", TRAIN), "--num_processes=-3: at least one process is needed"),
    ((*LAUNCH, "--num_processes", "2.5", TRAIN), "invalid int value: '2.5'"),
    ((*LAUNCH, "--mixed_precision", "fp32", TRAIN), "invalid choice: 'fp32'"),
    ((*LAUNCH, "--mixed-precision=half", TRAIN), "invalid choice: 'half'"),
    ((*LAUNCH, "--mixed_precision", "bfloat16", TRAIN), "Did you mean 'bf16'?"),
    ((*LAUNCH, "--mixed_precision", "float16", TRAIN), "Did you mean 'fp16'?"),
    ((*LAUNCH, "--dynamo_backend", "turbo", TRAIN), "invalid choice: 'turbo'"),
    ((*LAUNCH, "--num_machines", "0", TRAIN), "--num_machines=0"),
    ((*LAUNCH, "--num_machines", "2", TRAIN), "several machines need a place to meet"),
    ((*LAUNCH, "--num_machines=2", "--machine_rank=2", "--main_process_ip=a", TRAIN), "--machine_rank=2"),
    ((*LAUNCH, "--main_process_port", "high", TRAIN), "invalid int value: 'high'"),
    ((*LAUNCH, "--main_process_port", "70000", TRAIN), "--main_process_port=70000"),
    ((*LAUNCH, "--max_restarts", "many", TRAIN), "invalid int value: 'many'"),
    ((*LAUNCH, "--monitor_interval", "soon", TRAIN), "invalid float value: 'soon'"),
    ((*LAUNCH, "--use_fsdp", "--fsdp_version", "3", TRAIN), "invalid choice: '3'"),
    ((*LAUNCH, "--use_fsdp", "--fsdp_offload_params", "perhaps", TRAIN), "--fsdp_offload_params='perhaps'"),
    ((*LAUNCH, "--fp8_override_linear_precision", "true,maybe,true", TRAIN), "fp8_override_linear_precision"),
    (("launch", "--dry_run", "--multi_gpu", "--num_processes", "2", TRAIN), "shows no accelerator"),
    ((*LAUNCH, "-m", "--no_python", "a"), "--module and --no_python exclude each other"),
    ((*LAUNCH, "--config_file", "nowhere.yaml", TRAIN), "'nowhere.yaml': there is no such file"),
    ((*LAUNCH, "--config_file", ".", TRAIN), "there is no such file"),
    (("launch", "--cpu", "nowhere.py"), "There is no script 'nowhere.py' here"),
    (("config", "show", "--confg_file=x"), "did you mean --config_file?"),
    (("config", "default", "--mixed_precision", "fp8"), "invalid choice: 'fp8'"),
    (("config", "update", "--config_file", "nowhere.yaml"), "there is no such file"),
    (("config", "show"), "There is no configuration file at"),
    (("env", "--config_file", "nowhere.yaml"), "there is no such file"),
    (("test", "--config_file", "nowhere.yaml"), "there is no such file"),
    (("estimate-memory",), "the following arguments are required: model_name"),
    (("estimate-memory", "./nowhere"), "there is no such file or folder"),
    (("estimate-memory", "a/b", "--dtypes", "float128"), "invalid choice: 'float128'"),
    (("estimate-memory", "a/b", "--dtypes", "bf16"), "Did you mean 'bfloat16'?"),
    (("estimate-memory", "a/b", "--dtypes", "fp16"), "Did you mean 'float16'?"),
    (("estimate-memory", ".", "--num_processes", "0"), "neither safetensors files nor config.json"),
    (("estimate-memory", "a/b", "--optimizer", "adamx"), "invalid choice: 'adamx'"),
    (("merge-weights", "nowhere", "out"), "this is no folder with a sharded checkpoint"),
    (("merge-weights", "nowhere"), "the following arguments are required: output_path"),
    (("to-fsdp2", "--config_file", "nowhere.yaml", "--overwrite"), "there is no such file"),
    (("to-fsdp2",), "the following arguments are required: --config_file"),
    (("tpu-config", "--command", "ls"), "--tpu_name is missing"),
    (("completion", "cmd"), "invalid choice: 'cmd'"),
]  # fmt: skip

FILES = [
    ("num_proceses: 2", "num_proceses: there is no such setting. Did you mean num_processes?"),
    ("fsdp_config: {fsdp_versoin: 2}", "fsdp_config.fsdp_versoin: there is no such setting. Did you"),
    ("deepspeed_config: {stage: 2}", "deepspeed_config.stage: there is no such setting"),
    ("num_processes: many", "num_processes='many': this must be a whole number"),
    ("num_processes: 0", "num_processes=0: at least one process is needed"),
    ("num_processes: 1.5", "num_processes=1.5: this must be a whole number"),
    ("num_processes: true", "num_processes=True: this must be a whole number"),
    ("num_processes: [2]", "num_processes=[2]: this must be a whole number"),
    ("mixed_precision: fp32", "mixed_precision='fp32': this is not one of the accepted values"),
    ("mixed_precision: {a: 1}", "mixed_precision={'a': 1}: this must be one text"),
    ("use_cpu: perhaps", "use_cpu='perhaps': this must be yes or no"),
    ("debug: 7", "debug=7: this must be yes or no"),
    ("fsdp_config: 3", "fsdp_config=3: this must be a group of settings"),
    ("distributed_type: MANY", "distributed_type='MANY': there is no such way of training"),
    ("compute_environment: MOON", "compute_environment='MOON': this is not one of the accepted values"),
    ("fsdp_config: {fsdp_version: 3}\ndistributed_type: FSDP", "fsdp_config.fsdp_version=3: this is not"),
    ("dynamo_config: {dynamo_mode: fast}", "dynamo_config.dynamo_mode='fast': this is not one of"),
    ("fp8_config: {margin: wide}", "fp8_config.margin='wide': this must be a whole number"),
    ("deepspeed_config: {zero_stage: 7}", "zero_stage=7: this number is out of range. Use one from 0 to 3"),
    ("num_machines: 2", "several machines need a place to meet"),
    ("num_proceses: 2\nuse_cpu: perhaps", "2 settings are wrong"),
    ("- a\n- b", "holds no settings"),
    ("", "holds no settings"),
    ("just words", "holds no settings"),
    ("a: [1", "is not valid"),
    ("\tx: 1", "is not valid"),
    ("a: &a [*a", "is not valid"),
    ("!!python/object/apply:os.system ['true']", "is not valid"),
]  # fmt: skip

VARIABLES = [
    ({"ACCELERATE_MIXED_PRECISION": "fp32"}, "ACCELERATE_MIXED_PRECISION='fp32'"),
    ({"ACCELERATE_USE_CPU": "perhaps"}, "ACCELERATE_USE_CPU='perhaps': this must be yes or no"),
    ({"ACCELERATE_DEBUG_MODE": "maybe"}, "ACCELERATE_DEBUG_MODE='maybe': this must be yes or no"),
    ({"ACCELERATE_DYNAMO_BACKEND": "turbo"}, "ACCELERATE_DYNAMO_BACKEND='turbo': this is not one of"),
    ({"ACCELERATE_USE_FSDP": "x"}, "ACCELERATE_USE_FSDP='x': this must be yes or no"),
    ({"FSDP_VERSION": "3"}, "FSDP_VERSION='3': this is not one of the accepted values"),
    ({"FSDP_MIN_NUM_PARAMS": "lots"}, "FSDP_MIN_NUM_PARAMS='lots': this must be a whole number"),
    ({"PARALLELISM_CONFIG_TP_SIZE": "two"}, "PARALLELISM_CONFIG_TP_SIZE='two': this must be a whole number"),
    ({"ACCELERATE_FP8_OVERRIDE_FPROP": "x"}, "ACCELERATE_FP8_OVERRIDE_FPROP='x': this must be yes or no"),
    ({"FSDP_VERSION": "3", "ACCELERATE_USE_CPU": "x"}, "2 settings are wrong"),
]  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> int:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["accelerate", *words])
    with patch_environment(HF_HOME=folder / "home"), pytest.raises(SystemExit) as caught:
        accelerate_cli.main()
    return int(caught.value.code or 0)


def assert_one_message(err: str, problem: str) -> None:
    assert problem in err
    assert "Traceback" not in err
    assert err.count("error: ") == 1
    assert err.endswith("\n")


def test_there_are_enough_of_each() -> None:
    assert len(FLAGS) + len(FILES) + len(VARIABLES) >= 80


@pytest.mark.parametrize(
    ("words", "problem"), FLAGS, ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else ""
)
def test_flags(
    words: tuple[str, ...],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, tmp_path, *words) == 2
    err = capsys.readouterr().err
    assert_one_message(err, problem)
    assert err.count("\n") == 1


@pytest.mark.parametrize(("text", "problem"), FILES)
def test_files(
    text: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert run(monkeypatch, tmp_path, "launch", "--dry_run", "--config_file", "c.yaml", TRAIN) == 2
    assert_one_message(capsys.readouterr().err, problem)


@pytest.mark.parametrize(("variables", "problem"), VARIABLES, ids=lambda value: "-".join(value)[:60])
def test_variables(
    variables: dict[str, str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with patch_environment(**variables):
        assert run(monkeypatch, tmp_path, *LAUNCH, TRAIN) == 2
    assert_one_message(capsys.readouterr().err, problem)
