"""Measure how long a recent checkpoint blocks training, and how long loading it takes.

The figures are over one copy of the state in memory, of which the memory was used before. Wall-clock time is
counted. The state is that of one rank, because a rank copies only what it writes.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.nested import iterate_tensors
from accelerate.utils import ProjectConfiguration
from pairing import Pair, report

ROUNDS = 9
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


def main() -> int:
    # /dev/shm is memory; other systems have no folder of this kind, and measure a local disk.
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        accelerator = Accelerator(
            cpu=True, project_config=ProjectConfiguration(fast_dir=str(folder), fast_every=1)
        )
        layers = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(MATRICES))
        data = DataLoader(torch.zeros(10**6, 1), batch_size=1)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(layers, torch.optim.Adam(layers.parameters()), data)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        batches = iter(loader)
        next(batches)
        optimizer.step()
        state: list[Tensor] = [*iterate_tensors([model.state_dict(), optimizer.state_dict()])]
        copies = [torch.empty_like(tensor) for tensor in state]

        def copy() -> None:
            for target, source in zip(copies, state, strict=True):
                target.copy_(source)

        def step() -> None:
            """Takes a step that is not timed."""
            accelerator.wait_for_checkpoint()
            optimizer.num_updates += 1

        size = sum(tensor.nbytes for tensor in state) / 1e6
        pairs = [
            compare(
                f"training blocked by a recent checkpoint of {size:.0f} MB, over a copy in memory",
                copy,
                lambda: next(batches),  # saves before it reads on
                step,
                BLOCKED_BUDGET,
            ),
            compare(
                f"loading it, less {RESTORE_SECONDS} s, over a copy in memory",
                copy,
                accelerator.load_state,
                accelerator.wait_for_checkpoint,
                RESTORE_BUDGET,
                RESTORE_SECONDS,
            ),
        ]
        accelerator.end_training()
        return report(pairs, "Recent checkpoints in memory.")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
