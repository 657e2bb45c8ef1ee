"""Measure how long a recent checkpoint blocks training, and how long loading it takes.

The figures are over one copy of the state in memory, of which the memory was used before. In new processes,
which have no memory for states of optimizers yet, they are over a copy to new memory. Wall-clock time is
counted. The state is that of one rank, because a rank copies only what it writes.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.nested import iterate_tensors
from accelerate.ops import local_tensor
from accelerate.utils import ProjectConfiguration
from pairing import Pair, report
from ranks import start

ROUNDS, STARTS, NODES = 9, 3, 2
MATRICES, SIDE = 120, 1024  # 4 MiB each, three times: weights and two moments of Adam
BLOCKED_BUDGET, RESTORE_BUDGET, RESTORE_SECONDS = 1.3, 1.5, 0.3

SHARDS = "the shards of each of two ranks under FSDP 2"


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(
    name: str,
    copy: Callable[[], object],
    ours: Callable[[], object],
    after: Callable[[], object],
    budget: float,
    fixed: float = 0.0,
) -> Pair:
    """Lets both take turns, and returns the median ratio of what exceeds `fixed` seconds."""
    pairs = []
    for round_ in range(ROUNDS + 2):
        pair = seconds(copy), seconds(ours)
        after()
        if round_ >= 2:  # the first ones allocate memory
            pairs.append(pair)
    best = [min(column) for column in zip(*pairs, strict=True)]
    return Pair(name, *best, statistics.median((own - fixed) / raw for raw, own in pairs), budget)


class Run:
    """Run with a recent checkpoint, and the state of this rank."""

    def __init__(self, folder: Path, *, is_new: bool = True, **options: Any) -> None:
        project = ProjectConfiguration(fast_dir=str(folder), fast_every=1)
        self.accelerator = Accelerator(cpu=True, project_config=project, **options)
        layers = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(MATRICES)))
        data = DataLoader(torch.zeros(10**6, 1), batch_size=1)  # type: ignore[arg-type]
        model = self.accelerator.prepare(layers)
        self.model = model
        self.optimizer, loader = self.accelerator.prepare(torch.optim.Adam(model.parameters()), data)
        if not is_new:
            return
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.batches = iter(loader)
        next(self.batches)
        self.optimizer.step()
        self.state = self.local_state()
        self.copies = [torch.empty_like(tensor) for tensor in self.state]
        self.size = f"{sum(tensor.nbytes for tensor in self.state) / 1e6:.0f} MB"

    def local_state(self) -> list[torch.Tensor]:
        tensors = iterate_tensors([self.model.state_dict(), self.optimizer.state_dict()])
        return [local_tensor(tensor) for tensor in tensors]

    def copy(self) -> None:
        for target, source in zip(self.copies, self.state, strict=True):
            target.copy_(source)

    def step(self) -> None:
        """Takes a step that is not timed."""
        self.accelerator.wait_for_checkpoint()
        self.optimizer.num_updates += 1

    def loading(self, name: str) -> Pair:
        """Measures how long loading takes, which all ranks begin together."""

        def begin() -> None:
            self.accelerator.wait_for_checkpoint()
            self.accelerator.wait_for_everyone()

        begin()
        work = f"loading {name} of {self.size}, less {RESTORE_SECONDS} s, over a copy in memory"
        return compare(work, self.copy, self.accelerator.load_state, begin, RESTORE_BUDGET, RESTORE_SECONDS)


def save_and_load_again(folder: Path) -> list[Pair]:
    run = Run(folder)
    blocked = compare(
        f"training blocked by a recent checkpoint of {run.size}, over a copy in memory",
        run.copy,
        lambda: next(run.batches),  # saves before it reads on
        run.step,
        BLOCKED_BUDGET,
    )
    pairs = [blocked, run.loading("it")]
    run.accelerator.end_training()
    return pairs


def run_of_node(folder: Path, **options: Any) -> Run:
    """Returns the run of one rank, which is the only one on its node."""
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=rank)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    return Run(folder / f"node_{rank}", fsdp_plugin=plugin, **options)


def load_shards_again(folder: Path) -> Pair:
    run = run_of_node(folder)
    next(run.batches)
    pair = run.loading(SHARDS)
    run.accelerator.end_training()
    return pair


def load_once(run: Run) -> tuple[float, float]:
    """Returns the seconds of a copy to new memory, and those of the first load of a process."""
    run.accelerator.wait_for_everyone()
    own = seconds(run.accelerator.load_state)
    state, copies = run.local_state(), []
    raw = seconds(lambda: copies.extend(tensor.clone() for tensor in state))
    run.accelerator.end_training()
    return raw, own


def load_whole(folder: Path) -> tuple[float, float]:
    return load_once(Run(folder, is_new=False))


def load_shards(folder: Path) -> tuple[float, float]:
    return load_once(run_of_node(folder, is_new=False))


def measure_new_processes(name: str, load: Callable[..., Any], size: int, folder: Path) -> Pair:
    """Measures the first load of each process, of ranks that start again."""
    work = f"loading {name} in a new process, less {RESTORE_SECONDS} s, over a copy to new memory"
    rounds = [max(start(load, size, folder), key=itemgetter(1)) for _ in range(STARTS)]
    best = [min(column) for column in zip(*rounds, strict=True)]
    figure = statistics.median((own - RESTORE_SECONDS) / raw for raw, own in rounds)
    return Pair(work, *best, figure, RESTORE_BUDGET)


def measure_one_process(folder: Path) -> list[Pair]:
    [pairs] = start(save_and_load_again, 1, folder)
    return [*pairs, measure_new_processes("it", load_whole, 1, folder)]


def measure_two_nodes(folder: Path) -> list[Pair]:
    again = max(start(load_shards_again, NODES, folder), key=lambda pair: pair.figure)
    return [again, measure_new_processes(SHARDS, load_shards, NODES, folder)]


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    # /dev/shm is memory; other systems have no folder of this kind, and measure a local disk.
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        pairs = [*measure_two_nodes(folder / "two"), *measure_one_process(folder / "one")]
        return report(pairs, "Recent checkpoints in memory.")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
