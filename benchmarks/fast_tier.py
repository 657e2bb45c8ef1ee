"""Measure how long a recent checkpoint blocks training, and how long loading it takes.

The figures are over one copy of the state in memory, of which the memory was used before. Wall-clock time is
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
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.nested import iterate_tensors
from accelerate.ops import is_dtensor
from accelerate.utils import ProjectConfiguration
from pairing import Pair, report
from ranks import start

ROUNDS, NODES = 9, 2
MATRICES, SIDE = 120, 1024  # 4 MiB each, three times: weights and two moments of Adam
BLOCKED_BUDGET, RESTORE_BUDGET, RESTORE_SECONDS = 1.3, 1.5, 0.3


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

    def __init__(self, folder: Path, **options: Any) -> None:
        project = ProjectConfiguration(fast_dir=str(folder), fast_every=1)
        self.accelerator = Accelerator(cpu=True, project_config=project, **options)
        layers = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(MATRICES)))
        data = DataLoader(torch.zeros(10**6, 1), batch_size=1)  # type: ignore[arg-type]
        model = self.accelerator.prepare(layers)
        self.optimizer, loader = self.accelerator.prepare(torch.optim.Adam(model.parameters()), data)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.batches = iter(loader)
        next(self.batches)
        self.optimizer.step()
        tensors = iterate_tensors([model.state_dict(), self.optimizer.state_dict()])
        self.state = [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in tensors]
        self.copies = [torch.empty_like(tensor) for tensor in self.state]
        self.size = f"{sum(tensor.nbytes for tensor in self.state) / 1e6:.0f} MB"

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


def measure_one_process(folder: Path) -> list[Pair]:
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


def measure_rank(folder: Path) -> Pair:
    """Measures loading shards on one of two nodes with one rank each."""
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=rank)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    run = Run(folder / f"node_{rank}", fsdp_plugin=plugin)
    next(run.batches)
    pair = run.loading("the shards of each of two ranks under FSDP 2,")
    run.accelerator.end_training()
    return pair


def measure_two_nodes(folder: Path) -> Pair:
    return max(start(measure_rank, NODES, folder), key=lambda pair: pair.figure)


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    # /dev/shm is memory; other systems have no folder of this kind, and measure a local disk.
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        pairs = [measure_two_nodes(folder / "two"), *measure_one_process(folder / "one")]
        return report(pairs, "Recent checkpoints in memory.")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
