"""Training script that `accelerate test --failures` launches undisturbed and with failures.

Each process writes the samples of the steps that it takes to a file, and the first process of each replica
group the final weights. In the run with failures, one process kills itself at each of the places that the
command names. With replica groups the others continue, otherwise all processes load the newest checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate.accelerator import Accelerator
from accelerate.base import DistributedType, environ, get_int_from_env
from accelerate.plugins import DataLoaderConfiguration, ProjectConfiguration
from accelerate.rng import set_seed

BATCH, EPOCHS = 4, 4
STEPS = 12
"""Steps of an epoch, if all processes read different samples."""

FIRST = 4
"""Steps before the first failure."""

SAVE_EVERY = 5
"""Steps between two checkpoints."""

DEFAULT_TIMEOUT = 60
"""Timeout of one collective between replica groups, in seconds."""

POLL, PAUSE = 0.05, 0.5
BETWEEN, BACKWARD, STEP, SAVE = "between steps", "backward", "optimizer.step", "save_state"
"""Places of failures."""


class Progress:
    """Position of the run, which a checkpoint or another replica group restores."""

    def __init__(self) -> None:
        self.epoch = self.batch = self.step = 0

    def state_dict(self) -> dict[str, int]:
        """Returns the position."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Sets the position."""
        vars(self).update(state)


class Process(NamedTuple):
    """Position of this process in the run."""

    group: int  # index of its replica group
    num_groups: int  # number of replica groups
    rank: int  # rank in the replica group
    size: int  # number of processes of a replica group
    attempt: int  # how often all processes have been started again

    @property
    def file(self) -> str:
        """Name of a file of this process."""
        return f"{self.group}.{self.rank}-{self.attempt}-{os.getpid()}"


class Log:
    """File of one process with the steps that it takes and its failures."""

    def __init__(self, folder: Path, process: Process) -> None:
        self._about = {"process": f"{process.group}.{process.rank}", "attempt": process.attempt}
        self._path = folder / f"log-{process.file}.jsonl"

    def write(self, event: str, **values: Any) -> None:
        """Writes an event with its time, which is in the file when this method returns."""
        line = json.dumps({"event": event, **self._about, "time": time.time(), **values})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


class Failures:
    """Failures of a run, each of which happens once.

    Args:
        places: Place of each failure, in order.
    """

    def __init__(self, folder: Path, places: Sequence[str], process: Process, log: Log) -> None:
        self._folder, self._places, self._process, self._log = folder, places, process, log
        self._first: list[int] = []
        self._num_seen = 0

    def plan(self, num_steps: int) -> None:
        """Distributes the failures over the steps of the run."""
        count = len(self._places)
        self._first = [number * num_steps // count + FIRST for number in range(count)]

    def fail(self, place: str, step: int) -> None:
        """Kills this process if the next failure is due here.

        Args:
            place: Where the process is.
            step: Number of the steps that are taken.
        """
        process, number = self._process, self._count("failure")
        if self._places[number : number + 1] != [place] or step < self._first[number]:
            return
        chosen = ((number + 1) % process.num_groups, (number + 1) % process.size)
        is_chosen = place == SAVE or (process.group, process.rank) == chosen
        if not is_chosen or self._count("member") < process.num_groups + number:
            return
        try:
            (self._folder / f"failure-{number}").touch(exist_ok=False)
        except FileExistsError:
            return
        self._log.write("failure", place=place, step=step)
        kill_this_process()

    def mark(self, kind: str) -> None:
        """Records that this replica group is "ready" to take steps, or a "member" that has taken one."""
        if self._places and self._process.rank == 0:
            (self._folder / f"{kind}-{self._process.file}").touch()

    def wait(self, limit: float) -> None:
        """Waits between two steps until a replica group that has failed starts again.

        The step after a failure is taken without a wait, because the time until it is measured.

        Args:
            limit: Maximum time to wait, in seconds.
        """
        number = self._count("failure")
        is_new, self._num_seen = number > self._num_seen, number
        if is_new or number == 0 or self._process.num_groups == 1:
            return
        wanted = self._process.num_groups + number
        deadline = time.monotonic() + limit
        while self._count("ready") < wanted and time.monotonic() < deadline:
            time.sleep(POLL)
        if self._count("member") < wanted:  # the group joins in one of the next steps
            time.sleep(PAUSE)

    def _count(self, kind: str) -> int:
        return len(list(self._folder.glob(f"{kind}-*"))) if self._places else 0


def kill_this_process() -> None:
    """Ends this process as a machine that fails would."""
    psutil.Process().kill()


def train(
    accelerator: Accelerator, folder: Path, places: Sequence[str], process: Process
) -> tuple[Any, Progress]:
    """Trains, and returns the model and the position at the end.

    All ranks must call it.
    """
    log = Log(folder, process)
    failures = Failures(folder, places, process, log)
    restarts = process.num_groups == 1
    set_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    length = BATCH * STEPS * process.num_groups * process.size * accelerator.gradient_accumulation_steps
    rows = torch.randn(length, 8)
    data: Any = [(rows[index], index % 4, index) for index in range(length)]
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True)
    )
    progress, samples = Progress(), list[int]()
    accelerator.register_for_checkpointing(progress)
    accelerator.register_save_state_pre_hook(lambda *_: failures.fail(SAVE, progress.step))

    def on_step(*_: object) -> None:  # called only if the step is taken
        log.write("step", step=progress.step + 1, epoch=epoch, samples=samples)
        failures.fail(STEP, progress.step)

    optimizer.register_step_pre_hook(on_step)
    failures.plan(EPOCHS * len(loader) // accelerator.gradient_accumulation_steps)
    if restarts and any(folder.glob("checkpoints/checkpoint_*")):
        accelerator.load_state()
    log.write("start", step=progress.step)
    failures.mark("ready")
    for epoch in range(progress.epoch, EPOCHS):
        batches = accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader
        for inputs, labels, numbers in batches:
            failures.fail(BETWEEN, progress.step)
            samples += numbers.tolist()
            with accelerator.accumulate(model):
                loss: Any = nn.functional.cross_entropy(model(inputs), labels)
                loss.register_hook(lambda _: failures.fail(BACKWARD, progress.step))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            progress.batch += restarts  # loaders of replica groups restore their position
            if accelerator.sync_gradients:
                samples.clear()
                if not accelerator.optimizer_step_was_skipped:
                    end_step(accelerator, failures, progress)
        progress.epoch, progress.batch = epoch + 1, 0
    return model, progress


def end_step(accelerator: Accelerator, failures: Failures, progress: Progress) -> None:
    """Counts a step, saves a checkpoint every few steps, and waits for a replica group that has failed."""
    progress.step += 1
    failures.mark("member")
    if progress.step % SAVE_EVERY == 0:
        accelerator.save_state()
    failures.wait(get_int_from_env(["ACCELERATE_REPLICA_TIMEOUT"], DEFAULT_TIMEOUT) / 4)


def main() -> None:
    """Trains, and writes what this process did to files."""
    folder, places = Path(sys.argv[1]), sys.argv[2:]
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2),
    )
    process = Process(
        group=get_int_from_env([environ.REPLICA], 0),
        num_groups=get_int_from_env(["ACCELERATE_REPLICAS"], 1),
        rank=accelerator.process_index,
        size=accelerator.num_processes,
        attempt=get_int_from_env(["TORCHELASTIC_RESTART_COUNT"], 0),
    )
    model, progress = train(accelerator, folder, places, process)
    state = accelerator.get_state_dict(model)
    if process.rank == 0 and progress.step:  # a replica group that joined too late has taken no step
        result = {
            "processes": process.num_groups * process.size,
            "device": accelerator.device.type,
            "kind": DistributedType(accelerator.distributed_type).value,
            "mixed_precision": accelerator.mixed_precision,
            "weights": {name: tensor.double().flatten().tolist() for name, tensor in state.items()},
        }
        (folder / f"end-{process.group}.json").write_text(json.dumps(result), encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    main()
