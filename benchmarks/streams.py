"""How many bytes each rank reads of a stream in several files, over its fair part of them."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader
from accelerate.ops import current_transport
from dispatch import measure_in, run_processes, start_process
from pairing import Pair, report

FILES, LINES, WIDTH = 4, 2_000, 32
WORLDS = (2, 4)
BUDGET = 1.01


class Lines(IterableDataset[torch.Tensor]):
    """The lines of JSON files; counts the bytes that it reads."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths, self.num_shards, self.bytes = paths, len(paths), 0

    def shard(self, num_shards: int, index: int) -> Lines:
        return Lines(self.paths[index::num_shards])

    def __iter__(self) -> Iterator[torch.Tensor]:
        for path in self.paths:
            with path.open("rb") as lines:
                for line in lines:
                    self.bytes += len(line)
                    yield torch.tensor(json.loads(line))


def write_files(folder: Path) -> list[Path]:
    paths = [folder / f"{number}.jsonl" for number in range(FILES)]
    rows = torch.randint(10**6, (FILES, LINES, WIDTH), generator=torch.Generator().manual_seed(0)).tolist()
    for path, lines in zip(paths, rows, strict=True):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths


def compare(paths: list[Path]) -> list[Pair]:
    """Read the files once as a whole on each rank and once by shards; called on all ranks."""
    world = PartialState().num_processes
    part = sum(path.stat().st_size for path in paths) / world
    most = []
    for num_files in (len(paths) - 1, len(paths)):  # the first number does not divide
        loader: Any = DataLoader(Lines(paths[:num_files]), batch_size=16)
        loader = prepare_data_loader(loader, put_on_device=True, dispatch_batches=False)
        for _ in loader:
            pass
        dataset = getattr(loader.dataset, "dataset", loader.dataset)
        most.append(max(current_transport().gather_object(dataset.bytes)))
    work = f"bytes of a rank of {world}, {len(paths)} files; raw: {len(paths) - 1} files"
    return [Pair(work, *most, most[1] / part, BUDGET, measured="B")]


def main() -> int:
    if sys.argv[1:2] == ["--measure"]:
        measure_in(sys.argv[2], partial(compare, sorted(Path(sys.argv[3]).glob("*.jsonl"))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        pairs = []
        for world in WORLDS:
            start = partial(start_process, program=__file__, processes=world, arguments=(folder,))
            pairs += run_processes(start, world)
    return report(pairs, "Streams without dispatch: bytes that the busiest rank reads")


if __name__ == "__main__":
    sys.exit(main())
