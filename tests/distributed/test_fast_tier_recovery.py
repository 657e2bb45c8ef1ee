"""Recent checkpoints of a run with replica groups, each of which keeps its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchft")

pytestmark = pytest.mark.slow

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--main_process_port", "0"]
SCRIPT = '''
"""Trains up to a number of steps, from a recent checkpoint if there is one."""
import os, signal, sys, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

folder, until, dies_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
replica = int(os.environ["ACCELERATE_REPLICA"])
accelerator = Accelerator(
    cpu=True,
    project_config=ProjectConfiguration(
        folder / "project", automatic_checkpoint_naming=True, fast_dir=str(folder / "fast"), fast_every=4
    ),
)
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(120, 4)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2, shuffle=True))
try:
    accelerator.load_state()
    (folder / f"loaded_{replica}").write_text(str(optimizer.num_updates))
except FileNotFoundError as error:
    print(error, file=sys.stderr)
if (folder / "died").exists():
    (folder / "started again").touch()
while optimizer.num_updates < until:
    for batch in loader:
        while optimizer.num_updates == 2 * dies_at and not (folder / "started again").exists():
            time.sleep(0.1)  # the group that starts again takes part in most steps
        if optimizer.num_updates == dies_at and replica == 1 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.num_updates >= until:
            break
        time.sleep(0.1)
if optimizer.num_updates:
    torch.save(accelerator.get_state_dict(model), folder / f"end_{replica}.pt")
accelerator.end_training()
'''


def launch(folder: Path, until: int, dies_at: int = -1) -> list[dict[str, torch.Tensor]]:
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    words = [
        *LAUNCH,
        "--num_processes",
        "2",
        "--replicas",
        "2",
        str(script),
        str(folder),
        str(until),
        str(dies_at),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    return [torch.load(path) for path in sorted(folder.glob("end_*.pt"))]


@pytest.mark.parametrize("dies_at", [-1, 6], ids=["all at once", "one before"])
def test_all_groups_go_on_from_the_same_generation(tmp_path: Path, dies_at: int) -> None:
    expected = launch(tmp_path / "whole", 70)[0]
    folder = tmp_path / "run"
    launch(folder, 59, dies_at)
    steps = {
        path.parts[-3]: max(json.loads(path.read_text())["run"]["updates"])
        for path in (folder / "fast").glob("replica_*/checkpoint_*/manifest.json")
    }
    assert set(steps) == {"replica_0", "replica_1"}
    assert all(step == 56 for step in steps.values())
    found = launch(folder, 70)
    loaded = {int((folder / f"loaded_{replica}").read_text()) for replica in (0, 1)}
    assert loaded == {56}
    for weights in found:
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, atol=1e-6, rtol=1e-6)


def test_groups_load_no_generation_that_one_of_them_lacks(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launch(folder, 9)
    shutil.rmtree(folder / "fast" / "replica_1")
    for path in folder.glob("loaded_*"):
        path.unlink()
    launch(folder, 12)
    assert not list(folder.glob("loaded_*"))
