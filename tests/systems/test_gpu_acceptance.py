"""The acceptance run: results are complete whatever its parts do; all parts run at tiny sizes on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
MARK = "GPU_ACCEPTANCE_PART"


def start(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    home = tmp_path / "home"
    home.mkdir()
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests" / "systems")))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.gpu_acceptance", "--out", str(tmp_path / "out"), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read(tmp_path: Path) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8")))


def running(pid: int) -> list[str]:
    """Return the part of each process that a runner has started."""
    found = []
    for process in psutil.process_iter():
        try:
            runner, _, part = process.environ().get(MARK, "").partition(":")
        except psutil.Error:
            continue
        if runner == str(pid):
            found.append(part)
    return found


def test_results_are_complete_whatever_the_parts_do(tmp_path: Path) -> None:
    with start(tmp_path, "--table", "faulty_parts", "--jobs", "3") as run:
        output, _ = run.communicate()
    assert run.returncode == 1, output
    results = read(tmp_path)
    assert results["complete"]
    assert results["device"] == {"type": "cpu", "name": "a fake"}
    rows = {row["name"]: row for row in results["parts"]}
    statuses = {name: row["status"] for name, row in rows.items()}
    assert statuses == {
        "facts": "passed",
        "hang": "timeout",
        "pass_it": "passed",
        "fail": "failed",
        "miss_budget": "passed",
        "lack": "not available",
        "print_garbage": "failed",
        "write_garbage": "failed",
        "report_no_number": "failed",
        "leave_process": "failed",
        "leave_file": "failed",
        "fail_in_exit": "failed",
        "nothing_left": "passed",
    }
    assert rows["pass_it"]["figures"][0]["is_met"] is True
    assert rows["miss_budget"]["figures"][0]["is_met"] is False
    assert rows["fail"]["figures"][0]["name"] == "before the failure"
    assert rows["lack"]["notes"] == ["a remark"]
    assert "time.sleep(600)" not in rows["hang"]["reason"]
    assert "in hang" in rows["hang"]["output_tail"]  # where it stood
    wanted = {
        "hang": "stopped after 2 s",
        "fail": "ValueError: planted",
        "lack": "the machine has none",
        "print_garbage": "ended with exit code 3 and no result",
        "write_garbage": "wrote a result that cannot be read",
        "report_no_number": "speed is nan",
        "leave_process": "time.sleep(600)",
        "leave_file": "forgotten-",
        "fail_in_exit": "ended with exit code 7",
    }
    for name, reason in wanted.items():
        assert reason in rows[name]["reason"], rows[name]
    assert rows["print_garbage"]["output_tail"].endswith("the last line\N{REPLACEMENT CHARACTER}")
    last = output.rpartition("Not right: ")[2]
    assert "miss_budget" in last
    assert "pass_it" not in last
    assert not running(run.pid)
    assert not list((tmp_path / "out" / "work").iterdir())


def test_a_run_that_is_cut_off_leaves_results_and_no_process(tmp_path: Path) -> None:
    with start(
        tmp_path, "--table", "faulty_parts", "--jobs", "1", "--only", "pass_it", "hang", "fail"
    ) as run:
        while "hang" not in running(run.pid):
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        output, _ = run.communicate()
    assert run.returncode == 128 + signal.SIGTERM, output
    assert not running(run.pid)
    results = read(tmp_path)
    assert not results["complete"]
    assert {row["name"]: row["status"] for row in results["parts"] if row["status"] == "not run"}
    assert results["parts"][-1]["status"] == "not run"


def test_a_name_that_is_no_part_is_refused(tmp_path: Path) -> None:
    with start(tmp_path, "--table", "faulty_parts", "--only", "nothing") as run:
        output, _ = run.communicate()
    assert run.returncode == 2
    assert "There is no part nothing. Parts: hang, pass_it," in output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_parts_run_on_the_cpu(tmp_path: Path) -> None:
    with start(tmp_path, "--device", "cpu", "--tiny") as run:
        output, _ = run.communicate()
    assert run.returncode == 0, output
    results = read(tmp_path)
    assert results["complete"]
    missing = {row["name"]: row["reason"] for row in results["parts"] if row["status"] == "not available"}
    assert missing == {
        "activation_offload": "activations of the CPU are in host memory already",
        "device_tests": "none of the tests is for cpu",
        "memory_snapshot": "cpu keeps no record of allocations",
        "offload_memory": "weights in the memory of the CPU are where it computes",
    }
    assert all(row["status"] == "passed" for row in results["parts"] if row["name"] not in missing), output
    assert all(row["figures"] for row in results["parts"] if row["name"] in ("step_plain", "offload_disk"))
    (offloaded,) = (row for row in results["parts"] if row["name"] == "offload_disk")
    if not any(figure["name"] == "forward of the original" for figure in offloaded["figures"]):
        assert "is not the original" in offloaded["notes"][0]
    assert all(figure["is_met"] is None for row in results["parts"] for figure in row["figures"])
