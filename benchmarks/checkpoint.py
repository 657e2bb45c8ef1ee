"""What saving and loading a run costs over torch.save and torch.load of the same state.

Both sides bring what they write to the disk (fsync); ours also takes checksums, and compares
them when it loads.
Wall-clock time is counted: most of the work is the kernel's.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.checkpointing import manifest
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from pairing import Pair, report

ROUNDS = 9
MILLION = 1_000_000
MATRICES, SIDE = 34, 1024  # 4 MiB each, three times: weights and two moments of Adam


class Stack(nn.Module):
    """Enough matrices for a state of 400 MB with those of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(MATRICES))


def wall(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(
    work: str,
    raw: Callable[[], object],
    ours: Callable[[], object],
    budget: float,
    before: Callable[[], object] = lambda: None,
) -> Pair:
    """Let both ways take turns; the figure is the median ratio. `before` is not counted."""
    pairs = []
    for _ in range(ROUNDS):
        seconds = []
        for way in (raw, ours):
            before()
            seconds.append(wall(way))
        pairs.append((seconds[0], seconds[1]))
    best_raw, best_ours = (min(column) for column in zip(*pairs, strict=True))
    return Pair(work, best_raw, best_ours, median(b / a for a, b in pairs), budget)


def save_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def start_late() -> Pair:
    """Time the first batch behind a million batches, beyond what the start of the same epoch takes."""
    loader = prepare_data_loader(DataLoader(range(2 * MILLION + 50), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    late = skip_first_batches(loader, MILLION)
    starts, resumes = [], []
    for _ in range(ROUNDS):
        starts.append(wall(lambda: next(iter(loader))))
        resumes.append(wall(lambda: next(iter(late))))
    beyond = median(b - a for a, b in zip(starts, resumes, strict=True))
    name = "first batch at batch 1,000,000, beyond the start of a loader"
    return Pair(name, min(starts), min(resumes), beyond, 0.05, "s")


def main() -> int:
    accelerator = Accelerator(cpu=True)
    bare = Stack()
    adam = torch.optim.Adam(bare.parameters())
    for parameter in bare.parameters():
        parameter.grad = torch.randn_like(parameter)
    adam.step()
    adam.zero_grad()
    model, optimizer = accelerator.prepare(bare, adam)
    folder = Path(tempfile.mkdtemp())
    try:
        by_hand, ours, unverified = folder / "by_hand.pt", folder / "ours", folder / "unverified"

        def clear() -> None:
            """Neither way finds an older checkpoint, nor a disk that is still busy."""
            by_hand.unlink(missing_ok=True)
            shutil.rmtree(ours, ignore_errors=True)
            os.sync()

        pairs = [
            compare(
                "save 400 MB, over torch.save and fsync",
                lambda: save_by_hand(bare, adam, by_hand),
                lambda: accelerator.save_state(ours),
                1.0,
                clear,
            ),
            compare(
                "loop blocked by a save in the background, over that save",
                lambda: accelerator.save_state(ours, blocking=True),
                lambda: accelerator.save_state(ours, blocking=False),
                0.15,
                accelerator.wait_for_checkpoint,
            ),
        ]
        accelerator.wait_for_checkpoint()
        save_by_hand(bare, adam, by_hand)
        shutil.copytree(ours, unverified, ignore=shutil.ignore_patterns(manifest.NAME))
        pairs += [
            compare(
                "load 400 MB, over torch.load and load_state_dict",
                lambda: load_by_hand(bare, adam, by_hand),
                lambda: accelerator.load_state(ours),
                1.1,
            ),
            compare(
                "load with checksums, over loading without",
                lambda: accelerator.load_state(unverified),
                lambda: accelerator.load_state(ours),
                1.1,
            ),
        ]
    finally:
        accelerator.wait_for_checkpoint()
        shutil.rmtree(folder)
    return report([*pairs, start_late()], "Checkpoints")


if __name__ == "__main__":
    sys.exit(main())
