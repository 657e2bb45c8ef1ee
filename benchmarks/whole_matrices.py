"""What steps of torch's Muon cost by owners of whole matrices, over torch's own path, under FSDP 2.

Two processes train. In torch's path (`whole_matrices=False`) Muon computes with distributed tensors, whose
operations communicate. Processor seconds, collectives and received bytes of rank 0 are counted, and the bytes
of the states of the rank that has most of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pairing import Pair, measure, report
from ranks import start

PROCESSES, LAYERS, WIDTH = 2, 4, 128
REPETITIONS, ROUNDS = 3, 20
TIME_BUDGET, COLLECTIVES_BUDGET, BYTES_BUDGET, STATE_BUDGET = 0.9, 0.02, 0.9, 1.05


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.widen(x)))


class Collectives(TorchDispatchMode):
    """Count the collectives inside of the block, and the bytes of their results on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.received = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it runs the operations of its shards, which are counted
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap")):
            self.calls += 1
            received = tree_leaves(result if isinstance(result, Tensor) else args[0])
            self.received += sum(tensor.nbytes for tensor in received)
        return result


def prepare(accelerator: Any, **options: Any) -> Any:
    """Return a prepared Muon whose parameters have gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    model, muon = accelerator.prepare(model, torch.optim.Muon(model.parameters(), lr=0.01), **options)
    accelerator.backward(model(torch.randn(8, WIDTH)).square().mean())
    return muon


def run_rank() -> tuple[Pair, list[Any], list[int]] | None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    ways = prepare(accelerator, whole_matrices=False), prepare(accelerator)
    traffic = []
    for muon in ways:
        for _ in range(2):  # steps 1 and 2 also compare the replicas
            muon.step()
        with Collectives() as counted:
            muon.step()
        traffic.append((counted.calls, counted.received))
    pair = measure(
        "a step of Muon by owners, over that with distributed tensors",
        ways[0].step,
        ways[1].step,
        budget=TIME_BUDGET,
        repetitions=REPETITIONS,
        rounds=ROUNDS,
    )
    held = sum(value.nbytes for state in ways[1].state.values() for value in state.values())
    states = accelerator.gather(torch.tensor([held])).tolist()
    is_first = accelerator.is_main_process
    accelerator.end_training()
    return (pair, traffic, states) if is_first else None


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    [(pair, traffic, states)] = start(run_rank, PROCESSES)
    (their_calls, their_bytes), (calls, received) = traffic
    share = sum(states) / PROCESSES
    pairs = [
        pair,
        Pair("its collectives", their_calls, calls, calls / their_calls, COLLECTIVES_BUDGET, measured="n"),
        Pair(
            "bytes that a rank receives in it",
            their_bytes,
            received,
            received / their_bytes,
            BYTES_BUDGET,
            measured="B",
        ),
        Pair(
            "states of the rank with most, over an equal share",
            share,
            max(states),
            max(states) / share,
            STATE_BUDGET,
            measured="B",
        ),
    ]
    return report(pairs, "Whole matrices")


if __name__ == "__main__":
    sys.exit(main())
