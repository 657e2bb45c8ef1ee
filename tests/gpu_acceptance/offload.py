"""Inference with a model larger than a limit of memory: how fast weights come to the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .bandwidth import MIB, measure_bandwidth
from .models import Layers, Stack, make_stack
from .setting import NotAvailableError, Setting

BUDGETS = {"cpu": 0.85, "disk": 0.2}
"""Parts of the bandwidth that weights reach. Those of files are also copied once by the CPU."""
LAYERS = 4
ROWS = 8
ORIGINAL_SECONDS = 60


def sizes_of(setting: Setting) -> dict[str, int]:
    """Return width and number of blocks, and how many blocks fit the limit for weights that stay."""
    return setting.size(
        {"width": 4096, "blocks": 24, "resident": 4, "repetitions": 7},
        {"width": 64, "blocks": 6, "resident": 2, "repetitions": 3},
    )


def infer_from_memory(setting: Setting) -> None:
    """Weights that do not fit wait in the memory of the CPU."""
    if setting.is_host:
        raise NotAvailableError("weights in the memory of the CPU are where it computes")
    measure(setting, "cpu")


def infer_from_disk(setting: Setting) -> None:
    """Weights that do not fit stay in files, which the page cache holds."""
    measure(setting, "disk")


def measure(setting: Setting, kind: str) -> None:
    sizes = sizes_of(setting)
    dtype = torch.bfloat16 if setting.backend.supports(torch.bfloat16) else torch.float32
    block = LAYERS * sizes["width"] ** 2 * dtype.itemsize
    bandwidth = measure_bandwidth(setting)
    original = run_original(setting, kind, sizes, dtype)
    model = make_stack(sizes["width"], LAYERS, sizes["blocks"], dtype)
    inputs = torch.randn(ROWS, sizes["width"], dtype=dtype).to(setting.device)
    wanted = compute_by_hand(setting, model, inputs)
    if not setting.is_host:
        setting.backend.empty_cache()
    limit = block * (sizes["resident"] + 4) + 256 * MIB
    is_limited = setting.limit_memory(limit)
    if (allocated := setting.allocated()) is not None:
        torch.accelerator.reset_peak_memory_stats()
    model, outputs, seconds = infer(model, setting.device, kind, sizes, block, inputs, setting.folder)
    torch.testing.assert_close(outputs, wanted)
    moved = block * (sizes["blocks"] - on_device(model, setting.device))
    setting.report("weights moved in a forward", moved, "B")
    setting.report("forward", seconds, "s")
    # The CPU reads files where they are: nothing is moved.
    budget = None if setting.is_host else BUDGETS[kind]
    setting.report("weights per second", moved / seconds, "B/s")
    setting.report("of what the device takes", moved / seconds / bandwidth, "x", at_least=budget)
    if allocated is not None:
        peak = torch.accelerator.max_memory_allocated()
        setting.report("peak of the device", peak, "B")
        assert peak <= limit, f"{peak} bytes, with a limit of {limit}"
        assert setting.tiny or limit < moved
    assert is_limited or setting.device != "cuda"
    if original is not None:
        setting.report("forward of the original", original["seconds"], "s")
        setting.report("forward over that of the original", seconds / original["seconds"], "x")


def infer(
    model: Any, device: str, kind: str, sizes: dict[str, int], block: int, inputs: Any, folder: Path
) -> tuple[Any, Any, float]:
    """Dispatch a model under a limit; return it, its outputs, and the median seconds of a forward.

    Also called with the original, so this uses the common interface alone.
    """
    from accelerate import dispatch_model, infer_auto_device_map, load_checkpoint_and_dispatch

    first: Any = "cpu" if device == "cpu" else 0
    limits = {first: (sizes["resident"] + 1) * block + block // 2}
    chosen = infer_auto_device_map(model, limits, no_split_module_classes=["Layers"])
    assert {"cpu", "disk"} & set(map(str, chosen.values())) - {first}, f"everything fits: {chosen}"
    # Both packages get the same map, whatever room each keeps on the device.
    resident = sizes["resident"]
    device_map = {f"blocks.{index}": first if index < resident else kind for index in range(sizes["blocks"])}
    if kind == "disk":
        weights = save_weights(model, folder)
        model = model.to("meta")
        model = load_checkpoint_and_dispatch(model, weights, device_map, offload_folder=folder / "offload")
    else:
        model = dispatch_model(model, device_map)
    seconds = []
    with torch.no_grad():
        for _ in range(2 + sizes["repetitions"]):
            start = time.perf_counter()
            outputs = model(inputs).to("cpu")
            seconds.append(time.perf_counter() - start)
    return model, outputs, median(seconds[2:])


def save_weights(model: Any, folder: Path) -> Path:
    from safetensors.torch import save_file

    target = folder / "weights"
    target.mkdir()
    save_file(model.state_dict(), target / "model.safetensors", {"format": "pt"})
    return target


def on_device(model: Any, device: str) -> int:
    """Return how many blocks have their weights on the device between forwards."""
    return sum(next(block.parameters()).device.type == device for block in model.blocks)


def compute_by_hand(setting: Setting, model: Stack, inputs: torch.Tensor) -> torch.Tensor:
    """Return the outputs, with one block after the other on the device."""
    with torch.no_grad():
        for block in model.blocks:
            assert isinstance(block, Layers)
            inputs = block.to(setting.device)(inputs)
            block.to("cpu")
    return inputs.to("cpu")


def run_original(
    setting: Setting, kind: str, sizes: dict[str, int], dtype: torch.dtype
) -> dict[str, Any] | None:
    """Return what the original measures, in a process without our source; None where it is not installed."""
    tests = Path(__file__).parents[1]
    folder = setting.folder / "original"
    folder.mkdir()
    request = {"device": setting.device, "kind": kind, "sizes": sizes, "dtype": str(dtype).split(".")[1]}
    interpreter = os.environ.get("GPU_ACCEPTANCE_ORIGINAL", sys.executable)
    command = [interpreter, "-m", "gpu_acceptance.original", json.dumps(request)]
    words = [*command, *setting.imports]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent)))}
    try:
        answer = subprocess.run(
            words,
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=ORIGINAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        setting.note(f"No figure of the original: it took more than {ORIGINAL_SECONDS} s.")
        return None
    lines = [*answer.stderr.splitlines(), *answer.stdout.splitlines()]
    if answer.returncode:
        setting.note(f"No figure of the original: {(lines or ['it wrote nothing'])[-1]}")
        return None
    return dict(json.loads(lines[-1]))
