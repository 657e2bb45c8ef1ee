"""`accelerate test`: what is launched; any difference between records of runs is named and is an error."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from accelerate.base import CheckpointError, LaunchError
from accelerate.commands import test as command
from accelerate.commands.test import SAME, compare
from accelerate.launch.children import ChildExit


def test_the_self_check_is_launched_as_a_script_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(command, "launch_command", launched.append)
    command.test_command(command.test_command_parser().parse_args(["--config_file", "mine.yaml"]))
    (args,) = launched
    assert (args.config_file, args.module, args.training_script) == ("mine.yaml", True, command.SCRIPT)


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--resume"], []), (["--resume", "--config_file", "mine.yaml"], ["--config_file", "mine.yaml"])],
)
def test_resume_calls_check_resume(
    monkeypatch: pytest.MonkeyPatch, words: list[str], expected: list[str]
) -> None:
    checked: list[Sequence[str]] = []
    monkeypatch.setattr(command, "check_resume", checked.append)
    command.test_command(command.test_command_parser().parse_args(words))
    assert checked == [expected]


STEPS = [[0, 0, [4, 2]], [0, 1, [1, 3]], [1, 0, [2, 2]]]
WEIGHTS = {"a": [0.5, -1.25], "b": [3.0]}


def record(steps: list[Any], weights: dict[str, list[float]]) -> dict[str, Any]:
    case = {"name": "shuffled", "workers": 2, "steps": steps, "weights": weights}
    case = copy.deepcopy(case)
    about = {"processes": 2, "device": "cpu", "kind": "MULTI_CPU", "mixed_precision": "no"}
    return {**about, "cases": {"shuffled, 2 workers": case}}


def records() -> tuple[list[Any], list[Any], list[Any]]:
    """Whole, interrupted and resumed runs of two processes."""
    return (
        [record(STEPS, WEIGHTS) for _ in range(2)],
        [record(STEPS[:2], {}) for _ in range(2)],
        [record(STEPS[2:], WEIGHTS) for _ in range(2)],
    )


def swap_samples(case: dict[str, Any]) -> None:
    case["steps"][0][2].reverse()
    case["steps"][0][2][0] = 9


def repeat_a_batch(case: dict[str, Any]) -> None:
    case["steps"].append([1, 1, [0]])


def move_a_weight(case: dict[str, Any]) -> None:
    case["weights"]["a"][1] += 2**-30


def lose_a_weight(case: dict[str, Any]) -> None:
    del case["weights"]["b"]


def forget_the_steps(case: dict[str, Any]) -> None:
    case["steps"].clear()


@pytest.mark.parametrize(
    ("change", "samples", "weights"),
    [
        (swap_samples, "rank 1: differ from epoch 1, batch 0 on", SAME),
        (repeat_a_batch, "rank 1: 4 batches instead of 3", SAME),
        (forget_the_steps, "rank 1: 2 batches instead of 3", SAME),
        (move_a_weight, SAME, "rank 1: differ by up to 9.3e-10 (a)"),
        (lose_a_weight, SAME, "rank 1: have other names or sizes"),
    ],
)
def test_a_difference_on_one_rank_is_found(
    change: Callable[[dict[str, Any]], None], samples: str, weights: str
) -> None:
    whole, interrupted, resumed = records()
    change(resumed[1]["cases"]["shuffled, 2 workers"])
    (verdict,) = compare(whole, interrupted, resumed)
    assert (verdict.samples, verdict.weights) == (samples, weights)
    assert not verdict.is_same


def pretend(monkeypatch: pytest.MonkeyPatch, runs: dict[str, list[Any]], code: int = 0) -> None:
    """Let a launch only leave the records of a run."""

    def run_child(words: list[str], added: dict[str, str]) -> ChildExit:
        run, folder = words[-2:]
        for rank, each in enumerate(runs[run]):
            (Path(folder) / f"{run}_{rank}.json").write_text(json.dumps(each))
        return ChildExit(code if run == "resumed" else 0, 0)

    monkeypatch.setattr(command, "run_child", run_child)


def test_a_difference_is_shown_and_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, interrupted, resumed = records()
    move_a_weight(resumed[0]["cases"]["shuffled, 2 workers"])
    pretend(monkeypatch, dict(zip(command.RUNS, (whole, interrupted, resumed), strict=True)))
    with pytest.raises(CheckpointError, match=r"not the same run .* shuffled \(2 workers\)"):
        command.check_resume([])
    out = capsys.readouterr().out
    assert "2 process(es) on cpu, MULTI_CPU" in out
    assert "differ by up to 9.3e-10 (a)" in out


def test_a_run_that_fails_or_leaves_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = dict(zip(command.RUNS, records(), strict=True))
    pretend(monkeypatch, runs, code=3)
    with pytest.raises(LaunchError, match="The resumed run ended with exit code 3"):
        command.check_resume([])
    pretend(monkeypatch, {**runs, "interrupted": []})
    with pytest.raises(LaunchError, match="The interrupted run left no record"):
        command.check_resume([])


BREAKER = "import accelerate.rng\naccelerate.rng.restore = lambda states: None\n"
"""Random generators are not restored: what the check is there to find."""


def run_command(folder: Path, config: str, path: Path) -> subprocess.CompletedProcess[str]:
    (folder / "config.yaml").write_text(f"use_cpu: true\n{config}")
    words = [sys.executable, "-m", "accelerate.commands.test", "--resume"]
    words += ["--config_file", str(folder / "config.yaml")]
    source = str(Path(command.__file__).parents[2])
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{path}:{source}"}
    return subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_run_matches_on_this_machine(tmp_path: Path, processes: int) -> None:
    config = f"num_processes: {processes}\nmain_process_port: 0\n"
    done = run_command(tmp_path, config, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{processes} process(es) on cpu" in done.stdout
    assert done.stdout.endswith("A run that is interrupted and resumed is the same run on this machine.\n")
    assert done.stdout.count("│ same ") == 22


@pytest.mark.slow
def test_a_run_that_does_not_resume_exactly_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAKER)
    done = run_command(tmp_path, "num_processes: 1\n", tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "accelerate: error: A run that is interrupted and resumed is not the same run" in done.stderr
    assert "differ by up to" in done.stdout
