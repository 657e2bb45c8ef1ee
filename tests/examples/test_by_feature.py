"""Each script of `examples/by_feature`, unchanged, on two processes and on one.

Most run in forked ranks; some are started by the launcher.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerate.utils import is_deepspeed_available

from .scripts import run_script

FOLDER = Path(__file__).parents[2] / "examples" / "by_feature"
SHARED = "digits_task"
ACCURACY = re.compile(r"^accuracy: (\d\.\d+)$", re.MULTILINE)
WANTED_ACCURACY = 0.93
LAUNCHED = "early_stopping"
IN_GATE = ("distributed_inference",)
"""The script that runs on two processes outside the slow part too."""

RunRanks = Callable[..., str]

# Script -> (its options for a quick run, what it prints beside the accuracy on two processes).
RUNS = {
    "big_model_inference": ("--num_epochs 15", r"cpu .* 0, 1\.0\ndisk .* 2\.0, 3\.0, 4\.0, 5\n"),
    "checkpointing": ("", "0 epochs are done"),
    "cross_validation": ("--num_epochs 8", "fold 2: 479 images"),
    "ddp_comm_hook": ("--comm_hook power_sgd --comm_wrapper bf16", ""),
    "deepspeed_with_config": ("", ""),
    "distributed_inference": ("", "180 of 360 images on the first process"),
    "early_stopping": ("--enough 0.1", r"stopped after epoch \d+\n"),
    "exact_metrics": ("", "364 images were seen, 360 are counted"),
    "fully_sharded": ("", r"4805 of 9610 parameters .*\n(.*\n)*a plain model took 4 tensors"),
    "gradient_accumulation": (
        "--gradient_accumulation_steps 3",
        r"1080 batches on each process made 360 updates\n",
    ),
    "local_sgd": ("--local_sgd_steps 4", ""),
    "memory": (
        "--batch_size 64 --pretend_limit 16",
        "".join(f"trying batches of {n}\n" for n in (64, 32, 16)),
    ),
    "multiple_models": ("", ""),
    "pipeline_inference": ("", "stages begin with: 2"),
    "profiler": ("", r"traces: 2\nrank 0: \d+ MiB\nrank 1: \d+ MiB"),
    "tracking": ("--log_with tensorboard", ""),
}


def launch(script: str, options: str, num_processes: int, folder: Path, flags: str = "") -> str:
    """Return what a script prints that runs in `folder`, with a port of its own: suites launch at once."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        str(num_processes),
    ]
    command += ["--main_process_port", str(port)] if num_processes > 1 else []
    command += flags.split()
    command += [str(FOLDER / f"{script}.py"), *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_script_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*RUNS, SHARED}


def test_every_script_is_in_the_docs() -> None:
    page = (FOLDER.parents[1] / "docs" / "tutorials" / "examples.md").read_text()
    scripts = [path.name for path in (*FOLDER.glob("*.py"), *FOLDER.parent.glob("*.py"))]
    assert [name for name in scripts if name != f"{SHARED}.py" and f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    "script", [pytest.param(script, marks=[] if script in IN_GATE else [pytest.mark.slow]) for script in RUNS]
)
def test_two_processes(run_ranks: RunRanks, script: str) -> None:
    options, expected = RUNS[script]
    check_output(run_ranks(FOLDER / f"{script}.py", *options.split()), expected)


@pytest.mark.slow
def test_launched_on_two_processes(tmp_path: Path) -> None:
    options, expected = RUNS[LAUNCHED]
    check_output(launch(LAUNCHED, options, 2, tmp_path), expected)


def check_output(printed: str, expected: str) -> None:
    accuracies = ACCURACY.findall(printed)
    assert len(accuracies) == 1, "the main process alone prints"
    assert float(accuracies[0]) >= WANTED_ACCURACY
    assert re.search(expected, printed)


def test_one_process(end: Callable[..., Any]) -> None:
    """On one process the same script makes the same number of updates from twice as many batches."""
    script = str(FOLDER / "gradient_accumulation.py")
    ended = end(run_script, script, "--gradient_accumulation_steps", "6", processes=1)
    (printed,) = ended.outputs
    assert ended.codes == [0], printed
    assert "2160 batches on each process made 360 updates" in printed
    assert float(ACCURACY.findall(printed)[0]) >= WANTED_ACCURACY


@pytest.mark.slow
def test_a_resumed_script_ends_with_the_weights_of_one_run(run_ranks: RunRanks, tmp_path: Path) -> None:
    script, whole, parts = FOLDER / "checkpointing.py", str(tmp_path / "whole"), str(tmp_path / "parts")
    undisturbed = run_ranks(script, "--project_dir", whole, "--num_epochs", "2")
    run_ranks(script, "--project_dir", parts, "--num_epochs", "1")
    rest = run_ranks(script, "--project_dir", parts, "--num_epochs", "2", "--resume")
    assert "1 epochs are done" in rest
    assert ACCURACY.findall(rest) == ACCURACY.findall(undisturbed)


@pytest.mark.slow
def test_tracked_values_are_in_the_folder(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    printed = launch("tracking", "--log_with tensorboard --num_epochs 2", 1, tmp_path)
    events = EventAccumulator(str(tmp_path / "runs" / "tracking" / "digits")).Reload()
    losses = [point.value for point in events.Scalars("loss")]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert f"{events.Scalars('accuracy')[-1].value:.3f}" == ACCURACY.findall(printed)[0]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [f"--deepspeed_config_file {FOLDER / 'zero2.json'}", "--zero_stage 3"])
def test_deepspeed(settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_deepspeed_available():
        pytest.skip("deepspeed is not installed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    printed = launch("deepspeed_with_config", "", 2, tmp_path, flags=f"--use_deepspeed {settings}")
    assert float(ACCURACY.findall(printed)[0]) >= WANTED_ACCURACY
