"""How many bytes of parameters, gradients and optimizer state each process holds, over its fair share.

The fair share is what one process alone holds, divided by the number of processes that share the model. What
is counted are storages, each once, after the backward pass of the second step. All other tensors that are
alive are held against one whole unit: those of the last collective may be there, but not a whole model. The
process with most counts.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from pairing import Pair, report
from ranks import start

UNITS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Layer"]}
ONE, TWO = {"fsdp_version": 1, **UNITS}, {"fsdp_version": 2, **UNITS}
KINDS = ("parameters", "gradients", "optimizer state")
WIDTH, LAYERS, VOCABULARY = 250, 3, 997  # sizes that do not divide evenly

WAYS: dict[str, tuple[dict[str, Any], dict[str, int] | None, int, int]] = {
    "FSDP 1": (ONE, None, 2, 2),
    "FSDP 1, own parameters": ({**ONE, "use_orig_params": True}, None, 2, 2),
    "FSDP 1, SHARD_GRAD_OP": ({**ONE, "sharding_strategy": "SHARD_GRAD_OP"}, None, 2, 2),
    "FSDP 2": (TWO, None, 2, 2),
    "FSDP 2, kept after forward": ({**TWO, "reshard_after_forward": False}, None, 2, 2),
    "FSDP 2, four processes": (TWO, None, 4, 4),
    "FSDP 2, two copies": (TWO, {"dp_replicate_size": 2, "dp_shard_size": 2}, 4, 2),
}
"""Name -> fields of the plugin, sizes of the mesh, number of processes, how many of them share the model."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.widen(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens))).square().mean()


def bytes_of(tensors: Iterable[Any]) -> int:
    """Add up the storages of tensors, each once; of DTensors the local shard."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local = getattr(tensor, "_local_tensor", tensor)
            if local.device.type != "meta" and not isinstance(local, FakeTensor):
                storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    states = [value for state in optimizer.state.values() for value in state.values()]
    gc.collect()
    others = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    kinds = [bytes_of(kind) for kind in (parameters, gradients, states)]
    return (*kinds, bytes_of([*parameters, *gradients, *states, *others]) - sum(kinds))


def train(accelerator: Any) -> tuple[int, ...]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.randint(VOCABULARY, (2, 8))
    accelerator.backward(model(tokens))
    optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(model(tokens))
    return held_by(model, getattr(optimizer, "optimizer", optimizer))


def alone() -> tuple[int, ...]:
    class Plain:
        prepare = staticmethod(lambda *objects: objects)
        backward = staticmethod(torch.Tensor.backward)

    return train(Plain())


def run_rank(way: str) -> tuple[int, ...]:
    plugin, mesh, *_ = WAYS[way]
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(**plugin),
        parallelism_config=None if mesh is None else ParallelismConfig(**mesh),
    )
    held = train(accelerator)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return held


def largest(way: str) -> tuple[int, ...]:
    """Train on the processes of a way; for each kind the bytes of the process that holds most."""
    return tuple(map(max, zip(*start(run_rank, WAYS[way][2], way), strict=True)))


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    *whole, _ = alone()
    unit = bytes_of(Layer().parameters())
    pairs = []
    for way, (*_, sharers) in WAYS.items():
        *held, others = largest(way)
        shares = [full / sharers for full in whole]
        pairs += [
            Pair(f"{way}: {kind}", share, ours, ours / share, 1.05, measured="B")
            for kind, share, ours in zip(KINDS, shares, held, strict=True)
        ]
        pairs.append(Pair(f"{way}: others, over one unit", unit, others, others / unit, 3.0, measured="B"))
    return min(report(pairs, "Bytes of each process, over its share of one process alone"), 1)


if __name__ == "__main__":
    sys.exit(main())
