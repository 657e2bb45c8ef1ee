"""Importing `Accelerator` leaves alone the parts of torch that take long and that most runs do not need."""

from __future__ import annotations

import subprocess
import sys

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


def test_heavy_parts_wait_until_they_are_used() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "accelerate" in loaded
    assert not loaded & set(HEAVY)
