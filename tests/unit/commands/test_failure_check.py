"""`accelerate test --failures`: the comparison of both runs, and configurations that cannot be tested."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from accelerate.base import AccelerateError, CheckpointError, LaunchError, RecoveryError
from accelerate.commands import failure_check as check, test as command
from accelerate.commands.failure_check import Failure, Run, Step, compare, find_problems
from accelerate.launch.children import ChildExit

WEIGHTS = {"a": [0.5, -1.25], "b": [3.0]}


def step(number: int, time: float, process: str = "0.0", attempt: int = 0) -> Step:
    """Step of one process, which trains two samples of its own."""
    first = 100 * int(process[0]) + 10 * int(process[-1]) + 2 * number
    return Step(process, attempt, number, 0, (first, first + 1), time)


def undisturbed(processes: Sequence[str] = ("0.0",), count: int = 6) -> Run:
    steps = [step(number, float(number), process) for number in range(1, count + 1) for process in processes]
    return Run(steps, [], {0: 0}, [WEIGHTS])


def restarted() -> Run:
    """Run whose process ends after step 3 and goes on from a checkpoint of step 2."""
    steps = [step(number, float(number)) for number in (1, 2, 3)]
    steps += [step(number, number + 7.0, attempt=1) for number in (3, 4, 5, 6)]
    return Run(steps, [Failure("backward", "0.0", 0, 3.5)], {0: 0, 1: 2}, [WEIGHTS])


def joined() -> Run:
    """Run of two replica groups, of which the second one ends in step 3 and joins again in step 5."""
    steps = [step(number, float(number), process) for number in (1, 2) for process in ("0.0", "1.0")]
    steps += [step(number, number + 1.5) for number in (3, 4, 5, 6)]
    steps += [step(number, number + 1.5, "1.0")._replace(process="0.0") for number in (3, 4)]
    steps += [step(number, number + 1.5, "1.0") for number in (5, 6)]
    return Run(steps, [Failure("between steps", "1.0", 0, 2.25)], {0: 0}, [WEIGHTS, WEIGHTS])


def test_steps_after_the_loaded_checkpoint_are_computed_again() -> None:
    found = compare(undisturbed(), restarted())
    assert (found.lost, found.repeated, found.difference) == (0, 0, 0.0)
    ((failure, seconds, again),) = found.resumptions
    assert (failure.place, seconds, again) == ("backward", 6.5, 1)
    assert find_problems(found, 1e-6) == []


def test_replica_groups_compute_no_step_again() -> None:
    found = compare(undisturbed(("0.0", "1.0")), joined())
    assert (found.lost, found.repeated, found.difference) == (0, 0, 0.0)
    ((_, seconds, again),) = found.resumptions
    assert (seconds, again) == (2.25, 0)


def test_the_step_in_which_a_process_ends_is_not_the_next_one() -> None:
    run = joined()
    taken = step(2, 2.3)  # by another group, a moment after the process has ended in its step
    failed = Run([*run.steps, taken], run.failures, run.starts, run.weights)
    assert compare(undisturbed(("0.0", "1.0")), failed).resumptions[0].seconds == 2.25


def test_a_run_that_takes_no_further_step_has_no_time() -> None:
    run = undisturbed()
    failed = Run(run.steps, [Failure("save_state", "0.0", 0, 6.5)], run.starts, run.weights)
    assert math.isnan(compare(run, failed).resumptions[0].seconds)


def test_samples_that_are_lost_or_repeated_are_counted() -> None:
    run = restarted()
    without = Run([each for each in run.steps if each.number != 5], run.failures, run.starts, run.weights)
    assert compare(undisturbed(), without)[:2] == (2, 0)
    late = Run(run.steps, run.failures, {0: 0, 1: 3}, run.weights)  # step 3 is part of the checkpoint
    found = compare(undisturbed(), late)
    assert found[:2] == (0, 2)
    assert find_problems(found, 1e-6) == ["2 samples are repeated"]


@pytest.mark.parametrize(
    ("weights", "difference"),
    [
        ([WEIGHTS, {"a": [0.5, -1.2], "b": [3.0]}], pytest.approx(0.05)),
        ([{"a": [0.5, math.nan], "b": [3.0]}], math.inf),
        ([{"a": [0.5, -1.25]}], math.inf),
        ([], math.inf),
    ],
)
def test_weights_of_each_replica_group_are_compared(weights: list[Any], difference: float) -> None:
    run = undisturbed()
    found = compare(run, Run(run.steps, [], run.starts, weights))
    assert found.difference == difference
    assert find_problems(found, 1e-6) == [f"weights differ by {found.difference:.1e}"]


def write(folder: Path, run: Run, precision: str = "no") -> None:
    """Writes the files that the processes of a run leave."""
    events = [
        {"event": "start", "process": "0.0", "attempt": attempt, "time": 0.0, "step": number}
        for attempt, number in run.starts.items()
    ]
    for process, attempt, number, epoch, samples, time in run.steps:
        about = {"event": "step", "process": process, "attempt": attempt, "time": time}
        events.append({**about, "step": number, "epoch": epoch, "samples": samples})
    for place, process, attempt, time in run.failures:
        about = {"event": "failure", "process": process, "attempt": attempt, "time": time}
        events.append({**about, "place": place, "step": 0})
    (folder / "log-0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    facts = {"processes": 1, "device": "cpu", "kind": "NO", "mixed_precision": precision}
    for number, weights in enumerate(run.weights):
        (folder / f"end-{number}.json").write_text(json.dumps({**facts, "weights": weights}))


def pretend(
    monkeypatch: pytest.MonkeyPatch, disturbed: Run, code: int = 0, precision: str = "no"
) -> list[Any]:
    """Lets a launch only leave the files of a run, and returns the commands."""
    commands = []

    def run_child(words: list[str], added: dict[str, str]) -> ChildExit:
        commands.append(words)
        at = words.index(check.SCRIPT) + 1
        has_failures = len(words) > at + 1
        write(Path(words[at]), disturbed if has_failures else undisturbed(), precision)
        return ChildExit(code if has_failures else 0, 0)

    monkeypatch.setattr(check, "run_child", run_child)
    monkeypatch.setattr(check, "PLACES", ("backward",))
    return commands


CPU = "use_cpu: true\n"


def config(folder: Path, text: str = "", processes: int = 1) -> list[str]:
    path = folder / "config.yaml"
    default = "" if "num_processes" in text else f"num_processes: {processes}\n"
    path.write_text(CPU + default + text)
    return ["--config_file", str(path)]


def test_a_run_that_restarts_is_launched_with_restarts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = pretend(monkeypatch, restarted())
    check.check_failures(config(tmp_path))
    assert [words[words.index("--max_restarts") + 1] for words in commands] == ["1", "1"]
    out = capsys.readouterr().out
    assert "│ backward  │    0 │                    6.50 s │                    1 │" in out
    assert "samples lost: 0\nsamples repeated in committed steps: 0\n" in out
    assert "0.0e+00 (at most 1e-06 is accepted with mixed_precision=no)" in out


def test_a_difference_is_an_error_after_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = restarted()
    pretend(monkeypatch, Run(run.steps[:-1], run.failures, run.starts, run.weights))
    with pytest.raises(CheckpointError, match=r"undisturbed run: 2 samples are lost\.$"):
        check.check_failures(config(tmp_path))
    assert "samples lost: 2\n" in capsys.readouterr().out


@pytest.mark.parametrize(("precision", "is_accepted"), [("no", False), ("bf16", True)])
def test_mixed_precision_decides_which_weights_are_equal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, precision: str, is_accepted: bool
) -> None:
    run = restarted()
    moved = {**WEIGHTS, "b": [3.0 + 2e-5]}
    pretend(monkeypatch, Run(run.steps, run.failures, run.starts, [moved]), precision=precision)
    if is_accepted:
        check.check_failures(config(tmp_path))
    else:
        with pytest.raises(CheckpointError, match=r"weights differ by 2\.0e-05"):
            check.check_failures(config(tmp_path))


def test_a_run_that_fails_or_has_too_few_failures_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, restarted(), code=3)
    with pytest.raises(LaunchError, match="The run with failures ended with exit code 3"):
        check.check_failures(config(tmp_path))
    run = restarted()
    pretend(monkeypatch, Run(run.steps, [], run.starts, run.weights))
    with pytest.raises(LaunchError, match="Only 0 of 1 failures happened"):
        check.check_failures(config(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_machines: 2\nmain_process_ip: 10.0.0.1\n", "num_machines=2: --failures runs on one machine"),
        ("mpirun_config:\n  mpirun_hostfile: hosts\n", "uses the mpi launcher"),
        ("compute_environment: AMAZON_SAGEMAKER\n", "uses the sagemaker launcher"),
    ],
)
def test_configurations_without_processes_to_start_again_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(AccelerateError, match=message):
        check.check_failures(config(tmp_path, text, processes=2))


def test_one_replica_group_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    with pytest.raises(AccelerateError, match="replicas=1: no other replica group continues"):
        check.check_failures(config(tmp_path, "replicas: 1\n"))


def test_replica_groups_are_launched_without_restarts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchft")
    commands = pretend(monkeypatch, joined())
    with pytest.raises(RecoveryError, match="12 samples are repeated"):  # the undisturbed run has one group
        check.check_failures(config(tmp_path, "replicas: 2\n", processes=2))
    assert all("--max_restarts" not in words for words in commands)
    assert "│ between steps │             1 │                    2.25 s │" in capsys.readouterr().out


def test_failures_and_resume_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.test_command_parser().parse_args(["--failures", "--resume"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_the_command_checks_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Sequence[str]] = []
    monkeypatch.setattr(command, "check_failures", checked.append)
    command.test_command(
        command.test_command_parser().parse_args(["--failures", "--config_file", "mine.yaml"])
    )
    assert checked == [["--config_file", "mine.yaml"]]


def run_command(folder: Path, text: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    source = Path(command.__file__).parents[2]
    environment = {
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{path or folder}:{source}",
        "TMPDIR": str(folder),
    }
    words = [sys.executable, "-m", "accelerate.commands.test", "--failures"]
    words += config(folder, f"main_process_port: 0\n{text}")
    return subprocess.run(
        words, capture_output=True, text=True, timeout=300, env=environment, cwd=folder, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "num_processes: 2\n", "num_processes: 2\nreplicas: 2\n"])
def test_nothing_is_lost_on_this_machine(tmp_path: Path, text: str) -> None:
    if "replicas" in text:
        pytest.importorskip("torchft")
    done = run_command(tmp_path, text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"│ {place}" in done.stdout for place in check.PLACES)
    assert done.stdout.endswith("has the result of an undisturbed run on this machine.\n")


BREAKER = "import accelerate.rng\naccelerate.rng.restore = lambda states: None\n"
"""Random generators are not restored, so a run that restarts has other weights."""


@pytest.mark.slow
def test_a_run_that_does_not_restart_exactly_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAKER)
    done = run_command(tmp_path, "")
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("accelerate: error: A run with failures does not have the result")
    assert "weights differ by" in last
