"""Tests of the suite that need a device, run by pytest where it is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from .setting import NotAvailableError, Setting

ROOT = Path(__file__).parents[2]
FILES: tuple[str, ...] = ("tests/unit/diagnostics/test_memory.py", "tests/unit/tracking/test_base.py")
"""Files of tests marked `device`."""
NO_TESTS_RAN = 5
CONFIGURATION = "[pytest]\nmarkers =\n    device\n    slow\n"
"""Not that of `pyproject.toml`, which needs plugins."""


def run_device_tests(setting: Setting) -> None:
    """Run the tests marked `device`."""
    if find_spec("pytest") is None:
        raise NotAvailableError("pytest is not installed")
    if not FILES:
        raise NotAvailableError("no file of tests is listed")
    configuration = setting.folder / "pytest.ini"
    configuration.write_text(CONFIGURATION, encoding="utf-8")
    options = ["-q", "-ra", "-m", "device", "--import-mode=importlib", "-p", "no:cacheprovider"]
    where = ["-c", str(configuration), "--rootdir", str(ROOT), "--basetemp", str(setting.folder / "pytest")]
    plugins = [word for module in setting.imports for word in ("-p", module)]
    files = [str(ROOT / file) for file in FILES]
    command = [sys.executable, "-m", "pytest", *options, *where, *plugins, *files]
    variables = {**os.environ, "TMPDIR": str(setting.folder)}
    answer = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    print(answer.stdout, answer.stderr)
    counts = {
        kind: int(number)
        for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", answer.stdout)
    }
    assert answer.returncode in (0, NO_TESTS_RAN), f"pytest ended with exit code {answer.returncode}"
    if not counts.get("passed"):
        raise NotAvailableError(f"none of the tests is for {setting.device}")
    for kind, number in counts.items():
        setting.report(f"tests {kind}", number, "")
