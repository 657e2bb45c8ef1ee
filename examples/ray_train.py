"""Train on handwritten digits with Ray Train, which restarts the workers after a failure.

    pip install "ray[train]" scikit-learn
    python examples/ray_train.py
    python examples/ray_train.py --fail_at 40 75

Ray Train starts the workers, and each calls `train_loop`. A checkpoint of `save_state` is reported to Ray,
which copies it to its storage and gives it to the workers that it starts after a failure: the run ends with
the same weights as an uninterrupted run, bitwise on the CPU. `--fail_at` demonstrates this: at each of these
steps the last rank kills itself, once. The last line of the workers is a checksum of the weights, to compare
runs.
"""

import argparse
import hashlib
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


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
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    return DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=20, shuffle=True)


def build_model() -> nn.Module:
    """Two linear layers; dropout needs the restored generator states after a restart."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, 10))


def checksum(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def keep_own_files(folder: Path) -> None:
    """Delete what the folder of rank 0 has as well, so that Ray copies these files once."""
    for path in folder.iterdir():
        if not path.name.startswith(("random_states_", "stream_")):
            path.unlink()


def save(accelerator: Accelerator, step: int, loss: torch.Tensor) -> None:
    """Report a checkpoint and the mean loss to Ray; called on all ranks.

    The ranks of a node write to a folder of this node, and one of them reports it. Ray copies the folders of
    all nodes into one, and deletes them.
    """
    experiment, node = train.get_context().get_experiment_name(), ray.get_runtime_context().get_node_id()
    folder = Path(tempfile.gettempdir(), f"{experiment}_{node}", f"step_{step}")
    accelerator.save_state(folder)
    if accelerator.is_local_main_process and not accelerator.is_main_process:
        keep_own_files(folder)
    mean = accelerator.reduce(loss.detach(), "mean").item()
    train.report(
        {"step": step, "loss": mean},
        checkpoint=Checkpoint.from_directory(folder) if accelerator.is_local_main_process else None,
        delete_local_checkpoint_after_upload=True,
    )


def fail_once(accelerator: Accelerator, storage: Path, step: int) -> None:
    """Kill the last rank without an error message, as a failing machine would; once per step."""
    trace = storage / f"failed_at_step_{step}"
    if accelerator.is_last_process and not trace.exists():
        trace.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train_loop(config: dict[str, Any]) -> None:
    """The function that each worker calls."""
    accelerator = Accelerator()  # uses the process group that Ray has initialised
    set_seed(42, device_specific=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, load_images())
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    if checkpoint := train.get_checkpoint():  # the newest one that was reported; None in a new run
        with checkpoint.as_directory() as folder:
            accelerator.load_state(folder)
    accelerator.print(f"starting at step {progress.step} on {accelerator.num_processes} ranks")

    for epoch in range(progress.epoch, config["num_epochs"]):
        batches = accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader
        for images, labels in batches:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.batch += 1
            progress.step += 1
            if progress.step in config["fail_at"]:
                fail_once(accelerator, Path(config["storage"]), progress.step)
            is_requested = accelerator.should_save  # Ray preempts a node, or the save_file was touched
            if is_requested or progress.step % config["save_every"] == 0:
                save(accelerator, progress.step, loss)
            if accelerator.should_stop:  # the max_time is over, or the stop_file exists
                break
        if accelerator.should_stop:
            break
        progress.epoch, progress.batch = epoch + 1, 0

    accelerator.print(f"{progress.step} steps, weights: {checksum(accelerator.unwrap_model(model))}")
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with Ray Train in a run that survives failures.")
    parser.add_argument("--storage", type=Path, default=Path("runs/ray"), help="folder of Ray's results")
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--save_every", type=int, default=15, help="steps between checkpoints (default: 15)")
    parser.add_argument("--use_gpu", action="store_true", help="give each worker one GPU")
    parser.add_argument(
        "--fail_at", type=int, nargs="*", default=[], help="steps at which the last rank kills itself"
    )
    options = parser.parse_args()
    storage = options.storage.resolve()
    storage.mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={**vars(options), "storage": str(storage)},
        scaling_config=ScalingConfig(num_workers=options.num_workers, use_gpu=options.use_gpu),
        run_config=RunConfig(
            storage_path=str(storage),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    print(f"the last report: {result.metrics}")


if __name__ == "__main__":
    main()
