"""A process that exits in the middle of something prints nothing, or only the traceback of its own error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import sys, torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from accelerate import Accelerator, DataLoaderConfiguration, ProfileKwargs, skip_first_batches

def prepared(settings={}, **options):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
    return accelerator, accelerator.prepare(DataLoader(torch.arange(64.0), batch_size=2, **options))

def trained(folder):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with="report", project_dir=folder)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.arange(64.0)[:, None], batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, loader)
"""
PROGRAMS = {
    "open iterators": """
from accelerate.data_loader import DataLoaderDispatcher

loaders = [
    prepared()[1],
    prepared(num_workers=1)[1],
    prepared(num_workers=1, persistent_workers=True)[1],
    prepared(dict(dispatch_batches=True))[1],
    DataLoaderDispatcher(torch.arange(64.0), batch_size=2),
    prepared(dict(use_stateful_dataloader=True))[1],
    skip_first_batches(prepared()[1], 2),
]
iterators = [iter(loader) for loader in loaders]
for iterator in iterators * 2:
    next(iterator)
""",
    "profiler": """
import warnings
warnings.filterwarnings("ignore", "Warning. Profiler clears events", module="torch")  # torch 2.11
accelerator, loader = prepared()
context = accelerator.profile(ProfileKwargs(activities=["cpu"])); context.__enter__()
""",
    "background save, tracker, sys.exit in a step": """
accelerator, model, optimizer, loader = trained(sys.argv[1])
accelerator.init_trackers("run"); accelerator.log({"loss": 1.0})
accelerator.save_state(sys.argv[1] + "/saved", blocking=False)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).mean())
        sys.exit()
""",
    "exception": """
accelerator, model, optimizer, loader = trained(sys.argv[1])
for batch in loader:
    with accelerator.accumulate(model):
        raise LookupError("of the user")
""",
}


def error_output(program: str, folder: Path) -> str:
    folder.mkdir()
    command = [sys.executable, "-c", HEAD + program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder)
    # torch itself prints these lines where a profiler starts and stops, and where a GPU has no driver.
    lines = done.stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("USDT:") and "gpuGetDeviceCount" not in line)


TOGETHER = "".join(program for name, program in PROGRAMS.items() if name != "exception")


def test_a_process_that_exits_with_all_of_it_open_prints_nothing(tmp_path: Path) -> None:
    assert error_output(TOGETHER, tmp_path / "together") == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "exception"])
def test_a_process_that_exits_in_the_middle_prints_nothing(tmp_path: Path, name: str) -> None:
    assert error_output(PROGRAMS[name], tmp_path / name) == ""


@pytest.mark.slow
def test_an_exception_in_a_step_prints_its_traceback_only(tmp_path: Path) -> None:
    lines = error_output(PROGRAMS["exception"], tmp_path / "exception").splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "LookupError: of the user"
    assert sum(line.startswith("Traceback") for line in lines) == 1
