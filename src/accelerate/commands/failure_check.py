"""Check of `accelerate test --failures`, which compares a run with failures with an undisturbed run."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.base import (
    CheckpointError,
    ConfigurationError,
    LaunchError,
    RecoveryError,
    environ,
    wrong_value,
)
from accelerate.commands.launch import launch_command_parser, make_plan, read_settings
from accelerate.launch import LAUNCH_COMMAND, choose_cpu_or_devices, choose_launcher, look, run_child
from accelerate.settings.sections import LaunchSection, RecoverySection

SCRIPT = "accelerate.test_utils.scripts.test_failures"
PLACES = ("between steps", "backward", "optimizer.step", "save_state")
"""Places of failures in the script, in this order."""

LAUNCHERS = (None, "replicas")
"""Launchers that start processes again, where None is that of this machine."""

TOLERANCES = {"no": 1e-6}
"""Mixed precision -> largest accepted difference of weights, which are about 0.1."""

ROUNDED_TOLERANCE = 1e-4
"""That of other mixed precisions, where another order of sums changes the rounding to 16 or 8 bits."""

FILE_WIDTH = 120  # columns of a table that is not printed to a terminal


class Step(NamedTuple):
    """Step that one process took."""

    process: str  # replica group and rank
    attempt: int  # how often all processes had been started again
    number: int  # in the run, from 1
    epoch: int  # number of the pass over the data
    samples: tuple[int, ...]  # indices of the samples that this process trained in it
    time: float  # in seconds since the epoch


class Failure(NamedTuple):
    """End of one process."""

    place: str  # what the process did
    process: str  # replica group and rank
    attempt: int  # how often all processes had been started again
    time: float  # in seconds since the epoch


@dataclass(frozen=True)
class Run:
    """Steps, failures and final weights of a run."""

    steps: list[Step]  # steps of each process, in the order of time
    failures: list[Failure]  # failures, in the order of time
    # How often all processes had been started again -> step after which they continued.
    starts: Mapping[int, int] = field(default_factory=dict)
    weights: Sequence[Mapping[str, Sequence[float]]] = ()  # final weights of each replica group, by name


class Resumption(NamedTuple):
    """Failure, and how the run went on."""

    failure: Failure
    seconds: float  # time until the next step, or NaN
    again: int  # number of steps that were computed again


class Comparison(NamedTuple):
    """Difference of a run with failures from an undisturbed run."""

    lost: int  # number of samples that only the undisturbed run trained
    repeated: int  # number of samples that the run with failures trained in addition
    difference: float  # largest difference of the final weights
    resumptions: list[Resumption]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Returns the events in the log of a process."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_weights(folder: Path) -> list[dict[str, list[float]]]:
    """Returns the final weights of each replica group."""
    ends = sorted(folder.glob("end-*.json"))
    return [json.loads(path.read_text(encoding="utf-8"))["weights"] for path in ends]


def parse(events: Iterable[Mapping[str, Any]], weights: Sequence[Mapping[str, Sequence[float]]] = ()) -> Run:
    """Returns the run that the events of its processes describe."""
    steps, failures, starts = [], [], dict[int, int]()
    for event in sorted(events, key=lambda event: event["time"]):
        process, attempt, time = event["process"], event["attempt"], event["time"]
        if event["event"] == "start":
            starts.setdefault(attempt, event["step"])
        elif event["event"] == "step":
            samples = tuple(event["samples"])
            steps.append(Step(process, attempt, event["step"], event["epoch"], samples, time))
        else:
            failures.append(Failure(event["place"], process, attempt, time))
    return Run(steps, failures, starts, weights)


def compare(expected: Run, actual: Run) -> Comparison:
    """Compares a run with failures with an undisturbed run."""
    kept = kept_steps(actual)
    trained, wanted = _count_samples(kept), _count_samples(kept_steps(expected))
    differences = [difference_of(expected.weights[0], weights) for weights in actual.weights]
    return Comparison(
        lost=(wanted - trained).total(),
        repeated=(trained - wanted).total(),
        difference=max(differences, default=math.inf),
        resumptions=[
            Resumption(failure, _seconds_to_next(failure, actual), _count_again(failure, actual))
            for failure in actual.failures
        ],
    )


def kept_steps(run: Run) -> list[Step]:
    """Returns the steps that are part of the result, which are those before a checkpoint that was loaded."""
    limits = {
        attempt: min((step for later, step in run.starts.items() if later > attempt), default=math.inf)
        for attempt in run.starts
    }
    return [step for step in run.steps if step.number <= limits.get(step.attempt, math.inf)]


def _count_samples(steps: Iterable[Step]) -> Counter[tuple[int, int]]:
    return Counter((step.epoch, sample) for step in steps for sample in step.samples)


def _seconds_to_next(failure: Failure, run: Run) -> float:
    """Returns the time until the next step, which is that of a checkpoint if all processes start again.

    The last step of the process that failed does not count, which other processes may take a moment later.
    """
    own = [step for step in run.steps if step.process == failure.process and step.time <= failure.time]
    last = (own[-1].attempt, own[-1].number) if own else None
    limit = run.starts.get(failure.attempt + 1, math.inf)
    times = (
        step.time
        for step in run.steps
        if step.time > failure.time
        and (step.attempt, step.number) != last
        and (step.attempt > failure.attempt or step.number <= limit)
    )
    return min(times, default=math.nan) - failure.time


def _count_again(failure: Failure, run: Run) -> int:
    """Returns the number of steps that all processes computed again after they were started again."""
    start = run.starts.get(failure.attempt + 1)
    if start is None:
        return 0
    reached = max((step.number for step in run.steps if step.attempt == failure.attempt), default=start)
    return max(reached - start, 0)


def difference_of(expected: Mapping[str, Sequence[float]], actual: Mapping[str, Sequence[float]]) -> float:
    """Returns the largest difference of two states, which is infinite if names or sizes differ."""
    sizes, actual_sizes = ({name: len(values) for name, values in w.items()} for w in (expected, actual))
    if sizes != actual_sizes:
        return math.inf
    differences = [abs(a - b) for name in expected for a, b in zip(expected[name], actual[name], strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences, default=0.0)


def check_failures(words: Sequence[str]) -> None:
    """Launches both runs, compares them, and prints a table.

    Raises a `RecoveryError` if the run with failures has another result, or without replica groups a
    `CheckpointError`. `words` are options of `accelerate launch`.
    """
    has_groups = _check_configuration(words)
    words = [*words, *([] if has_groups else ["--max_restarts", str(len(PLACES))])]
    with tempfile.TemporaryDirectory(prefix="accelerate-failures-") as name:
        about, expected = _run(words, Path(name) / "undisturbed", ())
        _, actual = _run(words, Path(name) / "failures", PLACES)
    comparison = compare(expected, actual)
    precision = about["mixed_precision"]
    tolerance = TOLERANCES.get(precision, ROUNDED_TOLERANCE)
    _print_table(about, comparison, has_groups)
    print(
        f"samples lost: {comparison.lost}\n"
        f"samples repeated in committed steps: {comparison.repeated}\n"
        f"largest difference of the final weights: {comparison.difference:.1e} (at most {tolerance:.0e} is "
        f"accepted with mixed_precision={precision})"
    )
    if problems := find_problems(comparison, tolerance):
        error = RecoveryError if has_groups else CheckpointError
        raise error(
            f"A run with failures does not have the result of an undisturbed run: {', '.join(problems)}."
        )
    print("A run with failures has the result of an undisturbed run on this machine.")


def _check_configuration(words: Sequence[str]) -> bool:
    """Returns whether a configuration has replica groups, and raises an error if it cannot be tested."""
    args = launch_command_parser().parse_args([*words, "--module", SCRIPT])
    settings = choose_cpu_or_devices(read_settings(args))
    launcher = choose_launcher(settings, look(environ.current(), cpu=settings[LaunchSection].cpu))
    if launcher not in LAUNCHERS:
        raise ConfigurationError(
            "--failures needs processes that this machine starts again after a failure, and this "
            f"configuration uses the {launcher} launcher. Use a configuration that runs on this machine only."
        )
    _check_machines(settings[LaunchSection].num_machines)
    plan, _ = make_plan(args)
    _check_machines(plan.machines)
    replicas = settings[RecoverySection].replicas
    if replicas == 1:
        fix = "Use at least 2, or leave it out to test restarts"
        raise wrong_value("replicas", replicas, "no other replica group continues after a failure", fix)
    return replicas is not None


def _check_machines(count: int) -> None:
    if count > 1:
        fix = "Use a configuration of one machine"
        raise wrong_value("num_machines", count, "--failures runs on one machine", fix)


def _run(words: Sequence[str], folder: Path, places: Sequence[str]) -> tuple[dict[str, Any], Run]:
    """Launches one run, and returns facts about it and what it did."""
    kind = "run with failures" if places else "undisturbed run"
    print(f"{kind}{', which prints their errors' if places else ''} ...", flush=True)
    folder.mkdir()
    command = [*LAUNCH_COMMAND, *words, "--module", SCRIPT, str(folder), *places]
    if code := run_child(command, {}).code:
        raise LaunchError(f"The {kind} ended with exit code {code}. Its output is above.")
    events = (event for path in folder.glob("log-*") for event in read_events(path))
    run = parse(events, read_weights(folder))
    if len(run.failures) < len(places) or not run.weights:
        raise LaunchError(
            f"Only {len(run.failures)} of {len(places)} failures happened before the run ended, because its "
            "processes take too long to start. Try again while this machine is idle."
        )
    return json.loads(next(folder.glob("end-*")).read_text(encoding="utf-8")), run


def find_problems(comparison: Comparison, tolerance: float) -> list[str]:
    """Returns the differences that are not accepted, as text."""
    problems = {
        f"{comparison.lost} samples are lost": comparison.lost > 0,
        f"{comparison.repeated} samples are repeated": comparison.repeated > 0,
        f"weights differ by {comparison.difference:.1e}": comparison.difference > tolerance,
    }
    return [text for text, is_true in problems.items() if is_true]


def _print_table(about: Mapping[str, Any], comparison: Comparison, has_groups: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{about['processes']} process(es) on {about['device']}, {about['kind']}"
    table = Table(title=f"{title}, mixed_precision={about['mixed_precision']}")
    table.add_column("killed in")
    table.add_column("replica group" if has_groups else "rank", justify="right")
    table.add_column("next committed step after", justify="right")
    if not has_groups:
        table.add_column("steps computed again", justify="right")
    for failure, seconds, again in comparison.resumptions:
        group, _, rank = failure.process.partition(".")
        row = [failure.place, group if has_groups else rank, f"{seconds:.2f} s"]
        table.add_row(*row, *([] if has_groups else [str(again)]))
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)
