"""Importing `Accelerator` does not load the slow parts of torch that most runs do not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
before = set(sys.modules)
from accelerate import Accelerator
print(*sorted(set(sys.modules) - before))
"""
HEAVY = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "deepspeed",
    "sympy",
    "transformers",
)


MOST_MODULES = 110
"""Modules of the package that the public class may load; it loads about seventy."""


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_heavy_parts_wait_until_they_are_used(loaded: set[str]) -> None:
    assert "accelerate" in loaded
    assert not loaded & set(HEAVY)


def test_few_modules_are_loaded(loaded: set[str]) -> None:
    ours = {name for name in loaded if name.split(".")[0] == "accelerate"}
    assert "accelerate.accelerator.core" in ours
    assert len(ours) <= MOST_MODULES, sorted(ours)


def test_the_collector_runs_again_after_an_import() -> None:
    code = "import gc, accelerate; accelerate.Accelerator; assert gc.isenabled(); "
    code += "gc.disable(); accelerate.prepare_pippy; assert not gc.isenabled()"
    subprocess.run([sys.executable, "-c", code], check=True)
