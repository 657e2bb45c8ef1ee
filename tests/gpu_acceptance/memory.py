"""Memory that runs out, what is recorded then, and peaks beside estimates."""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
from typing import Any

import torch

from accelerate import find_executable_batch_size

from .models import TINY, Gpt2, Shape, tokens_for
from .setting import NotAvailableError, Setting

MIB = 2**20


def retry_smaller_batches(setting: Setting) -> None:
    """Halve a batch size until a step fits the memory of this process."""
    limit = setting.size(2048 * MIB, 64 * MIB)
    is_limited = setting.limit_memory(limit)
    accelerator = setting.make_accelerator()
    row, start = setting.size(4 * MIB, MIB // 4), 4096
    sizes: list[int] = []

    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size: int) -> float:
        sizes.append(batch_size)
        if not is_limited and batch_size * row > limit:
            raise torch.OutOfMemoryError(f"out of memory: {batch_size * row} bytes of {limit}")
        batch = torch.ones(batch_size, row // 4, device=accelerator.device, requires_grad=True)
        loss = batch.square().mean()
        accelerator.backward(loss)
        return float(loss)

    assert train() == 1.0
    assert sizes[0] == start
    assert 1 <= sizes[-1] < start
    assert sizes == [start >> step for step in range(len(sizes))]
    setting.report("attempts", len(sizes), "")
    setting.report("batch size that fits", sizes[-1], "")
    assert train() == 1.0
    assert sizes[-1] == sizes[-2], "the next call does not begin with the size that fitted"
    if not is_limited:
        setting.note("This device cannot limit memory: the part raised the errors itself.")
    elif (allocated := setting.allocated()) is not None:
        setting.report("memory that tensors still take", allocated, "B")
        assert allocated < MIB, "tensors of a failed attempt are still there"


def write_snapshot(setting: Setting) -> None:
    """Write the allocations when memory runs out in a block."""
    module = None if setting.is_host else getattr(setting.backend.torch_module(), "memory", None)
    if not hasattr(module, "_record_memory_history"):
        raise NotAvailableError(f"{setting.device} keeps no record of allocations")
    accelerator = setting.make_accelerator()
    with accelerator.peak_memory() as used:
        held = torch.empty(100 * MIB, dtype=torch.uint8, device=setting.device)
    assert 100 * MIB <= used.peak < 200 * MIB, used
    setting.limit_memory(512 * MIB)
    try:
        with accelerator.peak_memory(snapshot_dir=setting.folder):
            torch.empty(8192 * MIB, dtype=torch.uint8, device=setting.device)
    except torch.OutOfMemoryError:
        content = pickle.loads((setting.folder / "memory_0.pickle").read_bytes())
    else:
        raise AssertionError("8 GiB were given out of 512 MiB")
    assert content["segments"], "the record has no memory in it"
    assert content["device_traces"][0], "the record has no allocations in it"
    setting.report("recorded allocations", len(content["device_traces"][0]), "")
    del held


def compare_peak_with_estimate(setting: Setting) -> None:
    """Train GPT-2 on few tokens in two number formats; compare peaks with `accelerate estimate-memory`."""
    shape = setting.size(Shape(), TINY)
    folder = setting.folder / "model"
    setting.make_accelerator().save_model(Gpt2(shape), folder)
    estimates = estimate(folder)
    for precision, dtype, least in (("no", "float32", 0.95), ("bf16", "bfloat16", 0.85)):
        peak = peak_of_training(setting, shape, precision)
        if (left := setting.allocated()) is not None:
            setting.report(f"{dtype}: taken after free_memory", left, "B")
            assert left < estimates[dtype] / 8, f"{left} bytes of {peak} are still taken"
        setting.report(f"{dtype}: estimate", estimates[dtype], "B")
        setting.report(f"{dtype}: peak", peak, "B")
        # The peak also has workspaces of matrix products (68 MB on Hopper), and two more gradients of the
        # embedding (154 MB each), whose weight is also the head's. That of the CPU is of the whole process.
        budget: dict[str, Any] = {} if setting.is_host else {"at_least": least, "at_most": 1.25}
        setting.report(f"{dtype}: peak over estimate", peak / estimates[dtype], "x", **budget)


def estimate(folder: Any) -> dict[str, int]:
    """Return bytes of training with AdamW by number format, as the command prints them."""
    words = ["estimate-memory", str(folder), "--json", "--dtypes", "float32", "bfloat16"]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *words]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(answer.stdout)["dtypes"]
    return {dtype: row["training_bytes"]["total"] for dtype, row in rows.items()}


def peak_of_training(setting: Setting, shape: Shape, precision: str) -> int:
    if precision == "bf16":
        setting.require("bfloat16")
    accelerator = setting.make_accelerator(mixed_precision=precision)
    model = Gpt2(shape).to(setting.device)
    # Without temporary copies of all parameters, which belong to this implementation of AdamW alone.
    fused = setting.device in ("cuda", "cpu", "xpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused, foreach=None if fused else False)
    prepared: list[Any] = list(accelerator.prepare(model, optimizer))
    model, optimizer = prepared
    with accelerator.peak_memory() as used:
        for tokens in tokens_for(shape, 3, 1, setting.device):
            accelerator.backward(model(tokens[:, :8]))
            optimizer.step()
            optimizer.zero_grad()
    del model, optimizer
    prepared[:] = accelerator.free_memory(*prepared)
    gc.collect()  # a model under autocast refers to itself
    return int(used.peak)
