"""What hooks cost for each module, and how fast a model computes whose weights come from the disk."""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from accelerate import cpu_offload, disk_offload, dispatch_model, load_checkpoint_and_dispatch
from accelerate.checkpointing import save_sharded
from accelerate.devices import of_device
from accelerate.diagnostics import MemoryMeter
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from pairing import Pair, measure, report

MODULES, WIDTH, LAYERS, TOKENS = 50, 768, 4, 256
SHARD = "50MB"


class Noted(nn.Linear):
    """A layer that computes nothing, so that what is left is the cost of calling it."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def chain() -> nn.Sequential:
    return nn.Sequential(*(Noted(2, 2) for _ in range(MODULES)))


def per_module(work: str, plain: nn.Module, hooked: nn.Module) -> Pair:
    """Measure seconds that a hook adds to each module."""
    x = torch.ones(1, 2)
    pair = measure(work, lambda: plain(x), lambda: hooked(x), budget=0, repetitions=50)
    return Pair(
        work, pair.raw / MODULES, pair.ours / MODULES, (pair.ours - pair.raw) / MODULES, 10e-6, unit="s"
    )


def transformer() -> Any:
    layer = nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()


def per_forward(work: str, plain: nn.Module, ours: nn.Module, budget: float) -> Pair:
    """Measure a forward of a model that computes much, over that of the plain one."""
    x = torch.randn(1, TOKENS, WIDTH)
    return measure(work, lambda: plain(x), lambda: ours(x), budget=budget, repetitions=1, rounds=15)


def from_shards(plain: nn.Module, folder: str) -> nn.Module:
    """Leave the weights in files of safetensors."""
    save_sharded(plain.state_dict(), Path(folder), SHARD)
    return load_checkpoint_and_dispatch(copy.deepcopy(plain).to("meta"), folder, {"": "disk"}).eval()


def peak_of_forward(model: nn.Module, block: int) -> Pair:
    """Measure the memory that a forward takes, over that of two blocks and what activations take anyway."""
    x = torch.randn(1, 8, WIDTH)
    meter, before = MemoryMeter(of_device(torch.device("cpu"))), psutil.Process().memory_info().rss
    meter.start()
    model(x)
    model(x)
    allowed, taken = 2 * block, meter.peak() - before
    return Pair("peak memory of that, over two blocks", allowed, taken, taken / allowed, 1.3, measured="B")


def main() -> int:
    torch.set_num_threads(1)
    placed, plain = chain(), transformer()
    for module in placed:
        add_hook_to_module(module, AlignDevicesHook("cpu"))
    on_cpu, in_memory, on_disk = (copy.deepcopy(plain) for _ in range(3))
    block = sum(each.nbytes for each in plain.layers[0].parameters())
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as shards, torch.no_grad():
        left = from_shards(plain, shards)
        peak = peak_of_forward(left, block)
        pairs = [
            per_module("a hook that brings inputs, per module", chain(), placed),
            per_module("a hook that brings weights from memory, per module", chain(), cpu_offload(chain())),
            per_forward("a map to the CPU", plain, dispatch_model(on_cpu, {"": "cpu"}), 1.02),
            per_forward(
                "weights in memory, each block's put in its place", plain, cpu_offload(in_memory), 1.05
            ),
            per_forward(
                "weights on the disk, a file each, in the page cache",
                plain,
                disk_offload(on_disk, folder),
                1.15,
            ),
            per_forward(
                "weights on the disk, in shards of safetensors, in the page cache", plain, left, 1.15
            ),
            peak,
        ]
    return report(pairs, "Offload: forwards over those of the plain model")


if __name__ == "__main__":
    sys.exit(main())
