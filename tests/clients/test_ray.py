"""The workers of Ray Train: training, failures, preemption, stopping, reports of hangs, and the example.

Needs `ray[train]`. Each test starts clusters on this machine, and leaves no process and no file of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from .cases import MARK, PROGRAMS

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
WORKER = r"^(?:\x1b\[\d+m)?\(RayTrainWorker pid=\d+(?:, ip=[\d.]+)?\)(?:\x1b\[0m)? "
HANGS = re.compile(
    WORKER + r"accelerate: hang: rank 0 waits in (\S+) .*; rank 1 is in wait_and_stop", re.MULTILINE
)
STARTS = re.compile(WORKER + r"starting at step (\d+) on 2 ranks$", re.MULTILINE)
END = re.compile(WORKER + r"90 steps, weights: ([0-9a-f]{64})$", re.MULTILINE)
STEPS = 16

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray[train]"),
]

RunWithRay = Callable[..., str]


@pytest.fixture
def run_with_ray(tmp_path: Path) -> Iterator[RunWithRay]:
    """Run a script with arguments, whose cluster keeps its files in a folder of this test; its output."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # the path of a socket is short
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {
        "HOME": str(tmp_path),
        "TMPDIR": str(folder),
        "RAY_TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1"}

    def run_with_ray(*arguments: str | Path) -> str:
        command = [sys.executable, *map(str, arguments)]
        kinds: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, env=environ, timeout=800, check=False, **kinds)
        assert done.returncode == 0, done.stdout
        return str(done.stdout)

    yield run_with_ray
    left = [
        each
        for each in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(each.info["cmdline"] or ())
    ]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=20)
    shutil.rmtree(folder)
    assert not left


def steps_of(notes: list[dict[str, Any]]) -> dict[int, set[float]]:
    """Step -> the losses of all attempts."""
    losses: dict[int, set[float]] = {}
    for note in notes:
        if "step" in note:
            losses.setdefault(note["step"], set()).add(note["loss"])
    return losses


def test_workers_train_fail_stop_and_are_preempted(run_with_ray: RunWithRay, tmp_path: Path) -> None:
    printed = run_with_ray(PROGRAMS / "ray_workers.py", tmp_path)
    line = next(line for line in printed.splitlines() if line.startswith(MARK))
    notes = json.loads(line.removeprefix(MARK))
    assert len(notes) == 6

    plain = notes["plain-0"]
    expected = steps_of(plain)
    assert len(expected) == STEPS
    assert all(len(losses) == 1 for losses in expected.values())
    assert plain == notes["plain-1"]
    found = {name: value for note in plain if "step" not in note for name, value in note.items()}
    assert found["ranks"] == 2
    assert found["gathered"] == [0, 1]
    assert found["waited"] == 2
    assert {*HANGS.findall(printed)} == {"reduce", "ray.train.get_preemption_info"}, printed
    assert 20 <= found["stopped"] < 600
    assert found["ended"] == STEPS

    for rank in range(2):
        raised, preempted = notes[f"raised-{rank}"], notes[f"preempted-{rank}"]
        assert [note["began"] for note in raised if "began" in note] == [0, 9]
        assert [note["began"] for note in preempted if "began" in note] == [0, 5]
        assert steps_of(raised) == steps_of(preempted) == expected
        assert raised[-1] == preempted[-1] == {"ended": STEPS}
    (saved,), (also,) = (
        [note for note in notes[f"preempted-{rank}"] if "saved" in note] for rank in range(2)
    )
    assert saved == also
    assert saved["reads"] < 600
    assert not saved["stops"], "a run whose functions return has ended: Ray does not restart it"


def test_the_example_ends_with_the_weights_of_a_run_without_failures(
    run_with_ray: RunWithRay, tmp_path: Path
) -> None:
    weights = []
    for name, options, failures in (("whole", (), 0), ("failed", ("--fail_at", "40"), 1)):
        printed = run_with_ray(EXAMPLE, "--storage", tmp_path / name, *options)
        starts = list(dict.fromkeys(map(int, STARTS.findall(printed))))  # lines may come twice
        assert starts[0] == 0
        assert len(starts) == 1 + failures
        assert starts[-1] in (0, 15, 30) if failures else True
        weights += {*END.findall(printed)}
        assert "the last report: {'step': 90, " in printed
    assert (tmp_path / "failed" / "failed_at_step_40").exists()
    assert len(weights) == 2
    assert weights[0] == weights[1]
