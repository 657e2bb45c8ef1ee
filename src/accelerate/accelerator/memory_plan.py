"""Facet of `Accelerator`: the memory of a training step, planned before any step runs."""

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


class MemoryPlanning:
    """Predicts what each device needs, by tracing a step with fake tensors."""

    _runtime: Runtime
    gradient_accumulation_steps: int

    def plan_memory(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        batch: Any,
        loss: planning.Loss | None = None,
        *,
        max_norm: float | None = 1.0,
    ) -> planning.MemoryPlan:
        """Return what each device needs at the peak of a training step, without running one.

        One step is traced with fake tensors, in the number format of the run and with its gradient
        accumulation: nothing is communicated, and no memory of an accelerator is used. On the CPU
        convolutions and recurrent layers run once with zeros, which measures their buffers. The model, the
        optimizer and the batch stay as they are. What a strategy shards is computed from that trace. Works on
        each rank alone.

        Args:
            model: not prepared yet, or prepared by a strategy that keeps it whole; it may be on the meta
                device.
            optimizer: of the model; several as a list.
            batch: one batch of this process, on any device. A mapping is passed to the model as keyword
                arguments, a tuple or list as positional ones.
            loss: from the model and the batch to the loss; the default takes the loss from the output.
            max_norm: whether gradients are clipped before the step; `None` does not clip them.

        Returns:
            A plan with `peak` and `parts` in bytes, `largest_batch_size("80GB")` and
            `fitting_layouts("8x80GB")`; `print(plan)` shows a table.

        Raises:
            ConfigurationError: the model needs values of large tensors, has no loss or lazy modules, or the
                optimizer, the number format or the strategy has no plan.
            PreparationError: the model or an optimizer cannot be copied.
            StateError: the model is sharded already.
        """
        runtime, device = self._runtime, self._runtime.state.device
        if strategies.is_prepared(model) and not runtime.strategy.holds_whole_models:
            raise StateError(
                "plan_memory needs the whole model, and this one is sharded: call it before `prepare`."
            )
        name = str(runtime.state.mixed_precision)
        if name not in ("no", "fp16", "bf16"):
            reason = "layers of FP8 libraries cannot be traced"
            fix = "Plan with mixed_precision='bf16', which needs about as much memory"
            raise wrong_value("mixed_precision", name, reason, fix)
        given: Any = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        optimizers = [getattr(each, "optimizer", each) for each in given]
        step = planning.Step(
            extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=False),
            optimizers,
            batch,
            loss or planning.loss_of,
            device,
            max_norm=max_norm,
            keeps_output=loss is None,
        )
        autocast = None if name == "no" else MixedPrecision(name, device.type, runtime.request.autocast)
        trace = planning.tracer_of(step, runtime.strategy.precision, autocast, strategies.recompute)
        layout = replace(runtime.strategy.memory_layout(), accumulation=self.gradient_accumulation_steps)
        return planning.build_plan(planning.Planner(trace), layout, planning.batch_size_of(batch))
