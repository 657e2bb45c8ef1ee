"""`examples/gpt.py`, unchanged: one script, and the launch command alone selects the parallel layout."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "gpt.py"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--main_process_port", "0"]
TWO = ["--num_processes", "2"]
SHARDED = ["--use_fsdp", "--fsdp_version", "2"]
MESH = ["--use_parallelism_config"]
LINE = re.compile(r"^step +(\d+): loss ([\d.]+)$", re.MULTILINE)

WAYS = {
    "DDP": [*TWO],
    "FSDP2": [*TWO, *SHARDED],
    "FSDP1": [*TWO, "--use_fsdp"],
    "TP": [*TWO, *MESH, "--parallelism_config_tp_size", "2"],
    "CP": [*TWO, *MESH, "--parallelism_config_cp_size", "2"],
    "FSDP2+TP": [
        *("--num_processes", "4", *SHARDED, *MESH),
        *("--parallelism_config_dp_shard_size", "2", "--parallelism_config_tp_size", "2"),
    ],
    "FSDP2+CP": [
        *("--num_processes", "4", *SHARDED, *MESH),
        *("--parallelism_config_dp_shard_size", "2", "--parallelism_config_cp_size", "2"),
    ],
}
PIPELINE = [*MESH, "--parallelism_config_pp_size", "2"]
WAYS |= {
    "PP": [*TWO, *PIPELINE, "--parallelism_config_pp_schedule", "zbvzerobubble"],
    "PP+FSDP2": [
        *("--num_processes", "4", *SHARDED, *PIPELINE),
        *("--parallelism_config_dp_shard_size", "2"),
    ],
    "PP+TP": ["--num_processes", "4", *PIPELINE, "--parallelism_config_tp_size", "2"],
}


def losses(*command: str, options: Sequence[str] = ()) -> list[float]:
    done = subprocess.run(
        [*command, str(SCRIPT), "--steps", "31", *options], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = LINE.findall(done.stdout)
    assert [int(step) for step, _ in found] == [0, 10, 20, 30]
    return [float(loss) for _, loss in found]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of one process."""
    found = losses(sys.executable)
    assert found[-1] < 0.6 * found[0]  # it learns
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_losses_are_those_of_one_process(alone: list[float], way: str) -> None:
    assert losses(*LAUNCH, *WAYS[way]) == pytest.approx(alone, abs=2e-3)


def mean_of_last(*options: str) -> float:
    command = [*LAUNCH, *TWO, str(SCRIPT), "--steps", "960", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (mean,) = re.findall(r"^mean of the last 100 losses: ([\d.]+)$", done.stdout, re.MULTILINE)
    return float(mean)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loss_of_diloco_with_30_inner_steps_is_within_1_percent_of_ddp() -> None:
    assert mean_of_last("--diloco", "30") <= 1.01 * mean_of_last()


EXPERT_WAYS = {
    "EP": [*TWO, *MESH, "--parallelism_config_ep_size", "2"],
    "EP+FSDP2": [
        *("--num_processes", "4", *SHARDED, *MESH),
        *("--parallelism_config_ep_size", "2", "--parallelism_config_dp_shard_size", "2"),
    ],
    "PP": [*TWO, *PIPELINE],
    "PP+EP": ["--num_processes", "4", *PIPELINE, "--parallelism_config_ep_size", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", EXPERT_WAYS)
def test_a_mixture_of_experts_trains_as_on_one_process(way: str) -> None:
    alone = losses(sys.executable, options=["--experts", "4"])
    found = losses(*LAUNCH, *EXPERT_WAYS[way], options=["--experts", "4"])
    assert found == pytest.approx(alone, abs=2e-3)
