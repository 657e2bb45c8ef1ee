"""The acceptance run of accelerators (`make gpu`) on the simulated device, at tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_AVAILABLE = {
    "device_tests": "none of the tests is for sim",
    "ranks_share_device": "gloo does not take tensors of sim",
    "memory_snapshot": "sim keeps no record of allocations",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_parts_pass_that_this_device_can_run(tmp_path: Path) -> None:
    words = ["--device", "sim", "--tiny", "--jobs", "2", "--out", str(tmp_path)]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ["PYTHONPATH"]])
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu_acceptance", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "SIMULATED_DEVICES": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["complete"]
    rows = {row["name"]: row for row in results["parts"]}
    assert len(rows) == 27
    for name, row in rows.items():
        assert row["status"] == ("not available" if name in NOT_AVAILABLE else "passed"), row
        assert row["reason"] == NOT_AVAILABLE.get(name, row["reason"])
    assert not any("cannot limit memory" in note for row in rows.values() for note in row["notes"])
