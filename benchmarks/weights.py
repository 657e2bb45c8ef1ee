"""What filling a model from files of safetensors costs over mapping the files and assigning the tensors."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file
from torch import nn

from accelerate import load_checkpoint_in_model
from accelerate.checkpointing import save_sharded
from accelerate.devices import of_device
from accelerate.diagnostics import MemoryMeter
from pairing import Pair, measure, report

LAYERS, WIDTH, SHARD = 24, 256, "20MB"
SHARD_BYTES = 20 * 10**6


def build() -> nn.Module:
    """About three hundred tensors, of 80 MB together."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def fill_by_hand(model: nn.Module, folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    state: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        state.update(load_file(folder / name))
    model.load_state_dict(state, assign=True)


def peak_of_loading(folder: str) -> Pair:
    """Measure the memory that filling takes where each tensor is converted, over model and one shard."""
    with torch.device("meta"):
        model = build()
    half = sum(each.nbytes for each in model.state_dict().values()) // 2
    meter, before = MemoryMeter(of_device(torch.device("cpu"))), psutil.Process().memory_info().rss
    meter.start()
    load_checkpoint_in_model(model, folder, {"": "cpu"}, dtype=torch.bfloat16)
    allowed, taken = half + SHARD_BYTES, meter.peak() - before
    return Pair(
        "peak memory of filling it in bfloat16, over that model and one shard",
        allowed,
        taken,
        taken / allowed,
        1.05,
        measured="B",
    )


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        save_sharded(build().state_dict(), Path(folder), SHARD)
        peak = peak_of_loading(folder)  # first: what was freed before could hide what is taken
        with torch.device("meta"):
            model = build()
        pair = measure(
            "fill a model on the CPU from shards, over mapping them and load_state_dict(assign=True)",
            lambda: fill_by_hand(model, Path(folder)),
            lambda: load_checkpoint_in_model(model, folder, {"": "cpu"}, strict=True),
            budget=2.0,
            repetitions=3,
            rounds=20,
        )
    return report([pair, peak], "Weights")


if __name__ == "__main__":
    sys.exit(main())
