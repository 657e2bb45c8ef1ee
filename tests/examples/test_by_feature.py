"""Each script of `examples/by_feature`, unchanged, on two processes and on one."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.utils import is_deepspeed_available

FOLDER = Path(__file__).parents[2] / "examples" / "by_feature"
SHARED = "digits_task"
ACCURACY = re.compile(r"^accuracy: (\d\.\d+)$", re.MULTILINE)
WANTED_ACCURACY = 0.93

# Script -> (its options for a quick run, what it prints beside the accuracy on two processes).
RUNS = {
    "ddp_comm_hook": ("--comm_hook power_sgd --comm_wrapper bf16", ""),
    "deepspeed_with_config": ("", ""),
    "early_stopping": ("--enough 0.1", r"stopped after epoch \d+\n"),
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
}


def launch(script: str, options: str, num_processes: int, flags: str = "") -> str:
    """Return what a script prints; suites may launch at once, so each launch has a port of its own."""
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_script_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*RUNS, SHARED}


@pytest.mark.parametrize("script", RUNS)
def test_two_processes(script: str) -> None:
    options, expected = RUNS[script]
    printed = launch(script, options, num_processes=2)
    accuracies = ACCURACY.findall(printed)
    assert len(accuracies) == 1, "the main process alone prints"
    assert float(accuracies[0]) >= WANTED_ACCURACY
    assert re.search(expected, printed)


def test_one_process() -> None:
    """The same script makes as many updates from twice as many batches when it is alone."""
    printed = launch("gradient_accumulation", "--gradient_accumulation_steps 6", num_processes=1)
    assert "2160 batches on each process made 360 updates" in printed
    assert float(ACCURACY.findall(printed)[0]) >= WANTED_ACCURACY


@pytest.mark.slow
@pytest.mark.parametrize("settings", [f"--deepspeed_config_file {FOLDER / 'zero2.json'}", "--zero_stage 3"])
def test_deepspeed(settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_deepspeed_available():
        pytest.skip("deepspeed is not installed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    printed = launch("deepspeed_with_config", "", num_processes=2, flags=f"--use_deepspeed {settings}")
    assert float(ACCURACY.findall(printed)[0]) >= WANTED_ACCURACY
