"""What one training step of a tiny model costs through the library, over the same step by hand.

A tiny model on purpose: whatever the library adds shows against two linear layers. A window of several
micro-batches costs more than a step, because each call checks which gradients belong to the window. The same
loops take 2.0 to 2.4 times the step by hand with accelerate 1.15.0.

The calls and bytecodes of the library in a step and in the read of a batch are counted, too. They are equal
in each run, but not with each version of Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from counting import count_bytecodes, count_calls
from pairing import Pair, measure, report

REPETITIONS, WINDOW = 60, 4


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def by_hand(inputs: torch.Tensor, *, bf16: bool = False) -> Callable[[], None]:
    model, optimizer, scheduler = parts()

    def step() -> None:
        if bf16:
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(inputs)
            outputs = outputs.float()
        else:
            outputs = model(inputs)
        outputs.sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return step


def by_hand_accumulating(inputs: torch.Tensor) -> Callable[[], None]:
    model, optimizer, scheduler = parts()
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        (model(inputs).sum() / WINDOW).backward()
        if count % WINDOW == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return step


def prepared(inputs: torch.Tensor, **choices: object) -> Callable[[], None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, **choices)  # type: ignore[arg-type]
    model, optimizer, scheduler = accelerator.prepare(*parts())

    def step() -> None:
        accelerator.backward(model(inputs).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    def accumulating_step() -> None:
        with accelerator.accumulate(model):
            step()

    return accumulating_step if "gradient_accumulation_steps" in choices else step


def count(work: str, repeat: Callable[[], object], max_calls: int, max_bytecodes: int) -> list[Pair]:
    """Counts the calls and bytecodes of the library in work that has been done before."""
    for _ in range(REPETITIONS):
        repeat()
    calls, bytecodes = count_calls(repeat).total, count_bytecodes(repeat)
    return [
        Pair(f"calls, {work}", 0, calls, calls, max_calls, "n", "n"),
        Pair(f"bytecodes, {work}", 0, bytecodes, bytecodes, max_bytecodes, "n", "n"),
    ]


def read_batches() -> Callable[[], object]:
    """Returns the function that reads a batch of a prepared loader."""
    AcceleratorState._reset_state(reset_partial_state=True)
    samples = TensorDataset(torch.randn(8 * 2 * REPETITIONS, 16))
    batches = iter(Accelerator(cpu=True).prepare(DataLoader(samples, batch_size=8)))
    return lambda: next(batches)


def asking() -> Pair:
    """Time the two questions of a step, exchanges included, and a plain attribute beside them."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)

    def by_attribute() -> None:
        accelerator.step, accelerator.step  # noqa: B018

    def ask() -> None:
        accelerator.should_save, accelerator.should_stop  # noqa: B018

    pair = measure("should_save and should_stop", by_attribute, ask, budget=2e-6, repetitions=20_000)
    accelerator.end_training()
    return replace(pair, figure=pair.ours, unit="s")


def main() -> int:
    torch.set_num_threads(1)
    inputs = torch.randn(8, 16)
    pairs: list[Pair] = [
        measure("step", by_hand(inputs), prepared(inputs), budget=1.25, repetitions=REPETITIONS),
        measure(
            f"step inside accumulate(), windows of {WINDOW}",
            by_hand_accumulating(inputs),
            prepared(inputs, gradient_accumulation_steps=WINDOW),
            budget=1.60,
            repetitions=REPETITIONS,
        ),
        measure(
            "step inside accumulate(), windows of 1",
            by_hand(inputs),
            prepared(inputs, gradient_accumulation_steps=1),
            budget=1.35,
            repetitions=REPETITIONS,
        ),
        measure(
            "step in bf16 autocast",
            by_hand(inputs, bf16=True),
            prepared(inputs, mixed_precision="bf16"),
            budget=1.25,
            repetitions=REPETITIONS,
        ),
        asking(),
        *count("step", prepared(inputs), 22, 550),
        *count(
            "step inside accumulate(), windows of 1",
            prepared(inputs, gradient_accumulation_steps=1),
            28,
            600,
        ),
        *count("batch", read_batches(), 6, 190),
    ]
    return report(pairs, "Training step")


if __name__ == "__main__":
    sys.exit(main())
