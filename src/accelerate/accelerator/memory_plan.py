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
from accelerate.base import StateError
from accelerate.devices import of_device
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
    optimizers: Any = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    loss_fn, kernels = loss or planning.loss_of, None
    if runtime.state.device_backend.is_host:
        kernels = planning.KernelMode()
        loss_fn = kernels.watched(loss_fn)
    step = planning.Step(
        extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=False),
        [getattr(each, "optimizer", each) for each in optimizers],
        batch,
        loss_fn,
        device,
        max_norm=max_norm,
        convert=strategies.keep_activations,
        keeps_output=loss is None,
    )
    strategy = runtime.strategy
    for layer in strategy.layers:
        layer.check_model(step.model)
    layout, policy = strategy.memory_layout(), runtime.request.activations
    if policy is not None and policy.budget is not None:
        choice = strategies.choose_for_step(strategy, step, policy)
        policy = strategies.chosen_policy(*choice, policy, type(step.model).__name__)
    checkpoints = layout.checkpointing or policy is not None
    offloads = policy is not None and policy.offload and not of_device(device).is_host
    layout = replace(
        layout,
        accumulation=runtime.gradient_state.num_steps,
        checkpointing=checkpoints,
        offload_activations=layout.offload_activations or offloads,
    )
    planner = planning.Planner(strategies.tracer_for(strategy, step, policy))
    summary = policy.summary if policy is not None else "every block" if checkpoints else "nothing"
    plan = planning.build_plan(planner, layout, planning.batch_size_of(batch), summary)
    return plan if kernels is None else replace(plan, workspace=kernels.measure())
