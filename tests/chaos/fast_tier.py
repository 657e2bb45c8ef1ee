"""Kill the processes of a run with recent checkpoints at random moments, and verify what it resumes from.

    python tests/chaos/fast_tier.py --kills 200 --seed 0

Each node is a folder and a few processes. A failure ends all processes, at random moments a few milliseconds
apart, as a launcher does. Half of the failures also delete the files of one node. Recent checkpoints are
saved after each step, so most failures happen while files are written, copied to another node or renamed.

Weights, states of the optimizer, a registered counter and the position of the loader follow from the number
of steps. After each failure the ranks verify that all of them are those of the same step, and that at most
the steps since the last complete generation are lost.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

STEPS = 10**6
SIZE = 400_000  # weights of the model
LEARNING_RATE, MOMENTUM = 0.5, 0.5
START_TIMEOUT, MAX_SECONDS = 120.0, 0.8
MOST_LOST = 2
"""Steps that a failure may lose: the one whose generation is being written, and the one after it."""


@dataclass
class Counted:
    """Registered object, whose state is the number of steps."""

    steps: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Weights(nn.Module):
    """Weights whose gradients are all 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(SIZE // 400, 100, bias=False, dtype=torch.float64) for _ in range(4)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return sum(layer(inputs).sum() for layer in self.layers)  # type: ignore[return-value]


def expected(steps: int) -> tuple[float, float]:
    """Returns the value of each weight and of its momentum after some steps."""
    weight = momentum = 0.0
    for _ in range(steps):
        momentum = MOMENTUM * momentum + 1.0
        weight -= LEARNING_RATE * momentum
    return weight, momentum


def train(rank: int, layout: Layout, port: int, folder: str, strategy: str, errors: Any) -> None:
    """Trains until the process is killed."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(layout.size),
        LOCAL_RANK=str(rank % layout.per_node),
        LOCAL_WORLD_SIZE=str(layout.per_node),
        GROUP_RANK=str(rank // layout.per_node),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        _train(rank, layout, Path(folder), strategy)
    except Exception as error:
        errors.put(f"rank {rank}: {type(error).__name__}: {error}")
        raise


def _train(rank: int, layout: Layout, folder: Path, strategy: str) -> None:
    from accelerate import Accelerator
    from accelerate.utils import (
        DataLoaderConfiguration,
        FullyShardedDataParallelPlugin,
        ProjectConfiguration,
        gather_object,
    )

    torch.set_num_threads(1)
    sharded = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=sharded if strategy == "fsdp" else None,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
        project_config=ProjectConfiguration(
            fast_dir=str(layout.folder_of(folder, rank)), fast_every=1, copies=1
        ),
    )
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    data: Any = [torch.full((SIZE // 400,), 1.0 / 100, dtype=torch.float64)] * 100
    numbers: Any = range(layout.size * STEPS)
    loader = DataLoader(numbers, batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    inputs, counted = data[0], Counted()
    accelerator.register_for_checkpointing(counted)
    loaded = -1
    if (folder / "began").exists():
        accelerator.load_state()
        loaded = optimizer.num_updates
        check(model, optimizer, counted, loaded)
    if len(steps := set(gather_object([loaded]))) > 1:
        raise AssertionError(f"the ranks resumed from different steps: {steps}")
    progress = os.open(folder / f"progress_{rank}", os.O_RDWR | os.O_CREAT)
    os.pwrite(progress, f"{loaded:10d} {max(loaded, 0):10d}".encode(), 0)
    for number in loader:
        step = optimizer.num_updates
        if number.item() != step * layout.size + rank:
            raise AssertionError(f"sample {number.item()} is read at step {step}")
        loss = model(torch.ones_like(inputs))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        counted.steps += 1
        os.pwrite(progress, f"{loaded:10d} {step + 1:10d}".encode(), 0)


def check(model: nn.Module, optimizer: Any, counted: Counted, steps: int) -> None:
    """Raises if a part of the state is that of another step."""
    weight, momentum = expected(steps)
    tensors = [(parameter, weight) for parameter in model.parameters()]
    tensors += [(state["momentum_buffer"], momentum) for state in optimizer.state.values()]
    for tensor, value in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if not torch.all(local == value):
            raise AssertionError(f"step {steps}: {local.min()} to {local.max()} instead of {value}")
    if counted.steps != steps:
        raise AssertionError(f"step {steps}: the registered object has {counted.steps}")


@dataclass(frozen=True)
class Layout:
    """Number of nodes, and of ranks on each."""

    nodes: int
    per_node: int

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    def folder_of(self, folder: Path, rank: int) -> Path:
        return folder / f"node_{rank // self.per_node}"


@dataclass
class Outcome:
    """What was observed over all failures."""

    failures: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def run(kills: int, seed: int, layout: Layout, strategy: str) -> Outcome:
    """Starts the ranks again after each failure, and returns what was observed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "accelerate", "torch.distributed.fsdp", __name__])
    chance, outcome = random.Random(seed), Outcome()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        reached = -1
        for _ in range(kills + 1):
            errors = context.SimpleQueue()
            port = _free_port()
            arguments = [(rank, layout, port, str(folder), strategy, errors) for rank in range(layout.size)]
            ranks = [context.Process(target=train, args=each) for each in arguments]
            for rank in ranks:
                rank.start()
            is_running = _wait_for_steps(folder, layout, ranks)
            if is_running:
                loaded = _progress(folder, 0)[0]
                if reached >= 0:
                    outcome.lost.append(reached - loaded)
                (folder / "began").touch()
                time.sleep(chance.uniform(0.0, MAX_SECONDS))
            elif errors.empty():
                outcome.errors.append(f"the ranks took no steps within {START_TIMEOUT:.0f} s")
            outcome.failures[_fail(ranks, layout, folder, chance, errors, outcome)] += 1
            if outcome.errors:
                break
            reached = min(_progress(folder, rank)[1] for rank in range(layout.size))
            for rank in range(layout.size):
                (folder / f"progress_{rank}").unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _fail(
    ranks: list[ForkServerProcess],
    layout: Layout,
    folder: Path,
    chance: random.Random,
    errors: Any,
    outcome: Outcome,
) -> str:
    """Kills all ranks, those of one node first, and returns the kind of the failure."""
    node = chance.randrange(layout.nodes)
    first = [rank for number, rank in enumerate(ranks) if number // layout.per_node == node]
    others = [rank for rank in ranks if rank not in first]
    kind = chance.choice(("all at once", "one node, with its files"))
    if not errors.empty():  # before the others lose the connection
        outcome.errors.append(errors.get())
    for rank in first:
        rank.kill()
    if kind != "all at once":
        time.sleep(chance.uniform(0.0, 0.02))
    for rank in others:
        rank.kill()
    for rank in ranks:
        rank.join()
        rank.close()
    if kind == "one node, with its files":
        shutil.rmtree(folder / f"node_{node}", ignore_errors=True)
    return kind


def _wait_for_steps(folder: Path, layout: Layout, ranks: list[ForkServerProcess]) -> bool:
    """Waits until each rank has taken two steps, and returns whether all ranks still run."""
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end and all(rank.is_alive() for rank in ranks):
        progress = [_progress(folder, rank) for rank in range(layout.size)]
        if all(step >= max(loaded, 0) + 2 for loaded, step in progress):
            return True
        time.sleep(0.002)
    return False


def _progress(folder: Path, rank: int) -> tuple[int, int]:
    """Returns the step from which a rank has resumed, or -1, and the steps it has taken."""
    try:
        loaded, step = (folder / f"progress_{rank}").read_text().split()
    except (FileNotFoundError, ValueError):
        return -1, -1
    return int(loaded), int(step)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="fsdp")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--per_node", type=int, default=1)
    options = parser.parse_args()
    outcome = run(options.kills, options.seed, Layout(options.nodes, options.per_node), options.strategy)
    for kind, number in outcome.failures.items():
        print(f"{number} failures: {kind}")
    print(f"lost steps: {dict(sorted(Counter(outcome.lost).items()))}")
    for error in outcome.errors:
        print(error)
    return 1 if outcome.errors or max(outcome.lost, default=0) > MOST_LOST else 0


if __name__ == "__main__":
    sys.exit(main())
