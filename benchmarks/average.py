"""What an average of the weights adds to a training step of a small transformer.

The steps with and without it are otherwise equal. `save_state` and evaluations are not timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from pairing import measure, report

WIDTH, LAYERS, BATCH, LENGTH = 128, 4, 8, 64
BUDGET = 1.03  # at most 3 % of a step
REPETITIONS, ROUNDS = 3, 40


def prepare_step(*, averages: bool) -> Callable[[], None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    transformer = nn.TransformerEncoder(layer, LAYERS)
    model, optimizer = accelerator.prepare(transformer, torch.optim.AdamW(transformer.parameters()))
    if averages:
        accelerator.average(model)
    inputs = torch.randn(BATCH, LENGTH, WIDTH)

    def step() -> None:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> int:
    torch.set_num_threads(1)
    work = f"step with an average of the weights, {LAYERS} layers, {BATCH * LENGTH} tokens"
    without, with_average = prepare_step(averages=False), prepare_step(averages=True)
    pair = measure(work, without, with_average, budget=BUDGET, repetitions=REPETITIONS, rounds=ROUNDS)
    return report([pair], "Averages of weights")


if __name__ == "__main__":
    sys.exit(main())
