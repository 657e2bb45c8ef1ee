"""Run training with replica groups that fail at random moments, and compare with undisturbed training.

`python tests/chaos/run.py --failures 100` prints each failure with the time until the next committed step,
the largest difference of the weights, and the number of samples that were repeated.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

SCRIPT = Path(__file__).with_name("script.py")
STEPS_PER_EPOCH = 12
PAUSE = 0.1  # seconds in each step
STOP = 20.0  # seconds for which a process is stopped
LIMIT = 5.0  # seconds until the next committed step after a process was killed
TOLERANCE = 1e-6
PLACES = ("batch", "exit", "backward", "step", "save")
KINDS = ("kill", "kill", "two", "healing", "stop", *PLACES)


class Failure(NamedTuple):
    """Failure of a replica group, and when it happened."""

    kind: str
    replica: int
    time: float


class Run:
    """Launch of the script with replica groups."""

    def __init__(self, folder: Path, replicas: int, epochs: int, pause: float) -> None:
        self.folder, self.replicas = folder, replicas
        folder.mkdir()
        environment = {
            **os.environ,
            "CHAOS_FOLDER": str(folder),
            "CHAOS_EPOCHS": str(epochs),
            "CHAOS_PAUSE": str(pause),
            "OMP_NUM_THREADS": "1",
        }
        words = ["-m", "accelerate.commands.launch", "--cpu", "--replicas", str(replicas), str(SCRIPT)]
        self.output = (folder / "output.txt").open("w")
        self.process = subprocess.Popen(
            [sys.executable, *words], env=environment, stdout=self.output, stderr=self.output
        )

    def wait(self) -> int:
        code = self.process.wait()
        self.output.close()
        return code

    def pid(self, replica: int) -> int:
        return int((self.folder / f"pid-{replica}").read_text())

    def records(self) -> list[dict[str, float | list[int]]]:
        lines = [line for path in self.folder.glob("steps-*.jsonl") for line in path.read_text().splitlines()]
        return sorted((json.loads(line) for line in lines), key=lambda record: record["time"])

    def weights(self) -> list[torch.Tensor]:
        states = [torch.load(path) for path in sorted(self.folder.glob("end-*.pt"))]
        return [torch.cat([value.flatten() for value in state.values()]) for state in states]


def fail(run: Run, kind: str, replica: int, chance: random.Random) -> Iterator[Failure]:
    """Makes replica groups fail, and yields what happened."""
    others = [other for other in range(run.replicas) if other != replica]
    if kind in PLACES:
        (run.folder / f"fail-{replica}").write_text(kind)
        yield Failure(kind, replica, time.time())
        return
    if kind == "stop":
        os.kill(run.pid(replica), signal.SIGSTOP)
        yield Failure(kind, replica, time.time())
        time.sleep(STOP)
        os.kill(run.pid(replica), signal.SIGCONT)
        return
    os.kill(run.pid(replica), signal.SIGKILL)
    yield Failure(kind, replica, time.time())
    if kind == "kill":
        return
    if kind == "healing":  # about when the new process of the first one receives its state
        time.sleep(chance.uniform(3.0, 5.0))
    second = chance.choice(others)
    os.kill(run.pid(second), signal.SIGKILL)
    yield Failure(kind, second, time.time())


def disturb(run: Run, count: int, seed: int) -> list[Failure]:
    """Makes the processes of a run fail at random moments until it ends."""
    chance, failures = random.Random(seed), []
    while len(list(run.folder.glob("pid-*"))) < run.replicas:
        time.sleep(0.1)
    while len(failures) < count and run.process.poll() is None:
        time.sleep(chance.uniform(1.0, 4.0))
        try:
            for failure in fail(run, chance.choice(KINDS), chance.randrange(run.replicas), chance):
                failures.append(failure)
        except ProcessLookupError:  # that replica group is being started
            continue
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failures", type=int, default=100)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    epochs = max(4, options.failures * 8)
    with tempfile.TemporaryDirectory() as name:
        calm = Run(Path(name) / "calm", options.replicas, epochs, 0.0)
        assert calm.wait() == 0, (calm.folder / "output.txt").read_text()
        run = Run(Path(name) / "disturbed", options.replicas, epochs, PAUSE)
        failures = disturb(run, options.failures, options.seed)
        code = run.wait()
        return report(calm, run, failures, code)


def report(calm: Run, run: Run, failures: list[Failure], code: int) -> int:
    """Prints the result, and returns 0 if nothing was lost and all replica groups went on in time."""
    records = run.records()
    times = [record["time"] for record in records]
    waits = []
    for failure in failures:
        index = bisect.bisect(times, failure.time + PAUSE)
        wait = times[index] - failure.time if index < len(times) else float("nan")
        waits.append(wait)
        print(f"{failure.kind:10} replica group {failure.replica}: next committed step after {wait:5.2f} s")
    seen = Counter((record["epoch"], sample) for record in records for sample in record["samples"])
    repeated = sum(count > 1 for count in seen.values())
    (expected, *_), found = calm.weights(), run.weights()
    differences = [float((weights - expected).abs().max()) for weights in found]
    apart = max((float((weights - found[0]).abs().max()) for weights in found), default=float("nan"))
    pauses = [late - early for early, late in zip(times, times[1:], strict=False)]
    quick = [wait for wait, failure in zip(waits, failures, strict=True) if failure.kind != "stop"]
    print(
        f"{len(failures)} failures, exit code {code}, {len(found)} of {run.replicas} replica groups ended\n"
        f"weights differ from those of undisturbed training by {max(differences, default=float('nan')):.1e}, "
        f"and between replica groups by {apart:.1e}\n"
        f"samples repeated: {repeated}\n"
        f"longest time to the next committed step: {max(quick, default=0.0):.2f} s, median "
        f"{statistics.median(quick) if quick else 0.0:.2f} s (a stop of {STOP:.0f} s not counted)\n"
        f"longest pause between two committed steps: {max(pauses, default=0.0):.2f} s"
    )
    is_equal = bool(differences) and max(differences) <= TOLERANCE and apart == 0.0
    is_right = code == 0 and is_equal and repeated == 0 and max(quick, default=0.0) <= LIMIT
    if not is_right:
        print((run.folder / "output.txt").read_text()[-4000:])
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
