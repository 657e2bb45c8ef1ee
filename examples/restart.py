"""Train on handwritten digits in a run that restarts after its processes fail.

    accelerate launch --cpu --num_processes 2 --max_restarts 3 examples/restart.py
    accelerate launch --cpu --num_processes 2 --max_restarts 3 examples/restart.py --die_at 50 95
    accelerate report runs/restart

On two machines, of which one may be lost and return (the other one has --machine_rank 1):

    accelerate launch --nnodes 1:2 --num_processes 2 --main_process_ip FIRST --machine_rank 0 \\
        examples/restart.py

If a process fails, the launcher restarts all processes, up to `--max_restarts` times. The script loads the
newest complete checkpoint, if there is one, and continues after it: the run ends with the same weights as an
uninterrupted run, bitwise on the CPU. The samples of a step do not depend on the number of processes.
`--die_at` demonstrates restarts: at each of these steps the last rank kills itself, once. The last line of
output is a checksum of the weights, to compare runs. `accelerate report` then writes a page about the run.
"""

import argparse
import hashlib
import math
import os
import signal
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, set_seed

GLOBAL_BATCH_SIZE = 40


class Progress:
    """The progress of the run, which a loop needs to resume."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def load_images() -> DataLoader:
    """Load the 8 x 8 grey images of scikit-learn."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=20, shuffle=True)


def build_model() -> nn.Module:
    """A convolution and a linear layer; dropout needs the restored generator states after a restart."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(16 * 4 * 4, 10),
    )


def checksum(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def die_once(accelerator: Accelerator, project: Path, step: int) -> None:
    """Kill the last rank without an error message, as a failing machine would; once per step."""
    trace = project / f"died_at_step_{step}"
    if accelerator.is_last_process and not trace.exists():
        trace.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train(project: Path, num_epochs: int, save_every: int, background: bool, die_at: list[int]) -> None:
    folder = ProjectConfiguration(project, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        project_config=folder,
        log_with="report",
        gradient_accumulation_plugin=GradientAccumulationPlugin(global_batch_size=GLOBAL_BATCH_SIZE),
    )
    accelerator.init_trackers("restart", config={"num_epochs": num_epochs, "save_every": save_every})
    set_seed(42, device_specific=True)

    loader = load_images()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    num_steps = num_epochs * math.ceil(len(loader.dataset) / GLOBAL_BATCH_SIZE)
    scheduler = LinearLR(optimizer, start_factor=1.0, end_factor=0.02, total_iters=num_steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    if any(project.glob("checkpoints/checkpoint_*")):
        accelerator.load_state()
    accelerator.print(f"starting at step {progress.step}")

    loss_of = nn.CrossEntropyLoss()
    for epoch in range(progress.epoch, num_epochs):
        batches = accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader
        for images, labels in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.batch += 1
            if not accelerator.sync_gradients:
                continue
            progress.step += 1
            accelerator.log({"loss": loss, "learning_rate": scheduler.get_last_lr()[0]}, step=progress.step)
            if progress.step in die_at:
                die_once(accelerator, project, progress.step)
            if accelerator.should_save or progress.step % save_every == 0:
                accelerator.save_state(blocking=not background)
            if accelerator.should_stop:  # for example because a machine returns
                accelerator.end_training()
                return
        progress.epoch, progress.batch = epoch + 1, 0

    accelerator.print(f"{progress.step} steps, loss of the last batch {loss.item():.4f}")
    accelerator.print(f"weights: {checksum(accelerator.unwrap_model(model))}")
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train in a run that survives the death of its processes.")
    parser.add_argument("--project", type=Path, default=Path("runs/restart"), help="folder of checkpoints")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--save_every", type=int, default=15, help="steps between checkpoints (default: 15)")
    parser.add_argument(
        "--background", action="store_true", help="continue training while checkpoints are written"
    )
    parser.add_argument(
        "--die_at", type=int, nargs="*", default=[], help="steps at which the last rank kills itself"
    )
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
