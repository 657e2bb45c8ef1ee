"""Trials of failures: launched loops of any order have the result of a run without failures.

A trial launches `tests/chaos/script.py` with replica groups, or with restarts and checkpoints, and kills
members at random steps and places. The weights are those of the same launch without failures, and no sample
is lost or repeated.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from accelerate.commands.failure_check import Run, compare, find_problems
from chaos.orders import ORDERS
from chaos.run import PLACES, Training, make_command

BLOCK = 5  # each trial starts its own processes
MAX_FAILURES = 3
EPOCHS, LAST_STEP = 4, 20  # a member that fails late is not there again before the end
PAUSE = 0.15  # seconds in each step, in which members that were killed start again
TIMEOUT = 300.0  # seconds
TOLERANCE = 1e-6
AFTER_THE_LAST_STEP = "ended by SIGKILL after another group was done"
outcomes: Counter[str] = Counter()
_expected: dict[tuple[Any, ...], Run] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Trial:
    """A launch, and what fails in it."""

    mechanism: str  # "replicas" or "restart"
    members: int
    order: str
    accumulation: int
    tier: str  # "", "durable" or "fast"
    plan: tuple[tuple[int | str, int, str], ...]  # member, step, place

    @property
    def undisturbed(self) -> tuple[Any, ...]:
        return self.mechanism, self.members, self.order, self.accumulation, self.tier


def draw(seed: int) -> Trial:
    chance = random.Random(seed)
    mechanism = chance.choice(("replicas", "replicas", "restart"))
    members = chance.choice((2, 2, 3))
    plan = []
    for _ in range(chance.choice((1, 1, 2, MAX_FAILURES))):
        places = [place for place in PLACES if place != "save"] + ["between", "before the step"]
        member = "all" if chance.random() < 0.2 else chance.randrange(members)
        plan.append((member, chance.randrange(LAST_STEP), chance.choice(places)))
    return Trial(
        mechanism,
        members,
        chance.choice(ORDERS),
        chance.choice((1, 1, 2, 3)),
        chance.choice(("", "fast") if mechanism == "replicas" else ("durable", "durable", "fast")),
        tuple(plan),
    )


def describe(seed: int) -> str:
    return str(draw(seed))


def run(seeds: Sequence[int], ask: Any) -> dict[int, str]:
    """Runs trials, and returns what each of them has found, empty text where nothing differs."""
    return {seed: run_one(draw(seed)) for seed in seeds}


def run_one(trial: Trial) -> str:
    with _lock:  # one launch without failures for all trials that need it
        if trial.undisturbed not in _expected:
            found, code, text = launch(trial, [], 0.0)
            if code:
                return f"without failures: exit code {code}\n{text}"
            _expected[trial.undisturbed] = found
    found, code, text = launch(trial, trial.plan, PAUSE)
    # On a busy machine, a group may be killed when the others have taken all steps. That ends the launch with
    # its code, and the weights of the others count.
    is_late = trial.mechanism == "replicas" and AFTER_THE_LAST_STEP in text
    if code and not is_late:
        return f"exit code {code}\n{text}"
    comparison = compare(_expected[trial.undisturbed], found)
    taken = Counter((step.process, step.number) for step in found.steps)
    if trial.mechanism == "replicas" and max(taken.values(), default=0) > 1:
        # All groups were gone at one time, and the logs do not show which steps were lost with them.
        comparison = comparison._replace(lost=0, repeated=0)
    late = ", the last one after the last step" if code else ""
    outcomes[f"{trial.mechanism} with {len(found.failures)} failures{late}"] += 1
    problems = find_problems(comparison, TOLERANCE)
    return "\n".join([*problems, text]) if problems else ""


def launch(trial: Trial, plan: Sequence[Any], pause: float) -> tuple[Run, int, str]:
    """Returns what the processes did, the exit code, and the end of the output."""
    variables = {
        "CHAOS_ORDER": trial.order,
        "CHAOS_ACCUMULATION": str(trial.accumulation),
        "CHAOS_TIER": trial.tier,
        "CHAOS_PLAN": json.dumps(plan),
    }
    with tempfile.TemporaryDirectory() as name:
        command = make_command(trial.mechanism, trial.members, MAX_FAILURES * trial.members)
        training = Training(Path(name) / "run", command, trial.members, EPOCHS, pause, **variables)
        code = training.wait(TIMEOUT)
        return training.read(), code, (training.folder / "output.txt").read_text()[-3000:]
