"""Run training whose processes fail at random moments, and compare with undisturbed training.

`python tests/chaos/run.py --failures 100` prints each failure with the time until the next committed step,
the largest difference of the weights, and the number of samples that were lost or repeated.
`--against restart` does the same with `--max_restarts` and checkpoints, and `--against torchft` with torchft
alone. `--order` chooses the order of the calls in the training loop.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from accelerate.commands.failure_check import (
    Comparison,
    Failure,
    Run,
    compare,
    difference_of,
    find_problems,
    kept_steps,
    parse,
    read_events,
    read_weights,
)
from chaos.orders import ORDERS

FOLDER = Path(__file__).parent
PAUSE = 0.1  # seconds in each step
STOP = 20.0  # seconds for which a process is stopped
LIMIT = 5.0  # seconds until the next committed step after a process was killed
IN_FLIGHT = 1.0  # seconds in which a step may be taken that began before a failure
TOLERANCE = 1e-6
TAIL = 1000  # bytes of a log that contain its last event
EPOCHS_OF_FAILURE = 8
PLACES = ("batch", "exit", "backward", "step", "save")
KINDS = ("kill", "kill", "two", "healing", "stop", *PLACES)
MECHANISMS = ("replicas", "restart", "torchft")


def make_command(mechanism: str, members: int, failures: int) -> list[str]:
    """Returns the command that trains with a mechanism."""
    if mechanism == "torchft":
        return [sys.executable, str(FOLDER / "torchft_script.py")]
    restarts = ("--num_processes", str(members), "--max_restarts", str(2 * failures + 10))
    options = ("--replicas", str(members)) if mechanism == "replicas" else restarts
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--main_process_port", "0"]
    return [*launch, *options, str(FOLDER / "script.py")]


class Training:
    """Launch of a script whose processes may fail."""

    def __init__(
        self, folder: Path, command: list[str], members: int, epochs: int, pause: float, **variables: str
    ) -> None:
        self.folder, self.members = folder, members
        folder.mkdir()
        path = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ,
            "CHAOS_FOLDER": str(folder),
            "CHAOS_EPOCHS": str(epochs),
            "CHAOS_MEMBERS": str(members),
            "CHAOS_PAUSE": str(pause),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path.rstrip(os.pathsep),
            "TMPDIR": str(folder),  # of the reports of failures
            **variables,
        }
        self.output = (folder / "output.txt").open("w")
        self.process = subprocess.Popen(command, env=environment, stdout=self.output, stderr=self.output)
        self.killed: list[Failure] = []

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, which is that of a signal if the run takes longer than the timeout."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            code = self.process.wait()
        self.output.close()
        return code

    def send(self, number: signal.Signals, kind: str, member: int) -> int:
        """Sends a signal to a process, and returns its id."""
        pid, attempt = map(int, (self.folder / f"pid-{member}").read_text().split())
        os.kill(pid, number)
        self.killed.append(Failure(kind, f"{member}.0", attempt, time.time()))
        return pid

    def read(self) -> Run:
        """Returns what the processes did, and all failures."""
        logs = [read_events(path) for path in self.folder.glob("log-*")]
        run = parse(confirm(logs), read_weights(self.folder))
        failures = sorted([*run.failures, *self.killed], key=lambda failure: failure.time)
        return Run(run.steps, failures, run.starts, run.weights)

    def count_failures(self) -> int:
        logs = self.folder.glob("log-*")
        return len(self.killed) + sum(path.read_text().count('"event": "failure"') for path in logs)

    def is_ready(self, since: float) -> bool:
        """Returns whether two members may fail, after a step that was taken after the last failure."""
        last = [tail(path) for path in self.folder.glob("log-*")]
        steps = [
            event for event in last if event.get("event") == "step" and event["time"] > since + IN_FLIGHT
        ]
        if not steps or any(self.folder.glob("order-*")):
            return False
        newest = max(steps, key=lambda event: float(event["time"]))
        return newest["num_members"] in (0, *range(3, self.members + 1))


def tail(path: Path) -> dict[str, Any]:
    """Returns the last event of a log."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - TAIL, 0))
        lines = file.read().splitlines()
    return dict(json.loads(lines[-1])) if lines else {}


def confirm(logs: list[list[dict[str, Any]]]) -> Iterator[Mapping[str, Any]]:
    """Returns events in which attempts that were interrupted are steps, or are left out.

    A process may end, or stop, after its gradients are sent and before it logs the step. The attempt is a
    step if another member logged the step with as many members, and not all of these logged it.
    """
    events = [event for log in logs for event in log if event["event"] != "attempt"]
    taken = Counter(event["step"] for event in events if event["event"] == "step")
    members = {event["step"]: event["num_members"] for event in events if event["event"] == "step"}
    yield from events
    for attempt in (attempt for log in logs for attempt in _interrupted(log)):
        number = attempt["step"]
        if taken[number] < members.get(number, 0) == attempt["num_members"]:
            taken[number] += 1
            yield {**attempt, "event": "step"}


def _interrupted(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the attempts of a process that it did not log as steps."""
    logged = {event["step"] for event in log if event["event"] == "step"}
    attempts = {event["step"]: event for event in log if event["event"] == "attempt"}  # the last of each step
    return [attempt for number, attempt in attempts.items() if number not in logged]


def fail(training: Training, kind: str, member: int, chance: random.Random) -> None:
    """Makes a process fail, or orders it to fail at a place."""
    others = [other for other in range(training.members) if other != member]
    if kind in PLACES:
        (training.folder / f"order-{kind}-{'any' if kind == 'save' else member}").touch()
    elif kind == "stop":
        pid = training.send(signal.SIGSTOP, kind, member)
        time.sleep(STOP)
        os.kill(pid, signal.SIGCONT)
    else:
        training.send(signal.SIGKILL, kind, member)
        if kind == "healing":  # about when the new process of the first one receives its state
            time.sleep(chance.uniform(3.0, 5.0))
        if kind in ("healing", "two"):
            training.send(signal.SIGKILL, kind, chance.choice(others))


def disturb(training: Training, count: int, seed: int) -> None:
    """Makes the processes of a run fail at random moments until it ends."""
    chance, last = random.Random(seed), 0.0
    while training.count_failures() < count and training.process.poll() is None:
        if not training.is_ready(last):
            time.sleep(0.1)
            continue
        time.sleep(chance.uniform(0.5, 3.0))
        with suppress(ProcessLookupError):  # that process is being started
            fail(training, chance.choice(KINDS), chance.randrange(training.members), chance)
        last = time.time()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failures", type=int, default=100)
    parser.add_argument("--against", choices=MECHANISMS, default="replicas")
    parser.add_argument("--order", choices=ORDERS, default="plain", help="order of the calls in the loop")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="existing folder in which the files of both runs are kept")
    options = parser.parse_args()
    if options.against == "torchft" and options.order != "plain":
        parser.error(f"--order {options.order!r}: the loop with torchft alone has one order. Leave it out.")
    epochs, variables = max(4, options.failures * EPOCHS_OF_FAILURE), {"CHAOS_ORDER": options.order}
    command = make_command(options.against, options.replicas, options.failures)
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as name:
        calm = Training(Path(name) / "calm", command, options.replicas, epochs, 0.0, **variables)
        assert calm.wait() == 0, (calm.folder / "output.txt").read_text()
        training = Training(Path(name) / "disturbed", command, options.replicas, epochs, PAUSE, **variables)
        disturb(training, options.failures, options.seed)
        code = training.wait()
        is_right = report(calm.read(), training.read(), code) or options.against == "torchft"
        if not is_right:
            print((training.folder / "output.txt").read_text()[-4000:])
        return int(not is_right)


def report(expected: Run, run: Run, code: int) -> bool:
    """Prints the result, and returns whether nothing was lost and all replica groups went on in time."""
    found = compare(expected, run)
    for failure, seconds, again in found.resumptions:
        print(
            f"{failure.place:10} process {failure.process}: next committed step after {seconds:5.2f} s, "
            f"{again} steps computed again"
        )
    apart = max((difference_of(run.weights[0], weights) for weights in run.weights), default=math.nan)
    times = sorted(step.time for step in kept_steps(run))
    pauses = [late - early for early, late in zip(times, times[1:], strict=False)]
    waits = sorted(_waits(found))
    print(
        f"{len(run.failures)} failures, exit code {code}, {len(run.weights)} replica groups ended\n"
        f"weights differ from those of undisturbed training by {found.difference:.1e}, and between replica "
        f"groups by {apart:.1e}\n"
        f"samples lost: {found.lost}, repeated in committed steps: {found.repeated}\n"
        f"steps computed again: {sum(each.again for each in found.resumptions)}\n"
        f"time to the next committed step: median {statistics.median(waits or [math.nan]):.2f} s, longest "
        f"{max(waits, default=math.nan):.2f} s (a stop of {STOP:.0f} s not counted)\n"
        f"longest pause between two committed steps: {max(pauses, default=math.nan):.2f} s"
    )
    is_in_time = 1 in run.starts or max(waits, default=0.0) <= LIMIT
    return code == 0 and is_in_time and apart == 0.0 and not find_problems(found, TOLERANCE)


def _waits(found: Comparison) -> list[float]:
    """Returns the times after all failures but those in which a process was only stopped."""
    kept = [each.seconds for each in found.resumptions if each.failure.place != "stop"]
    return [seconds for seconds in kept if not math.isnan(seconds)]


if __name__ == "__main__":
    sys.exit(main())
