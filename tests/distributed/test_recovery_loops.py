"""Loops of any order have the weights of a run without failures when a replica group ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.chaos.orders import ORDERS, REFUSED

pytest.importorskip("torchft")

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--main_process_port", "0"]
SECONDS = 240
SCRIPT = """
import os, pathlib, signal, time
import torch
from torch.utils.data import DataLoader
from accelerate import Accelerator
from chaos.orders import make_parts, train

folder, order = pathlib.Path(os.environ["FOLDER"]), os.environ["ORDER"]
replica = int(os.environ.get("ACCELERATE_REPLICA", "0"))
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=int(os.environ["STEPS"]))
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
data = [(torch.randn(8, generator=generator).double(), index % 4) for index in range(64)]
parts = make_parts(order)
first, second, one, two, loader = accelerator.prepare(*parts, DataLoader(data, batch_size=2))
parts = parts._replace(first=first, second=second, one=one, two=two)
number = 0


def fail(place):
    if place in ("backward", "before the step") and number == int(os.environ.get("NUMBER", "-1")):
        if replica == 1 and not (folder / "failed").exists():
            (folder / "failed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


for epoch in range(2):
    for rows, labels in loader:
        with accelerator.accumulate(first, second):
            train(order, accelerator, parts, rows, labels, fail)
        number += 1
        time.sleep(float(os.environ.get("PAUSE", "0")))
others = {f"second.{name}": value for name, value in accelerator.get_state_dict(second).items()}
state = {**accelerator.get_state_dict(first), **others}
if accelerator.process_index == 0 and number:  # a group that starts again after the last step has none
    torch.save(state, folder / f"end-{replica}.pt")
"""


def launch(folder: Path, *options: str, **variables: str) -> tuple[list[dict[str, Any]], int, str]:
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "FOLDER": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path.rstrip(os.pathsep),
        **variables,
    }
    words = [*LAUNCH, *options, str(folder / "script.py")]
    ended = subprocess.run(
        words, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False
    )
    return [torch.load(path) for path in sorted(folder.glob("end-*.pt"))], ended.returncode, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["1", "2"])
@pytest.mark.parametrize("order", [*ORDERS, *REFUSED])
def test_a_loop_has_the_weights_of_a_run_without_failures(tmp_path: Path, order: str, steps: str) -> None:
    expected, code, err = launch(tmp_path / "plain", "--num_processes", "2", ORDER=order, STEPS=steps)
    assert code == 0, err
    found, code, err = launch(
        tmp_path / "failed", "--replicas", "2", ORDER=order, STEPS=steps, NUMBER="9", PAUSE="0.3"
    )
    if order in REFUSED:
        assert code == 1
        assert REFUSED[order] in err
        return
    assert code == 0, err
    assert "and is started again" in err
    assert found
    for state in found:
        torch.testing.assert_close(state, expected[0], atol=1e-9, rtol=1e-9)
