"""What a run costs per value, file, tensor and sample: the constants of `docs/concepts/scale.md`."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore

from accelerate.checkpointing import shard_files
from accelerate.checkpointing.manifest import FileRecord, Manifest, checksum_of, read
from accelerate.checkpointing.sharded import LocalShards, Shard
from accelerate.data_loader import ConstantMemorySampler, SeedableRandomSampler
from accelerate.state import StoreChannel

VALUES, FILES, TENSORS, RANKS, SAMPLES, BYTES = 4096, 10_000, 1000, 16, 10**7, 1 << 28
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
        "shard of a tensor, bytes sent": len(json.dumps(reports)) / count,
        "shard of a tensor, metadata bytes": metadata / count,
        "shard of a tensor, joined": finished / count,
    }


def shuffle() -> dict[str, float]:
    """A stored order until its first index, and a computed one for each index."""
    stored = SeedableRandomSampler(range(SAMPLES), data_seed=0)  # type: ignore[arg-type]
    computed = ConstantMemorySampler(range(100 * SAMPLES), data_seed=0)  # type: ignore[arg-type]
    few = SAMPLES // 10
    return {
        "sample of a stored shuffle": seconds_of(lambda: next(iter(stored))) / SAMPLES,
        "sample of a computed shuffle": seconds_of(lambda: sum(islice(iter(computed), few))) / few,
    }


def check_bytes() -> dict[str, float]:
    content = torch.zeros(BYTES, dtype=torch.uint8).numpy().data
    return {"byte of a checksum": min(seconds_of(lambda: checksum_of(content)) for _ in range(3)) / BYTES}


def measure_constants() -> dict[str, float]:
    """Seconds, or bytes where the name says so, for one of each."""
    parts = (read_values, read_manifest, join_metadata, shuffle, check_bytes)
    return {name: figure for part in parts for name, figure in part().items()}


if __name__ == "__main__":
    for name, figure in measure_constants().items():
        print(f"{name}: {figure:.3g}")
