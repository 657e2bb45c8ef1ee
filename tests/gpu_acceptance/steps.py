"""A training step of GPT-2 through the library, over the same step of plain torch.

Both take turns; the ratio is the median over neighbouring rounds, so that drift of the clock does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from .models import TINY, Gpt2, Shape, tokens_for
from .setting import Setting

BUDGET = 1.005
WINDOW, LARGEST_NORM = 4, 1.0
Step = Callable[[Tensor], Tensor]


def time_plain(setting: Setting) -> None:
    """Forward, backward and update."""
    measure(setting, window=1, clips=False)


def time_accumulated(setting: Setting) -> None:
    """Updates after several backward passes."""
    measure(setting, window=WINDOW, clips=False)


def time_clipped(setting: Setting) -> None:
    """Gradients are clipped before each update."""
    measure(setting, window=1, clips=True)


def measure(setting: Setting, window: int, clips: bool) -> None:
    setting.require("bfloat16")
    shape = setting.size(Shape(), TINY)
    rounds = setting.size(40, 4)
    repetitions = setting.size(max(1, WINDOW // window), 1)
    batches = tokens_for(shape, repetitions * window, setting.size(8, 2), setting.device)
    ours = make_ours(setting, shape, window, clips)
    raw = make_raw(setting, shape, window, clips)
    check_losses(setting, ours, raw, batches)
    times = [take_turns(setting, raw, ours, batches, is_even=bool(turn % 2)) for turn in range(rounds)]
    ratios = [second / first for first, second in times]
    low, _, high = quantiles(ratios, n=4)
    setting.report("step over that of plain torch", median(ratios), "x", at_most=BUDGET)
    setting.report("half of the ratios are within", high - low, "x")
    for name, column in zip(("plain step", "our step"), zip(*times, strict=True), strict=True):
        setting.report(name, median(column) / len(batches), "s")
    tokens = shape.context * batches[0].shape[0]
    setting.report("tokens per second", tokens * len(batches) / median(time for _, time in times), "")


def take_turns(
    setting: Setting, raw: Step, ours: Step, batches: list[Tensor], is_even: bool
) -> tuple[float, float]:
    """Return seconds of a round by hand and of one through the library; who begins alternates."""
    works = [partial(run_round, raw, batches), partial(run_round, ours, batches)]
    if is_even:
        first = setting.time(works[0])
        return first, setting.time(works[1])
    second = setting.time(works[1])
    return setting.time(works[0]), second


def run_round(step: Step, batches: list[Tensor]) -> None:
    for tokens in batches:
        step(tokens)


def check_losses(setting: Setting, ours: Step, raw: Step, batches: list[Tensor]) -> None:
    """Train both on the same batches, which also warms them up."""
    pairs = [(float(ours(tokens)), float(raw(tokens))) for _ in range(2) for tokens in batches]
    difference = max(abs(a - b) / abs(b) for a, b in pairs)
    setting.report("largest relative difference of a loss from plain torch", difference, "")
    assert difference < 1e-2, f"losses differ: {pairs}"


def make_parts(setting: Setting, shape: Shape) -> tuple[Gpt2, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Gpt2(shape).to(setting.device)
    fused = setting.device in ("cuda", "cpu", "xpu")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def make_raw(setting: Setting, shape: Shape, window: int, clips: bool) -> Step:
    model, optimizer = make_parts(setting, shape)
    count = 0

    def step(tokens: Tensor) -> Tensor:
        nonlocal count
        count += 1
        with torch.autocast(setting.device, torch.bfloat16):
            loss = model(tokens)
        (loss / window if window > 1 else loss).backward()
        if count % window == 0:
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def make_ours(setting: Setting, shape: Shape, window: int, clips: bool) -> Step:
    accelerator = setting.make_accelerator(mixed_precision="bf16", gradient_accumulation_steps=window)
    prepared: tuple[Any, Any] = accelerator.prepare(*make_parts(setting, shape))
    model, optimizer = prepared

    def step(tokens: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            loss = model(tokens)
            accelerator.backward(loss)
            if clips and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step
