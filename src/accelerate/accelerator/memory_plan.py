"""Memory plan of a training step, from a trace of one step with fake tensors.

`Accelerator.plan_memory` delegates to `plan_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from accelerate import planning, strategies
from accelerate.accelerator.runtime import Runtime
from accelerate.base import StateError, wrong_value
from accelerate.precision import MixedPrecision
from accelerate.wrappers import extract_model_from_parallel


def plan_memory(
    runtime: Runtime,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    batch: Any,
    loss: planning.Loss | None,
    max_norm: float | None,
) -> planning.MemoryPlan:
    """Returns the memory that each device needs in a training step, see `Accelerator.plan_memory`."""
    device = runtime.state.device
    if strategies.is_prepared(model) and not runtime.strategy.holds_whole_models:
        raise StateError(
            "plan_memory needs the whole model, and this one is sharded: call it before `prepare`."
        )
    name = str(runtime.state.mixed_precision)
    if name not in ("no", "fp16", "bf16"):
        reason = "layers of FP8 libraries cannot be traced"
        fix = "Plan with mixed_precision='bf16', which needs about as much memory"
        raise wrong_value("mixed_precision", name, reason, fix)
    optimizers: Any = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    step = planning.Step(
        extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=False),
        [getattr(each, "optimizer", each) for each in optimizers],
        batch,
        loss or planning.loss_of,
        device,
        max_norm=max_norm,
        keeps_output=loss is None,
    )
    autocast = None if name == "no" else MixedPrecision(name, device.type, runtime.request.autocast)
    trace = planning.tracer_of(step, runtime.strategy.precision, autocast, strategies.recompute)
    steps = runtime.gradient_state.num_steps
    layout = replace(runtime.strategy.memory_layout(), accumulation=steps)
    return planning.build_plan(planning.Planner(trace), layout, planning.batch_size_of(batch))
