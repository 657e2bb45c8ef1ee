"""What a run costs per value, file, tensor and sample: the constants of `docs/concepts/scale.md`."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import HashStore

from accelerate.checkpointing import shard_files
from accelerate.checkpointing.local_shards import LocalShards, Shard
from accelerate.checkpointing.manifest import FileRecord, Manifest, checksum_of, read
from accelerate.data_loader import ConstantMemorySampler, SeedableRandomSampler
from accelerate.state import StoreChannel

VALUES, FILES, TENSORS, RANKS, SAMPLES, BYTES = 4096, 10_000, 1000, 16, 10**7, 1 << 28
PARAMETERS, SHARDED_OVER = 1000, 64
"""For what is projected: tensors of a model, and ranks over which they are sharded."""
KEY = {"ACCELERATE_RUN_KEY": "secret"}


def seconds_of(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def read_values() -> dict[str, float]:
    """Rank 0 reads the values of all ranks for a decision; signed, without the network."""
    channel = StoreChannel(HashStore(), "constants", KEY)
    for rank in range(VALUES):
        channel.post(f"0/{rank}", ["save_state", {"folder": "runs/one", "step": 1}])
    return {"value read": seconds_of(lambda: channel.gather("0", range(VALUES), 60.0)) / VALUES}


def read_manifest() -> dict[str, float]:
    """The manifest of a checkpoint that has many files."""
    names = [f"random_states_{number}.pkl" for number in range(FILES)]
    manifest = Manifest({name: FileRecord(name, 1 << 20, "0" * 16) for name in names}, world_size=FILES)
    with tempfile.TemporaryDirectory() as folder:
        written = seconds_of(lambda: manifest.write(Path(folder)))
        size = Path(folder, "manifest.json").stat().st_size
        loaded = seconds_of(lambda: read(Path(folder)))
    return {
        "file in the manifest, bytes": size / FILES,
        "file in the manifest, written": written / FILES,
        "file in the manifest, read": loaded / FILES,
    }


def join_metadata() -> dict[str, float]:
    """Each rank reports its shard of each tensor, and rank 0 writes the metadata of all."""

    def state_of(rank: int) -> dict[Any, LocalShards]:
        shard = Shard((8 * rank,), torch.zeros(8))
        whole = LocalShards((8 * RANKS,), torch.float32, (shard,))
        return {("state", f"model.layers.{number}.mlp.weight"): whole for number in range(TENSORS)}

    with tempfile.TemporaryDirectory() as folder:
        reports = []
        for rank in range(RANKS):
            payload = shard_files.payload("model", rank, state_of(rank))
            reports.append(payload.write(payload.content, Path(folder, f"__{rank}_0.distcp")))
        finished = seconds_of(lambda: shard_files.finish(Path(folder), reports))
        metadata = Path(folder, ".metadata").stat().st_size
    count = TENSORS * RANKS
    return {
        "shard of a tensor, sent bytes": len(json.dumps(reports)) / count,
        "shard of a tensor, metadata bytes": metadata / count,
        "shard of a tensor, joined": finished / count,
    }


def shuffle() -> dict[str, float]:
    """A stored order until its first index, and a computed one for each index."""
    stored = SeedableRandomSampler(range(SAMPLES), data_seed=0)  # type: ignore[arg-type]
    computed = ConstantMemorySampler(range(100 * SAMPLES), data_seed=0)  # type: ignore[arg-type]
    few, process, indices = SAMPLES // 10, psutil.Process(), iter(stored)
    before = process.memory_info().rss
    until_first = seconds_of(lambda: next(indices))
    return {
        "sample of a stored shuffle, bytes": (process.memory_info().rss - before) / SAMPLES,
        "sample of a stored shuffle": until_first / SAMPLES,
        "sample of a computed shuffle": seconds_of(lambda: sum(islice(iter(computed), few))) / few,
    }


def check_bytes() -> dict[str, float]:
    content = torch.zeros(BYTES, dtype=torch.uint8).numpy().data
    return {"byte of a checksum": min(seconds_of(lambda: checksum_of(content)) for _ in range(3)) / BYTES}


def measure_constants() -> dict[str, float]:
    """Seconds, or bytes where the name says so, for one of each."""
    parts = (read_values, read_manifest, join_metadata, shuffle, check_bytes)
    return {name: figure for part in parts for name, figure in part().items()}


def spell(name: str, figure: float) -> str:
    if name.endswith("bytes"):
        return f"{figure:,.0f}"
    return f"{_number(1e9 * figure)} ns" if figure < 1e-6 else f"{_number(1e6 * figure)} us"


def constants_table(constants: Mapping[str, float], requests: float) -> str:
    """The constants, and what one store answers."""
    head = f"| one | costs |\n|---|---:|\n| request to the store | {spell('', 1 / requests)} |\n"
    return head + "\n".join(f"| {name} | {spell(name, figure)} |" for name, figure in constants.items())


def projected_table(constants: Mapping[str, float], requests: float, ranks: Sequence[int]) -> str:
    """What the constants mean for more ranks than were measured."""
    entries = 3 * PARAMETERS  # AdamW has two more tensors for each parameter
    shard, read_one = constants["shard of a tensor, joined"], constants["value read"]
    in_metadata = constants["shard of a tensor, metadata bytes"]
    in_manifest, written = (
        constants["file in the manifest, bytes"],
        constants["file in the manifest, written"],
    )

    def metadata(shards: float) -> str:
        return f"{_number(shards * entries * shard)} s, {_number(shards * entries * in_metadata / 1e6)} MB"

    rows: dict[str, Callable[[int], str]] = {
        "hang detector, training: `N / 4` requests per second, of what one store answers": lambda n: (
            f"{n / 4 / requests:.0%}"
        ),
        "hang detector, waiting: `N` requests per second": lambda n: f"{n / requests:.0%}",
        "connections to the store: `3 N`": lambda n: f"{3 * n:,}",
        "inquiry: `N` states of 0.4 kB, which one rank reads": lambda n: (
            f"{_number(n * read_one)} s, {_number(n * 0.4e-3)} MB"
        ),
        "decision: `3 N` requests, `N` values that rank 0 reads": lambda n: (
            f"{_number(3 * n / requests + n * read_one)} s"
        ),
        "checkpoint: two decisions": lambda n: f"{_number(2 * (3 * n / requests + n * read_one))} s",
        "manifest: `N` files of random generators": lambda n: (
            f"{_number(n * written)} s, {_number(n * in_manifest / 1e6)} MB"
        ),
        "metadata of shards over all ranks: `3 N T` entries, joined by rank 0": metadata,
        f"the same with shards over {SHARDED_OVER} ranks and replicas of them": lambda n: metadata(
            SHARDED_OVER
        ),
    }
    head = f"| mechanism | {' | '.join(f'{n:,} ranks' for n in ranks)} |\n|---|{'---:|' * len(ranks)}\n"
    return head + "\n".join(f"| {row} | {' | '.join(map(cell, ranks))} |" for row, cell in rows.items())


def _number(value: float) -> str:
    """Two digits."""
    return f"{float(f'{value:.2g}'):,g}"


if __name__ == "__main__":
    for name, figure in measure_constants().items():
        print(f"{name}: {figure:.3g}")
