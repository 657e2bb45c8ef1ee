"""The launcher of distributed tests, for contracts that need several processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "accelerate_tests_launcher", Path(__file__).parents[1] / "distributed" / "conftest.py"
)
assert _spec is not None
assert _spec.loader is not None
_launcher = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_launcher)

rank_server = _launcher.rank_server
run = _launcher.run
