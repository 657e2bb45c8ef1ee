"""Training functions in the workers of Ray Train, on a cluster of two nodes on this machine.

`plain` trains without interruption, then waits and stops; `raised` and `preempted` train the same, and are
interrupted once. Each worker notes what it does in a file of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.cluster_utils import Cluster
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

STEPS, SAVE_EVERY, RAISE_AT, PREEMPT_AT = 16, 3, 11, 5
MOST_READS = 600
SECONDS_TO_LEAVE = 10


class Run:
    """One attempt of a worker: what it trains, and the file in which it notes what it does."""

    def __init__(self, folder: Path, way: str) -> None:
        self.folder, self.way = folder, way
        self.accelerator = Accelerator()
        self.rank = self.accelerator.process_index
        set_seed(1, device_specific=True)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.25), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.accelerator.register_for_checkpointing(self)
        self.step, self.is_resumed = 0, False
        if checkpoint := train.get_checkpoint():
            with checkpoint.as_directory() as saved:
                self.accelerator.load_state(saved)
            self.is_resumed = True
        self.note(began=self.step, ranks=self.accelerator.num_processes)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def note(self, **facts: Any) -> None:
        with (self.folder / f"{self.way}-{self.rank}").open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")

    def is_first(self, what: str) -> bool:
        """Whether this is the first attempt of this run."""
        trace = self.folder / f"{self.way}-{what}"
        if is_first := not trace.exists():
            trace.touch()
        return is_first

    def save(self) -> None:
        """Save to a folder of this worker; Ray copies those of all workers into one."""
        with tempfile.TemporaryDirectory() as own:
            self.accelerator.save_state(own)
            common = [path for path in Path(own).iterdir() if not path.name.startswith("random_states_")]
            for path in common if self.rank else []:
                path.unlink()  # rank 0 reports it
            train.report({"step": self.step}, checkpoint=Checkpoint.from_directory(own))

    def train(self) -> None:
        length = len(self.loader)
        while self.step < STEPS:
            batches = self.accelerator.skip_first_batches(self.loader, self.step % length)
            for inputs, targets in batches:
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step += 1
                self.note(step=self.step, loss=self.accelerator.reduce(loss.detach(), "mean").item())
                AFTER_STEPS[self.way](self)


def resume_run(run: Run) -> None:
    if run.step % SAVE_EVERY == 0:
        run.save()


def fail_once(run: Run) -> None:
    resume_run(run)
    if run.step == RAISE_AT:
        train.get_all_reported_checkpoints()  # returns when Ray has the checkpoint
        if run.rank == 1 and run.is_first("failure"):
            raise ValueError("raised on purpose")


def wait_for_preemption(run: Run) -> None:
    if run.step == PREEMPT_AT and not (run.folder / "drain").exists():
        run.accelerator.wait_for_everyone()
        if run.rank == 0:
            replace_file(run.folder / "drain", ray.get_runtime_context().get_node_id())
        reads = 1
        while not run.accelerator.should_save and reads < MOST_READS:
            time.sleep(0.1)
            reads += 1
        run.save()
        run.note(saved=run.step, reads=reads, stops=run.accelerator.should_stop)
    elif run.step > PREEMPT_AT and not run.is_resumed:
        time.sleep(2)  # runs until Ray ends it


AFTER_STEPS = {"plain": resume_run, "raised": fail_once, "preempted": wait_for_preemption}


def wait_and_stop(run: Run) -> None:
    """Let rank 0 wait for rank 1, in a collective and in `should_stop`; then stop by the stop_file."""
    accelerator = run.accelerator
    run.note(gathered=accelerator.gather(torch.tensor([run.rank])).tolist())
    if run.rank == 1:
        time.sleep(10)
    run.note(waited=accelerator.reduce(torch.tensor(1.0)).item())
    if run.rank == 1:
        time.sleep(10)
    reads = 0
    while not accelerator.should_stop and reads < MOST_READS:
        reads += 1
        if reads == 20 and run.rank == 1:
            Path(os.environ["ACCELERATE_STOP_FILE"]).touch()
        accelerator.wait_for_everyone()
        time.sleep(0.02)
    run.note(stopped=reads)


def train_loop(config: dict[str, Any]) -> None:
    run = Run(Path(config["folder"]), config["way"])
    run.train()
    if run.way == "plain":
        wait_and_stop(run)
    run.accelerator.end_training()
    run.note(ended=run.step)


def replace_file(path: Path, text: str) -> None:
    written = path.with_suffix(".written")
    written.write_text(text, encoding="utf-8")
    written.replace(path)


def drain(address: str, request: Path) -> None:
    """Announce the preemption of a node, when its workers request it."""
    while not request.exists():
        time.sleep(0.1)
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address]
    command += ["--node-id", request.read_text(encoding="utf-8"), "--reason-message", "a test"]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    subprocess.run([*command, "--deadline-remaining-seconds", str(SECONDS_TO_LEAVE)], check=True)


def fit(folder: Path, way: str, placement: str = "PACK", max_failures: int = 0) -> None:
    run_config = RunConfig(
        name=way, storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=max_failures)
    )
    config = {"folder": str(folder), "way": way}
    scaling = ScalingConfig(num_workers=2, placement_strategy=placement)
    TorchTrainer(train_loop, train_loop_config=config, scaling_config=scaling, run_config=run_config).fit()


def main(folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    environ = {"ACCELERATE_HANG_TIMEOUT": "3", "ACCELERATE_STOP_FILE": str(folder / "stop")}
    ray.init(address=cluster.address, runtime_env={"env_vars": environ})
    try:
        fit(folder, "plain")
        (folder / "stop").unlink()
        fit(folder, "raised", placement="STRICT_SPREAD", max_failures=1)
        thread = threading.Thread(target=drain, args=(cluster.address, folder / "drain"), daemon=True)
        thread.start()
        fit(folder, "preempted")
    finally:
        ray.shutdown()
        cluster.shutdown()
    notes = {path.name: path.read_text().splitlines() for path in folder.glob("*-[01]")}
    print(
        "FOUND " + json.dumps({name: [json.loads(line) for line in lines] for name, lines in notes.items()})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
