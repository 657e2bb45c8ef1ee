"""A step on sequences that two processes divide: Ulysses by torch beside context parallelism.

Both train a small causal transformer in the same block, with the same sequences. Processor seconds of rank 0,
collectives and the bytes that it receives in forward and backward are counted, gradients of replicas
included. The two losses are compared.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from pairing import Pair, measure, report
from ranks import start
from whole_matrices import Collectives

PROCESSES, ROUNDS = 2, 15
LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 4, 128, 4, 512, 1024
WAYS: tuple[dict[str, Any], ...] = (
    {"cp_size": PROCESSES},
    {"sp_size": PROCESSES, "sp_backend": "torch"},
)
TIME, COLLECTIVES, BYTES, LOSS = 1.2, 1.1, 0.75, 10.0
"""Largest ratios to context parallelism, and largest difference of the losses in millionths."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        heads = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.inputs(first(x)).chunk(3, -1)
        )
        attended = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.widen(second(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(tokens) + self.positions(positions)))


def step(accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Train one step, and return the mean loss of the positions of this rank."""
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH).square() % VOCABULARY
    buffers = [tokens, tokens.roll(-1, 1), torch.arange(LENGTH).repeat(2, 1)]
    with accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
        inputs, labels, positions = buffers
        loss = cross_entropy(model(inputs, positions).flatten(0, 1), labels.flatten())
        accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def prepare(sizes: dict[str, Any]) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    torch.manual_seed(0)
    model = Net()
    return (accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3)))


def run_rank() -> list[Pair] | None:
    ways = [partial(step, *prepare(sizes)) for sizes in WAYS]
    accelerator = ways[-1].args[0]
    losses, calls, received = [], [], []
    for way in ways:
        way()  # compares the model with whole sequences
        way()  # builds the buckets of gradients again
        with Collectives() as counted:
            loss = way()
        calls.append(counted.calls)
        received.append(counted.received)
        losses.append(float(accelerator.reduce(loss, "mean")))
    pairs = [
        measure("processor time", *ways, budget=TIME, repetitions=1, rounds=ROUNDS),
        Pair("collectives", *calls, calls[1] / calls[0], COLLECTIVES, measured="n"),
        Pair("received bytes", *received, received[1] / received[0], BYTES, measured="B"),
        Pair("difference of the losses", *losses, 1e6 * abs(losses[1] / losses[0] - 1), LOSS, "ppm", "n"),
    ]
    is_first = accelerator.is_main_process
    accelerator.end_training()
    return pairs if is_first else None


def main() -> int:
    [pairs] = start(run_rank, PROCESSES)
    return report(pairs, "A step: context parallelism (raw) and Ulysses by torch (ours), two processes")


if __name__ == "__main__":
    sys.exit(main())
