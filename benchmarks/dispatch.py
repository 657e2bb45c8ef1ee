"""What a batch costs that process 0 reads for two processes, over a plain loader that reads the same data.

Both ways read the whole dataset once in a round, and take turns in it. What is compared is the time on the
clock, because two processes share the work.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader
from pairing import Pair, report

PROCESSES = 2


class Rows(IterableDataset[torch.Tensor]):
    """Rows of a table in memory."""

    def __init__(self, samples: int) -> None:
        self.table = torch.rand(samples, 64)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.table)


class Floats(IterableDataset[torch.Tensor]):
    """Images in memory, ready made: reading one is copying it, and so is sending it."""

    def __init__(self, samples: int) -> None:
        self.pictures = torch.rand(samples, 3, 224, 224)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.pictures)


class Images(IterableDataset[torch.Tensor]):
    """Images packed as a PNG packs them: decoded, and made floats of mean 0 and deviation 1."""

    def __init__(self, samples: int) -> None:
        steps = torch.randint(-2, 3, (3, 224, 224)).cumsum(2).add(128).clamp(0, 255).to(torch.uint8)
        self.packed = [zlib.compress(steps.roll(shift, 1).numpy().tobytes(), 6) for shift in range(samples)]
        self.mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
        self.deviation = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for packed in self.packed:
            picture = torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8)
            yield picture.view(3, 224, 224).float().div_(255).sub_(self.mean).div_(self.deviation)


@dataclass(frozen=True)
class Case:
    """One kind of batch."""

    name: str
    dataset: Callable[[int], IterableDataset[torch.Tensor]]
    batch_size: int
    batches: int
    budget: float


CASES = (
    Case("16 x 64 floats", Rows, 16, 1000, 5.0),
    Case("8 x 3 x 224 x 224 images", Images, 8, 40, 1.6),
    # Reading is one copy, and rank 1 receives its half by one more. The speed of memory matters.
    Case("8 x 3 x 224 x 224 floats in memory", Floats, 8, 40, 4.0),
)
ROUNDS = 15


def time_pass(loader: Any) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def time_plain(loader: Any, rank: int) -> float:
    """Only process 0 reads; the other waits without spending processor time."""
    return time_pass(loader if rank == 0 else ())


def compare(case: Case) -> Pair:
    """Measure seconds for a batch read, and their ratio."""
    rank = PartialState().process_index
    plain = DataLoader(case.dataset(case.batches * case.batch_size), batch_size=case.batch_size)
    ours = prepare_data_loader(plain, put_on_device=True, dispatch_batches=True)
    for loader in (plain, ours):
        time_pass(loader)
    times = [(time_plain(plain, rank), time_pass(ours)) for _ in range(ROUNDS)]
    raw, dispatched = ([seconds / case.batches for seconds in column] for column in zip(*times, strict=True))
    ratio = median(second / first for first, second in times)
    return Pair(case.name, median(raw), median(dispatched), ratio, case.budget)


def measure_in(answer: str, compare_all: Callable[[], list[Pair]]) -> None:
    """The work of one process; process 0 writes what it measured."""
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    pairs = compare_all()
    if state.is_main_process:
        Path(answer).write_bytes(pickle.dumps([vars(pair) for pair in pairs]))
    state.destroy_process_group()


def start_process(
    rank: int,
    port: int,
    answer: str,
    program: str = __file__,
    processes: int = PROCESSES,
    arguments: tuple[str, ...] = (),
) -> subprocess.Popen[bytes]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (rank, rank, processes, processes, "127.0.0.1", port)
    environment = {**os.environ, **dict(zip(names, map(str, values), strict=True)), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, program, "--measure", answer, *arguments], env=environment)


def run_processes(start: Callable[..., subprocess.Popen[bytes]], processes: int = PROCESSES) -> list[Pair]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = str(Path(folder) / "pairs")
        started = [start(rank, port, answer) for rank in range(processes)]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"the measuring processes ended with {codes}")
        return [Pair(**fields) for fields in pickle.loads(Path(answer).read_bytes())]


def main() -> int:
    if sys.argv[1:2] == ["--measure"]:
        measure_in(sys.argv[2], lambda: [compare(case) for case in CASES])
        return 0
    return report(run_processes(start_process), "Dispatched loading, two gloo processes, a batch read")


if __name__ == "__main__":
    sys.exit(main())
