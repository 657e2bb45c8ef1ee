"""What users get wrong, by flag, file and variable: one clear message, exit code 2, no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accelerate.base import ConfigurationError, patch_environment
from accelerate.commands import accelerate_cli
from accelerate.settings import ClusterConfig, load_config_from_file, read_mapping

LAUNCH = ("launch", "--dry_run", "--cpu")
TRAIN = "train.py"

FLAGS = [
    (("lanch", TRAIN), "there is no command 'lanch'. Did you mean 'launch'?"),
    (("nonsense",), "there is no command 'nonsense'. There are: checkpoint, clients, config"),
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
    ((*LAUNCH, "--num_machines", "2", TRAIN), "several machines need an address for the rendezvous"),
    ((*LAUNCH, "--num_machines=2", "--machine_rank=2", "--main_process_ip=a", TRAIN), "--machine_rank=2"),
    ((*LAUNCH, "--main_process_port", "high", TRAIN), "invalid int value: 'high'"),
    ((*LAUNCH, "--main_process_port", "70000", TRAIN), "--main_process_port=70000"),
    ((*LAUNCH, "--max_restarts", "many", TRAIN), "invalid int value: 'many'"),
    ((*LAUNCH, "--monitor_interval", "soon", TRAIN), "invalid float value: 'soon'"),
    ((*LAUNCH, "--use_fsdp", "--fsdp_version", "3", TRAIN), "invalid choice: '3'"),
    ((*LAUNCH, "--use_fsdp", "--fsdp_offload_params", "perhaps", TRAIN), "--fsdp_offload_params='perhaps'"),
    ((*LAUNCH, "--fp8_override_linear_precision", "true,maybe,true", TRAIN), "must be three words"),
    (("launch", "--dry_run", "--multi_gpu", "--num_processes", "2", TRAIN), "shows no accelerator"),
    ((*LAUNCH, "--fp8_pad_inner_dim", "x", TRAIN), "'x' must be true or false"),
    ((*LAUNCH, "--slurm", TRAIN), "--slurm=True: this is not inside an allocation of SLURM"),
    ((*LAUNCH, "--submit", TRAIN), "--submit=True: it belongs to --slurm"),
    ((*LAUNCH, "-m", "--no_python", "a"), "--module and --no_python exclude each other"),
    ((*LAUNCH, "--config_file", "nowhere.yaml", TRAIN), "'nowhere.yaml': there is no such file"),
    ((*LAUNCH, "--config_file", ".", TRAIN), "it is a folder"),
    (("launch", "--cpu", "nowhere.py"), "There is no script 'nowhere.py' here"),
    (("config", "show", "--confg_file=x"), "did you mean --config_file?"),
    (("config", "default", "--mixed_precision", "fp8"), "invalid choice: 'fp8'"),
    (("config", "update", "--config_file", "nowhere.yaml"), "there is no such file"),
    (("config", "show"), "There is no configuration file at"),
    (("env", "--config_file", "nowhere.yaml"), "there is no such file"),
    (("test", "--num_processes", "x"), "invalid int value: 'x'"),
    (("test", "--config_file", "nowhere.yaml"), "there is no such file"),
    (("estimate-memory",), "the following arguments are required: model_name"),
    (("estimate-memory", "./nowhere"), "there is no such file or folder"),
    (("estimate-memory", "a/b", "--dtypes", "float128"), "invalid choice: 'float128'"),
    (("estimate-memory", "a/b", "--dtypes", "bf16"), "Did you mean 'bfloat16'?"),
    (("estimate-memory", "a/b", "--dtypes", "fp16"), "Did you mean 'float16'?"),
    (("estimate-memory", ".", "--num_processes", "0"), "neither safetensors files nor config.json"),
    (("estimate-memory", "a/b", "--optimizer", "adamx"), "invalid choice: 'adamx'"),
    (("merge-weights", "nowhere", "out"), "the folder contains no sharded checkpoint"),
    (("merge-weights", "nowhere"), "the following arguments are required: output_path"),
    (("to-fsdp2", "--config_file", "nowhere.yaml", "--overwrite"), "there is no such file"),
    (("to-fsdp2",), "the following arguments are required: --config_file"),
    (("tpu-config", "--command", "ls"), "--tpu_name is missing"),
    (("completion", "cmd"), "invalid choice: 'cmd'"),
]  # fmt: skip

LONG = "a" * 400
TWO = (*LAUNCH, "--num_processes", "2")
FLAGS += [
    ((*LAUNCH, "--config_file", LONG, TRAIN), "it cannot be looked at (File name too long)"),
    ((*LAUNCH, "--config_file", "~no-such-user/c", TRAIN), "'~no-such-user/c': there is no such file"),
    ((*LAUNCH, "--config_file=--", TRAIN), "--config_file='--': there is no such file"),
    ((*LAUNCH, "--num_processes=--", TRAIN), "invalid int value: '--'"),
    ((*LAUNCH, "--num_processes", "9" * 400, TRAIN), "99: this number is out of range"),
    ((*LAUNCH, "--num_processes", "9" * 5000, TRAIN), "9...9"),
    ((*LAUNCH, "--num_processes", "9999999", TRAIN), "=9999999: so many processes cannot be started"),
    ((*LAUNCH, "--num_machines", "9" * 18, TRAIN), "so many processes cannot be started"),
    ((*LAUNCH, "--processes_per_machine", "\u00b2", TRAIN), "these are not numbers of at least 1"),
    ((*LAUNCH, "--processes_per_machine", "9" * 5000, TRAIN), "these are not numbers of at least 1"),
    ((*LAUNCH, "--max_time", "9" * 400, TRAIN), "this is not a span of time"),
    ((*LAUNCH, "--gpu_ids", "a\0b", TRAIN), "--gpu_ids='a\\x00b': no variable and no path can hold"),
    ((*LAUNCH, "--mpirun_hostfile", LONG, TRAIN), "cannot be read: [Errno 36] File name too long"),
    ((*LAUNCH, "--slurm", "--submit", "--slurm_options", "'", TRAIN), "a shell cannot split it into words"),
    ((*LAUNCH, "--use_deepspeed", "--deepspeed_config_file", LONG, TRAIN), "there is no such file"),
    ((*TWO, "--monitor_interval", "nan", TRAIN), "--monitor_interval=nan: this must be a number"),
    ((*TWO, "--monitor_interval", "0", TRAIN), "--monitor_interval=0.0: this number is out of range"),
    ((*TWO, "--max_restarts", "-1", TRAIN), "--max_restarts=-1: this number is out of range"),
    ((*TWO, "--tee", "abc", TRAIN), "--tee='abc': these are not streams"),
    ((*TWO, "--rdzv_conf", "foo", TRAIN), "--rdzv_conf='foo': a setting has no name or no value"),
    (("launch", "--cpu", LONG), "There is no script 'aaa"),
    (("config", "default", "--config_file", f"{LONG}/c.yaml"), "it cannot be written (File name too long)"),
    (("estimate-memory", LONG + "/a/b"), "there is no such file or folder"),
    (("checkpoint", "list", LONG), "there is no such folder"),
    (("merge-weights", LONG, "out"), "the folder contains no sharded checkpoint"),
    (("to-fsdp2", "--config_file", ".", "--overwrite"), "--config_file='.': it is a folder"),
    (("tpu-config", "--tpu_name=a", "--tpu_zone=b", "--command_file", "."), "it is a folder"),
]  # fmt: skip

BOMB = "a0: &a0 [x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
)
FILES = [
    ("qqqqqq: 1", "qqqqqq: there is no such setting. Remove it"),
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
    ("distributed_type: MANY", "distributed_type='MANY': there is no such strategy"),
    ("compute_environment: MOON", "compute_environment='MOON': this is not one of the accepted values"),
    ("fsdp_config: {fsdp_version: 3}\ndistributed_type: FSDP", "fsdp_config.fsdp_version=3: this is not"),
    ("fsdp_config: {fsdp_auto_wrap_policy: SOME}", "fsdp_auto_wrap_policy='SOME': this is not one of"),
    ("dynamo_config: {dynamo_mode: fast}", "dynamo_config.dynamo_mode='fast': this is not one of"),
    ("fp8_config: {margin: wide}", "fp8_config.margin='wide': this must be a whole number"),
    ("deepspeed_config: {zero_stage: 7}", "zero_stage=7: this number is out of range. Use one from 0 to 3"),
    ("num_machines: 2", "several machines need an address for the rendezvous"),
    ("num_proceses: 2\nuse_cpu: perhaps", "2 settings are wrong"),
    ("- a\n- b", "holds no settings"),
    ("", "holds no settings"),
    ("just words", "holds no settings"),
    ("a: [1", "is not valid"),
    ("\tx: 1", "is not valid"),
    ("a: &a [*a", "is not valid"),
    ("!!python/object/apply:os.system ['true']", "is not valid"),
    ("{" * 5000, "is not valid: it has more than 50 levels of values in each other"),
    ("[" * 5000, "is not valid: it has more than 50 levels of values in each other"),
    (BOMB, "is not valid: with those that aliases repeat, it has more than 10000 values"),
    (MERGE_BOMB, "is not valid: with those that aliases repeat, it has more than 10000 values"),
    ("- a\n" * 20000, "is not valid: with those that aliases repeat, it has more than 10000 values"),
    ("#" * (2**20 + 1), "is not valid: it has more than 1024 KiB"),
    ("1: x", "is not valid: it has the key 1, which is not text: write it in quotes"),
    ("dynamo_config: {1: x}", "dynamo_config has the key 1, which is not text"),
    ("fsdp_config: {null: x}", "fsdp_config has the key None, which is not text"),
    ("megatron_lm_config: {on: x}", "megatron_lm_config has the key True, which is not text"),
    ("deepspeed_config: {[1, 2]: x}", "is not valid: while constructing a mapping"),
    ("debug: !!bool x", "is not valid: 'x' is no bool at line 1, column 8"),
    ("max_time: 2020-13-45", "is not valid: '2020-13-45' is no timestamp at line 1"),
    (f"num_processes: {'9' * 5000}", "has more than 400 digits at line 1"),
    (f"num_processes: {'9' * 400}", "this number is out of range"),
    ("num_processes: 9999999", "so many processes cannot be started"),
    (f"megatron_lm_config: {{megatron_lm_gradient_clipping: {'9' * 400}}}", "this must be a number"),
    ("megatron_lm_config: {megatron_lm_gradient_clipping: .inf}", "=inf: this must be a number"),
    ("deepspeed_config: {zero_stage: .nan}", "deepspeed_config.zero_stage=nan: this must be a whole number"),
    ('main_process_ip: "a\\0b"', "main_process_ip='a\\x00b': no variable and no path can hold"),
    ('gpu_ids: "\\uD800"', "gpu_ids='\\ud800': no variable and no path can hold"),
    ("main_process_ip: !!binary aGk=", "main_process_ip=b'hi': this must be one text"),
    ("tpu_vm: [{a: 1}]", "tpu_vm=[{'a': 1}]: this must be a list"),
    ("fp8_config: {override_linear_precision: [true]}", "=[True]: this must be 3 words"),
    ("dynamo_backend: eager\ndynamo_config: 3", "dynamo_config=3: this must be a group of settings"),
]  # fmt: skip

VARIABLES = [
    ({"ACCELERATE_MAX_TIME": "9" * 400}, "ACCELERATE_MAX_TIME='999"),
    ({"ACCELERATE_MAX_TIME": "9" * 5000}, "ACCELERATE_MAX_TIME='999"),
    ({"ACCELERATE_STOP_MARGIN": "-1"}, "ACCELERATE_STOP_MARGIN='-1': this number is out of range"),
    ({"ACCELERATE_HANG_TIMEOUT": "9" * 5000}, "9': this must be a whole number"),
    ({"MEGATRON_LM_GRADIENT_CLIPPING": "1e999"}, "_CLIPPING='1e999': this must be a number"),
    ({"MEGATRON_LM_TP_DEGREE": "\u00b2"}, "MEGATRON_LM_TP_DEGREE='\u00b2': this must be a whole number"),
    ({"HF_HOME": "a" * 400}, "the default configuration file below it cannot be looked at"),
    ({"ACCELERATE_MIXED_PRECISION": "fp32"}, "ACCELERATE_MIXED_PRECISION='fp32'"),
    ({"ACCELERATE_USE_CPU": "perhaps"}, "ACCELERATE_USE_CPU='perhaps': this must be yes or no"),
    ({"ACCELERATE_DEBUG_MODE": "maybe"}, "ACCELERATE_DEBUG_MODE='maybe': this must be yes or no"),
    ({"ACCELERATE_DYNAMO_BACKEND": "turbo"}, "ACCELERATE_DYNAMO_BACKEND='turbo': this is not one of"),
    ({"ACCELERATE_USE_FSDP": "x"}, "ACCELERATE_USE_FSDP='x': this must be yes or no"),
    ({"FSDP_VERSION": "3"}, "FSDP_VERSION='3': this is not one of the accepted values"),
    ({"FSDP_SHARDING_STRATEGY": "HALF"}, "FSDP_SHARDING_STRATEGY='HALF': this is not one of the accepted"),
    ({"FSDP_STATE_DICT_TYPE": "FULL"}, "FSDP_STATE_DICT_TYPE='FULL': this is not one of the accepted"),
    ({"FSDP_MIN_NUM_PARAMS": "lots"}, "FSDP_MIN_NUM_PARAMS='lots': this must be a whole number"),
    ({"PARALLELISM_CONFIG_TP_SIZE": "two"}, "PARALLELISM_CONFIG_TP_SIZE='two': this must be a whole number"),
    ({"ACCELERATE_FP8_OVERRIDE_FPROP": "x"}, "ACCELERATE_FP8_OVERRIDE_FPROP='x': neither a yes nor a no"),
    ({"FSDP_VERSION": "3", "ACCELERATE_USE_CPU": "x"}, "2 settings are wrong"),
]  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> int:
    with patch_environment(HF_HOME=folder / "home"):
        return run_here(monkeypatch, folder, *words)


def run_here(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> int:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["accelerate", *words])
    with pytest.raises(SystemExit) as caught:
        accelerate_cli.main()
    return int(caught.value.code or 0)


def assert_one_message(err: str, problem: str) -> None:
    assert problem in err
    assert "Traceback" not in err
    assert err.count("error: ") == 1
    assert err.endswith("\n")


@pytest.mark.parametrize(
    ("words", "problem"), FLAGS, ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else ""
)
def test_wrong_flags_are_one_message(
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


@pytest.mark.parametrize(("text", "problem"), FILES, ids=lambda value: value[:40])
def test_wrong_files_are_one_message(
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
def test_wrong_variables_are_one_message(
    variables: dict[str, str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with patch_environment(**{"HF_HOME": tmp_path / "home", **variables}):
        assert run_here(monkeypatch, tmp_path, *LAUNCH, TRAIN) == 2
    assert_one_message(capsys.readouterr().err, problem)


@pytest.mark.parametrize(
    "text",
    ["[" * 5000, '{"a":' * 500 + "1" + "}" * 500, "\x80", ""],
    ids=["list", "object", "bytes", "nothing"],
)
def test_wrong_deepspeed_files_are_one_message(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_bytes(text.encode("latin-1"))
    words = (*LAUNCH, "--use_deepspeed", "--deepspeed_config_file", "ds.json", TRAIN)
    assert run(monkeypatch, tmp_path, *words) == 2
    assert_one_message(capsys.readouterr().err, "--deepspeed_config_file='ds.json': it ")


@pytest.mark.parametrize(
    "text",
    ["[1]", '{"weight_map": {"a": 1}}', '{"weight_map": {}}', "[" * 5000, "\x80"],
    ids=["list", "number", "nothing", "deep", "bytes"],
)
def test_wrong_indices_of_weights_are_one_message(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    assert run(monkeypatch, tmp_path, "estimate-memory", ".") == 2
    assert_one_message(capsys.readouterr().err, "MODEL='model.safetensors.index.json': ")


def test_unprintable_characters_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", out)
    assert run(monkeypatch, tmp_path, *LAUNCH[:1], "--explain", "--cpu", "\udcff.py") == 0
    out.flush()
    assert "\\udcff.py" in capfd.readouterr().out


@pytest.mark.parametrize(
    "text", ["a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", "a: &a {x: 1, y: 2}\nb:\n  <<: [*a]\n  y: 3"]
)
def test_aliases_and_merge_keys_are_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert read_mapping(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


def test_values_of_a_file_have_the_type_of_their_option(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("use_cpu: 'false'\nnum_processes: '2'\ncommands: ls -l, pwd\n")
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    assert (config.use_cpu, config.num_processes, config.commands) == (False, 2, ["ls -l", "pwd"])


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("num_processes: many")
    with pytest.raises(ConfigurationError, match="c.yaml: num_processes='many'"):
        load_config_from_file(str(path))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--log_dir", TRAIN), "--log_dir='train.py': this folder cannot be created (File exists)"),
        (("--log_dir", LONG), "this folder cannot be created (File name too long)"),
        (("--rdzv_backend", "foo"), "settings of the rendezvous: The rendezvous backend 'foo'"),
        (("--rdzv_conf", "timeout=x"), "settings of the rendezvous: invalid literal for int()"),
        (("--main_process_ip", "no such host"), "settings of the rendezvous: The hostname"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_values_that_torch_refuses_are_one_error(
    words: tuple[str, ...],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / TRAIN).write_text("")
    launch = ("launch", "--quiet", *TWO[2:], *words, TRAIN)
    with patch_environment(TORCHELASTIC_SIGNALS_TO_HANDLE="SIGTERM"):  # torch's agent changes it
        assert run(monkeypatch, tmp_path, *launch) == 2
    assert problem in capsys.readouterr().err
