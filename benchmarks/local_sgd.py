"""What DiLoCo adds to the steps of a rank that trains on its own, and the bytes that ranks send.

The first row compares processor time on one process, which sends nothing, over whole intervals. The others
compare the bytes of a step of two ranks with those of the gradients that DistributedDataParallel sends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accelerate import Accelerator, DiLoCo
from pairing import Pair, measure, report

WIDTH, LAYERS, BATCH, LENGTH, INTERVAL, PROCESSES = 128, 4, 8, 64, 30, 2
BUDGET = 1.03  # at most 3 % of a step
ROUNDS = 12
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "DiLoCo": ({}, 1.01),
    "DiLoCo, 5 fragments, delay of 2 steps": ({"num_fragments": 5, "delay": 2}, 1.01),
    "DiLoCo, 5 fragments, delay of 2 steps, int8": (
        {"num_fragments": 5, "delay": 2, "quantize": "int8"},
        0.26,
    ),
}
"""Options, and the largest part of the bytes of the parameters that an interval sends."""


def prepare_step(
    accelerator: Accelerator, *, with_diloco: bool = True, **options: Any
) -> tuple[Callable[[], None], DiLoCo]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    transformer = nn.TransformerEncoder(layer, LAYERS)
    model, optimizer = accelerator.prepare(transformer, torch.optim.AdamW(transformer.parameters()))
    diloco = DiLoCo(accelerator, model, INTERVAL, enabled=with_diloco, **options)
    diloco.__enter__()
    inputs = torch.randn(BATCH, LENGTH, WIDTH)

    def step() -> None:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if with_diloco:
            diloco.step()

    return step, diloco


def measure_time() -> Pair:
    work = f"step with DiLoCo, {INTERVAL} inner steps, {LAYERS} layers, {BATCH * LENGTH} tokens"
    accelerator = Accelerator(cpu=True)
    without, ours = (prepare_step(accelerator, with_diloco=each)[0] for each in (False, True))
    return measure(work, without, ours, budget=BUDGET, repetitions=INTERVAL, rounds=ROUNDS)


def count_bytes() -> None:
    """Prints the bytes of an interval of each way, which a rank sends, and those of the parameters."""
    accelerator = Accelerator(cpu=True)
    for name, (options, _) in WAYS.items():
        step, diloco = prepare_step(accelerator, **options)
        for _ in range(2 * INTERVAL):
            step()
        if accelerator.is_main_process:
            size = sum(parameter.nbytes for parameter in diloco.model.parameters())
            print(f"bytes|{name}|{diloco.bytes_sent / 2}|{size}", flush=True)
    accelerator.end_training()


def measure_bytes() -> list[Pair]:
    command = ["-m", "accelerate.commands.launch", "--cpu", "--main_process_port", "0", "--num_processes"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(PROCESSES), __file__, "--count"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    pairs = []
    for line in done.stdout.splitlines():
        if line.startswith("bytes|"):
            _, name, sent, size = line.split("|")
            gradients = 2 * (PROCESSES - 1) / PROCESSES * float(size)  # of one step
            work = f"bytes of a step, {name}, of those of the gradients"
            ours, budget = float(sent) / INTERVAL, WAYS[name][1] / INTERVAL
            pairs.append(Pair(work, gradients, ours, ours / gradients, budget, measured="B"))
    assert len(pairs) == len(WAYS), done.stdout
    return pairs


def main() -> int:
    torch.set_num_threads(1)
    return report([measure_time(), *measure_bytes()], "DiLoCo")


if __name__ == "__main__":
    if "--count" in sys.argv:
        count_bytes()
    else:
        sys.exit(main())
