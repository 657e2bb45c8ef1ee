"""`accelerate verify` finds faults in scripts and layouts, and finds none in right ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from faults import FAULTS
from right import PROGRAMS

FOLDER = Path(__file__).parent
VERIFY = [sys.executable, "-m", "accelerate.commands", "verify", "--cpu"]
SECONDS = 300
AXES = "--use_parallelism_config --parallelism_config"
BOTH = f"{AXES}_cp_size 2 --parallelism_config_sp_size 2 --parallelism_config_sp_backend torch"
WRAP = "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
LAYOUTS = [
    ("plain", "--num_processes 4"),
    ("plain", "--num_processes 2 --mixed_precision bf16"),
    ("transformer", "--num_processes 2 --mixed_precision bf16"),
    ("transformer", f"--num_processes 2 --use_fsdp --fsdp_version 1 {WRAP}"),
    ("transformer", f"--num_processes 2 --use_fsdp --fsdp_version 2 {WRAP}"),
    ("transformer", f"--num_processes 2 {AXES}_tp_size 2"),
    ("transformer", f"--num_processes 2 {AXES}_pp_size 2"),
    ("transformer", f"--num_processes 4 {AXES}_pp_size 2 --parallelism_config_dp_replicate_size 2"),
    ("transformer", f"--num_processes 2 {AXES}_cp_size 2 --use_fsdp --fsdp_version 2"),
    ("transformer", f"--num_processes 2 {AXES}_sp_size 2 --parallelism_config_sp_backend torch"),
    ("transformer", f"--num_processes 4 {BOTH}"),
    ("trainer", f"--num_processes 2 --use_fsdp --fsdp_version 2 {WRAP}"),
    ("trainer", f"--num_processes 4 {BOTH}"),
    ("plain", "--num_processes 2 --mixed_precision fp16"),
    ("transformer", "--num_processes 2 --dynamo_backend eager"),
    ("experts", f"--num_processes 2 {AXES}_ep_size 2"),
    *(("plain", f"--num_processes 2 --use_deepspeed --zero_stage {stage}") for stage in (1, 2, 3)),
]
SHARDED = {
    "sp": f"--num_processes 2 {AXES}_sp_size 2 --parallelism_config_sp_backend torch",
    "cp": f"--num_processes 2 {AXES}_cp_size 2",
}
LONG = [
    ("loss_in_the_forward", "--num_processes 2"),
    ("loss_in_the_forward", SHARDED["sp"]),
    ("loss_of_shards", SHARDED["sp"]),
    ("loss_of_shards", SHARDED["cp"]),
    ("packed_documents", f"--num_processes 2 --use_fsdp --fsdp_version 2 {WRAP}"),
    ("packed_documents", SHARDED["sp"]),
]
LONG_FAULTS = [
    ("labels_are_shifted_on_each_rank", "sp"),
    ("labels_are_those_of_another_rank", "cp"),
    ("positions_begin_on_each_rank", "sp"),
    ("the_loss_is_divided_by_the_number_of_ranks", "cp"),
]
EXAMPLES_FOLDER = FOLDER.parents[1] / "examples"
EXAMPLES = [
    *("accumulation.py", "digits.py", "gpt.py"),
    *(
        f"by_feature/{name}.py"
        for name in (
            "checkpointing",
            "cross_validation",
            "ddp_comm_hook",
            "early_stopping",
            "exact_metrics",
            "fully_sharded",
            "gradient_accumulation",
            "multiple_models",
            "profiler",
            "tracking",
        )
    ),
    *(f"by_task/{name}.py" for name in ("audio", "diffusion", "language_model", "reinforcement")),
]
"""Examples that train replicas, and choose nothing by the size of a batch."""
LIBRARIES = {
    "transformer": "transformers",
    "experts": "transformers",
    "trainer": "transformers",
    "adapters": "peft",
    "fine_tuning": "trl",
    "text_to_image": "diffusers",
}


def verify(folder: Path, program: str, name: str, flags: list[str]) -> subprocess.CompletedProcess[str]:
    command = [*VERIFY, *flags, "--json", "result.json", str(FOLDER / f"{program}.py"), name]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)


def check_right(folder: Path, name: str, flags: list[str]) -> None:
    pytest.importorskip(LIBRARIES.get(name, "torch"))
    ended = verify(folder, "right", name, ["--steps", "6", *flags])
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    assert "trains what the reference trains" in ended.stdout
    assert [path.name for path in folder.iterdir()] == ["result.json"]


def check_fault(folder: Path, name: str) -> None:
    ended = verify(folder, "faults", name, ["--steps", "5", "--num_processes", "2"])
    assert ended.returncode == 1, ended.stdout[-2000:] + ended.stderr[-3000:]
    fault = FAULTS[name]
    if fault.what == "error":  # the package itself refuses it
        assert fault.cause in ended.stderr
        assert not (folder / "result.json").exists()
        return
    finding = json.loads((folder / "result.json").read_text())["findings"][0]
    assert finding["what"] == fault.what
    assert fault.cause in finding["text"] + finding["cause"]


def test_a_right_program_has_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, states = tmp_path / "folder", tmp_path / "states"
    folder.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(states))
    check_right(folder, "diffusion", ["--num_processes", "2", "--report", str(tmp_path / "page.html")])
    assert not states.exists()
    page = (tmp_path / "page.html").read_text()
    assert "this launch" in page
    assert "the reference" in page


def test_a_fault_is_found(tmp_path: Path) -> None:
    check_fault(tmp_path, "the_loss_is_divided_twice")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_right_programs_have_no_difference(tmp_path: Path, name: str) -> None:
    check_right(tmp_path, name, ["--num_processes", "2"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flags"), LAYOUTS)
def test_right_layouts_have_no_difference(tmp_path: Path, name: str, flags: str) -> None:
    if "--use_deepspeed" in flags:
        pytest.importorskip("deepspeed")
    check_right(tmp_path, name, flags.split())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flags"), LONG)
def test_long_sequences_have_no_difference(tmp_path: Path, name: str, flags: str) -> None:
    pytest.importorskip("transformers")
    ended = verify(tmp_path, "long_sequences", name, ["--steps", "5", *flags.split()])
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    assert "trains what the reference trains" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axis"), LONG_FAULTS)
def test_faults_in_long_sequences_are_found(tmp_path: Path, name: str, axis: str) -> None:
    ended = verify(tmp_path, "long_sequences", name, ["--steps", "5", *SHARDED[axis].split()])
    assert ended.returncode == 1, ended.stdout[-2000:] + ended.stderr[-3000:]
    finding = json.loads((tmp_path / "result.json").read_text())["findings"][0]
    assert finding["what"] == "loss"
    cause = (
        "divided by the number of processes" if "divided" in name else "Each rank has a part of the sequences"
    )
    assert cause in finding["cause"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_have_no_difference(tmp_path: Path, name: str) -> None:
    command = [*VERIFY, "--num_processes", "2", str(EXAMPLES_FOLDER / name)]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    assert "trains what the reference trains" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_faults_are_found(tmp_path: Path, name: str) -> None:
    check_fault(tmp_path, name)


@pytest.mark.slow
def test_two_launches_are_compared(tmp_path: Path) -> None:
    check_right(tmp_path, "plain", ["--num_processes", "4", "--against", "--cpu --num_processes 2"])


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_replica_groups_have_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    pytest.importorskip("torchft")
    killed = tmp_path / "killed"
    monkeypatch.setenv("KILLED_FILE", str(killed))
    if not is_killed:
        killed.touch()
    ended = verify(tmp_path, "killed", "", ["--steps", "30", "--replicas", "2"])
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert killed.exists()


@pytest.mark.parametrize(
    ("flags", "text", "message"),
    [
        (["--steps", "0"], "print(1)", "at least one step is compared"),
        (["--num_machines", "2", "--machine_rank", "0"], "print(1)", "compared on one machine"),
        ([], "print(1)", "took no optimizer step"),
        (["--steps", "x"], "print(1)", "invalid int value"),
        (["--no_python"], "print(1)", "only Python scripts and modules are recorded"),
        (["--json", "absent/result.json"], "print(1)", "cannot be written: No such file or directory"),
        (["--json", "."], "print(1)", "--json . is a folder"),
        (["--tolerance", "nan"], "print(1)", "--tolerance=nan: it is a factor above 0"),
        (["--against", "--num_processes 'x"], "print(1)", "No closing quotation"),
        (["--against", "nonsense"], "print(1)", "'nonsense' is not a flag of accelerate launch"),
        (["--against", "--nonsense 3"], "print(1)", "--nonsense"),
    ],
)
def test_wrong_use_has_one_error(tmp_path: Path, flags: list[str], text: str, message: str) -> None:
    (tmp_path / "train.py").write_text(text)
    command = [*VERIFY, *flags, "train.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
