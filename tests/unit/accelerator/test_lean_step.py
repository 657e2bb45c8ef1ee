"""No step accesses the disk or the environment, imports, or copies a dictionary."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import accelerate
from accelerate import Accelerator

pytestmark = pytest.mark.usefixtures("states")

OURS = str(Path(accelerate.__file__).parent)
FORBIDDEN_FILES = ("base/environ.py", "/os.py", "/copy.py", "<frozen importlib", "/importlib/", "/pathlib.py")
FORBIDDEN_MODULES = ("posix", "io", "_io", "builtins.__import__")


class Watch:
    """Records forbidden calls of this package."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and frame.f_code.co_filename.startswith(OURS):
            self.look_at_builtin(frame, argument)
        elif event == "call" and frame.f_back is not None:
            caller, callee = frame.f_back.f_code.co_filename, frame.f_code.co_filename
            if caller.startswith(OURS) and any(name in callee for name in FORBIDDEN_FILES):
                self.found.add(f"{caller}:{frame.f_back.f_lineno} calls {frame.f_code.co_name} of {callee}")

    def look_at_builtin(self, frame: FrameType, function: Any) -> None:
        is_copy = function.__name__ == "copy" and isinstance(function.__self__, dict)
        if is_copy or function.__module__ in FORBIDDEN_MODULES or function.__name__ == "__import__":
            self.found.add(f"{frame.f_code.co_filename}:{frame.f_lineno} calls {function.__qualname__}")


def watched(work: Callable[[], object]) -> set[str]:
    watch = Watch()
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(before)
    return watch.found


@pytest.mark.parametrize("choices", [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}])
def test_a_step_reads_no_files_or_variables_and_imports_nothing(choices: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True, **choices)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    batches = iter(loader)

    def steps() -> None:
        for _ in range(4):
            (inputs,) = next(batches)
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).sum())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.gather_for_metrics(inputs)
            assert not accelerator.should_save
            assert not accelerator.should_stop

    steps()  # the first ones may decide something
    assert watched(steps) == set()


def test_the_check_of_a_step_finds_reads_of_the_environment() -> None:
    found = watched(lambda: Accelerator(cpu=True))
    assert any("calls current of" in line for line in found)
