"""Train, save, replace the checkpoint, load and resume: run in one process or several."""

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, load_checkpoint_and_dispatch
from accelerate.devices.hardware_table import CUDA
from accelerate.utils import ProjectConfiguration, set_seed

STEPS = 4


def train(folder: Path) -> None:
    assert sys.platform == os.environ["SIMULATED_SYSTEM"]
    assert hasattr(os, "fork") == (sys.platform == "darwin")
    assert not hasattr(os, "memfd_create")
    assert CUDA.comm == ("gloo" if sys.platform == "win32" else "nccl")
    set_seed(1)
    configuration = ProjectConfiguration(str(folder / "project"), total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=configuration)
    samples = TensorDataset(torch.arange(32.0).reshape(32, 1))
    loader = DataLoader(samples, batch_size=2, shuffle=True, num_workers=int(sys.argv[2]))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for step, (batch,) in enumerate(loader):
        seen.append(accelerator.gather(batch).flatten().tolist())
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            accelerator.save_state(str(folder / "state"))
            weights = accelerator.unwrap_model(model).weight.item()
        if step == STEPS - 1 or accelerator.should_stop:
            break
    accelerator.load_state(str(folder / "state"))
    assert accelerator.unwrap_model(model).weight.item() == weights
    rest = accelerator.skip_first_batches(loader, 2)
    resumed = [accelerator.gather(batch).flatten().tolist() for (batch,) in rest]
    assert resumed[: STEPS - 2] == seen[2:], (resumed, seen)
    accelerator.save_state(str(folder / "state"))  # replaces the one that was loaded
    configuration.automatic_checkpoint_naming = True
    accelerator.save_state()
    accelerator.save_state()
    accelerator.save_model(model, folder / "model")
    accelerator.save_model(model, folder / "model")
    accelerator.wait_for_everyone()
    load_checkpoint_and_dispatch(torch.nn.Linear(1, 1), folder / "model", device_map={"": "cpu"})
    accelerator.wait_for_everyone()
    accelerator.end_training()
    print(f"rank {accelerator.process_index} of {accelerator.num_processes} is done")


if __name__ == "__main__":
    train(Path(sys.argv[1]))
