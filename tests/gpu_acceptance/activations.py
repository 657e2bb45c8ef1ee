"""Offload of the inputs of recomputed blocks: time, peak and gradients beside recomputation alone."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from accelerate.utils import ActivationCheckpointing

from .models import Gpt2, Shape, tokens_for
from .setting import NotAvailableError, Setting

LARGE = Shape(vocabulary=8192, context=2048, width=1024, layers=24, heads=16)
TINY = Shape(vocabulary=96, context=256, width=64, layers=4, heads=2)
BATCH = 8


def compare_offload(setting: Setting) -> None:
    """Train GPT-2 with recomputed blocks, with and without offload of their inputs."""
    if setting.is_host:
        raise NotAvailableError("activations of the CPU are in host memory already")
    setting.require("bfloat16")
    shape, rounds, rows = setting.size(LARGE, TINY), setting.size(12, 2), setting.size(BATCH, 2)
    batches = tokens_for(shape, rounds + 2, rows, setting.device)
    runs = {offload: measure(setting, shape, batches, offload) for offload in (False, True)}
    plain, offloaded = runs[False], runs[True]
    largest = max(float(value.abs().max()) for value in plain["gradients"])
    pairs = zip(offloaded["gradients"], plain["gradients"], strict=True)
    difference = max(float((ours - wanted).abs().max()) for ours, wanted in pairs) / largest
    setting.report("largest difference of a gradient, over the largest gradient", difference, "")
    assert difference < 1e-2, "the offload changes gradients"
    inputs = (shape.layers - 2) * rows * shape.context * shape.width * 4  # one is used, one is prefetched
    setting.report("peak of recomputation alone", plain["peak"], "B")
    setting.report("peak with offload", offloaded["peak"], "B", at_most=plain["peak"] - 0.9 * inputs)
    for name, run in (("recomputation alone", plain), ("offload", offloaded)):
        setting.report(f"peak over plan, {name}", run["peak"] / run["plan"].peak, "x")
    setting.report("host memory by plan", offloaded["plan"].host, "B")
    setting.report("step of recomputation alone", plain["seconds"], "s")
    setting.report("step with offload", offloaded["seconds"], "s")
    setting.report("step over that of recomputation alone", offloaded["seconds"] / plain["seconds"], "x")


def measure(setting: Setting, shape: Shape, batches: list[Tensor], offload: bool) -> dict[str, Any]:
    """Return the gradients of the first batch, and the median time and the peak of later steps."""
    accelerator = setting.make_accelerator(
        mixed_precision="bf16", kwargs_handlers=[ActivationCheckpointing(offload=offload)]
    )
    torch.manual_seed(0)
    raw = Gpt2(shape).to(setting.device)
    optimizer = torch.optim.SGD(raw.parameters(), lr=1e-3)
    plan = accelerator.plan_memory(raw, optimizer, batches[0], loss_of, max_norm=None)
    prepared: list[Any] = list(accelerator.prepare(raw, optimizer))
    accelerator.backward(prepared[0](batches[0]))
    gradients = [p.grad.detach().float().cpu() for p in raw.parameters() if p.grad is not None]
    prepared[1].zero_grad()
    step = partial(take_step, accelerator, prepared[0], prepared[1])
    step(batches[1])
    with accelerator.peak_memory() as used:
        seconds = median(setting.time(partial(step, tokens)) for tokens in batches[2:])
    prepared[:] = accelerator.free_memory(*prepared)
    del step, raw, optimizer
    return {"gradients": gradients, "seconds": seconds, "peak": int(used.peak), "plan": plan}


def take_step(accelerator: Any, model: Any, optimizer: Any, tokens: Tensor) -> None:
    accelerator.backward(model(tokens))
    optimizer.step()
    optimizer.zero_grad()


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens)
    return loss
