"""Save over weights that are mapped, and over a checkpoint of which a file is open."""

import sys
from pathlib import Path

import pytest
import torch

from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch

folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
accelerator.save_model(model, folder / "model")
with init_empty_weights():
    empty = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
load_checkpoint_and_dispatch(empty, folder / "model", {"0": "cpu", "1": "disk"}, folder / "offload")
with pytest.raises(PermissionError, match=r"open or mapped.* write to another folder.*model.safetensors"):
    accelerator.save_model(model, folder / "model")

state = folder / "state"
accelerator.save_state(str(state))
weights = state / "model.safetensors"
before = weights.read_bytes()
torch.nn.init.zeros_(accelerator.unwrap_model(model)[0].weight)
with weights.open("rb"), pytest.raises(RuntimeError, match="the ones before it are unchanged.*is used"):
    accelerator.save_state(str(state))
assert weights.read_bytes() == before
(state / "notes.txt").touch()
with (state / "notes.txt").open("rb"):  # the folder cannot be renamed, and its other files are exchanged
    accelerator.save_state(str(state))
assert weights.read_bytes() != before
accelerator.load_state(str(state))
assert sorted(path.name for path in folder.iterdir()) == ["model", "state"]
print("done")
