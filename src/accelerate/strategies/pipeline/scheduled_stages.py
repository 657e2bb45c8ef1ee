"""Runs of micro-batches through the stages of a pipeline, by the schedules of `torch.distributed.pipelining`.

Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from accelerate import torch_private
from accelerate.base import ConfigurationError, PreparationError, StateError, listed, wrong_value
from accelerate.nested import TensorInformation
from accelerate.ops import gather_in_group
from accelerate.plugins import SCHEDULES, PipelineConfig
from accelerate.strategies.pipeline.microbatches import MicroBatch, zero_loss
from accelerate.strategies.pipeline.nested_tensors import signature_of
from accelerate.strategies.pipeline.split import split_model
from accelerate.strategies.pipeline.stages import PipelineModel, StageModule
from accelerate.strategies.pipeline.tracing import Trace


def stage_ranks(config: PipelineConfig, num_ranks: int) -> list[int]:
    """Returns the rank of each stage, in the order of the stages."""
    ranks = list(range(num_ranks))
    if SCHEDULES[config.schedule].is_v:
        return [*ranks, *reversed(ranks)]
    return ranks * (config.stages_per_rank or 1)


class ScheduledStages:
    """Stages of a model on this rank, which a schedule runs.

    Args:
        model: A model that is not wrapped yet, with all its parameters. Those of other ranks are removed.
        config: Schedule, number of micro-batches and split.
        call: Called in place of the forward of the model, with it and its arguments.

    Attributes:
        stages: Module of each stage on this rank, by the index of the stage.
        model: The model in its stages.
    """

    def __init__(
        self,
        model: nn.Module,
        config: PipelineConfig,
        group: dist.ProcessGroup,
        device: torch.device,
        call: Callable[..., Any],
    ) -> None:
        self._config, self.group, self.device = config, group, device
        self._rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = stage_ranks(config, num_ranks)
        split = split_model(model, len(self._ranks), config.split)
        own = [stage for stage, rank in enumerate(self._ranks) if rank == self._rank]
        self.model = PipelineModel(model, split, own, device, call)
        self.stages = {stage: StageModule(self.model, stage) for stage in own}
        for stage, module in self.stages.items():
            module.compute = partial(self._compute, stage)
        self._schedules: dict[bool, tuple[Any, Any]] = {}  # by whether it has a backward pass
        self._traces: dict[Any, tuple[Trace, Any]] = {}  # with the settings of containers
        self._reduces_gradients = True
        self._error: Exception | None = None  # of a stage of this rank
        self._shares_error = False
        # Of the batch that is computed now
        self._microbatches: list[MicroBatch] = []
        self._current_traces: list[Trace] = []
        self._finish: Callable[[Any, int], Tensor] | None = None

    def run(
        self,
        microbatches: list[MicroBatch],
        finish: Callable[[Any, int], Tensor],
        *,
        has_backward: bool,
        shares_error: bool,
    ) -> None:
        """Computes micro-batches by the schedule.

        Called on all ranks of the pipeline.

        Args:
            microbatches: The micro-batches.
            finish: Returns the loss of the outputs and the index of a micro-batch, on the last stage.
            has_backward: Whether gradients are computed.
            shares_error: Whether an error of a stage is raised on all ranks.
        """
        self._shares_error = shares_error
        microbatches = [part._replace(kwargs=self.without_cache(part.kwargs)) for part in microbatches]
        with self.model.running():
            self._current_traces = self._traces_of(microbatches)
            self._microbatches, self._finish = microbatches, finish
            schedule = self._schedule(has_backward)
            # The index of a micro-batch selects its inputs, which may be any objects.
            indices, targets = torch.arange(len(microbatches)), torch.zeros(len(microbatches))
            run = schedule.step if has_backward else schedule.eval
            try:
                with torch_private.log_silenced(schedules.__name__):  # it has the whole schedule for an error
                    run(microbatch=indices, target=targets, return_outputs=False)
            except RuntimeError as error:
                if error.__cause__ is not None and "failed to run forward" in str(error):
                    raise error.__cause__ from None
                if SCHEDULES[self._config.schedule].splits_backward:
                    self._explain_split_backward(error)
                raise
            finally:
                self._microbatches, self._current_traces, self._finish = [], [], None
        if shares_error:
            self._raise_shared()

    def _explain_split_backward(self, error: RuntimeError) -> None:
        """Raises an error with the reason if layers do not support separate backward passes for weights."""
        schedule, reason = self._config.schedule, ""
        if "extra time" in str(error):
            reason = (
                f"The schedule {schedule} runs two backward passes over a layer, and torch allows one if "
                "activation checkpointing stores outputs of operators in it, as it does for the routing of "
                "experts. Leave the layer out of activation checkpointing, or use"
            )
        elif "second time" in str(error):
            reason = (
                f"The schedule {schedule} computes the gradients of inputs and of weights in separate "
                f"passes, and layers of {type(self.model.model).__name__} share tensors that need both at "
                "once. Use"
            )
        if reason:
            raise PreparationError(f"{reason} the schedule 1f1b or interleaved1f1b.") from error

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Raises an error inside the block on all ranks of the pipeline.

        Called on all ranks of the pipeline.
        """
        try:
            yield
        except Exception as error:
            self._error = error
        self._raise_shared()

    def _raise_shared(self) -> None:
        """Raises the error of a stage on all ranks of the pipeline."""
        error, self._error = self._error, None
        is_own = isinstance(error, (ConfigurationError, PreparationError, StateError))
        text = str(error) if is_own else error and f"{type(error).__name__}: {error}"
        texts = gather_in_group(text, self.group)
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text:
                stages = [str(stage) for stage, owner in enumerate(self._ranks) if owner == rank]
                raise PreparationError(
                    f"Rank {dist.get_global_rank(self.group, rank)}, with stage {listed(stages)} of the "
                    f"pipeline, raises: {text}"
                )

    def without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns keyword arguments that disable key-value caches, which are not sent between stages."""
        if kwargs.get("use_cache"):
            raise wrong_value(
                "use_cache",
                True,
                "each stage of a pipeline has only the keys and values of its own layers",
                "Pass use_cache=False, also to generate",
            )
        config = getattr(self.model.model, "config", None)
        return {"use_cache": False, **kwargs} if getattr(config, "use_cache", False) else kwargs

    def trace(self, microbatches: Sequence[MicroBatch]) -> list[Trace]:
        """Returns the traces of micro-batches."""
        with self.model.running():
            return self._traces_of(microbatches)

    def _traces_of(self, microbatches: Sequence[MicroBatch]) -> list[Trace]:
        """Returns the traces of micro-batches, which those with the same shapes have in common.

        The code of a model that reads values of its batch, or whose settings have changed, is traced again.
        """
        kind = self.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        mode = (self.model.model.training, autocast)
        settings = settings_of(self.model.containers)
        keys = [signature_of((part.args, part.kwargs, *mode)) for part in microbatches]

        def is_known(key: object) -> bool:
            trace, traced_settings = self._traces.get(key, (None, None))
            return trace is not None and not trace.reads_values and traced_settings == settings

        if all(map(is_known, keys)):
            return [self._traces[key][0] for key in keys]
        traces = []
        with self.sharing_errors():
            for part, key in zip(microbatches, keys, strict=True):
                if not is_known(key):
                    self._traces[key] = self.model.trace(part.args, part.kwargs, mode), settings
                traces.append(self._traces[key][0])
        return traces

    def _schedule(self, has_backward: bool) -> Any:
        """Returns the schedule of the current micro-batches, which the next batch of these shapes reuses."""
        boundaries = [[boundary.specs for boundary in trace.boundaries] for trace in self._current_traces]
        known = self._schedules.get(has_backward)
        if known is not None and known[0] == boundaries:
            return known[1]
        num_stages, count = len(self._ranks), len(self._current_traces)
        loss = (TensorInformation(torch.Size(()), torch.float32),)
        stages = [
            torch_private.UnevenPipelineStage(
                module,
                index,
                num_stages,
                self.device,
                self.group,
                [specs[index - 1] if index else () for specs in boundaries],
                [specs[index] if index < num_stages - 1 else loss for specs in boundaries],
                lambda: self._reduces_gradients,
            )
            for index, module in self.stages.items()
        ]
        schedule = self._build_schedule(stages, count)
        self._schedules[has_backward] = boundaries, schedule
        return schedule

    def _build_schedule(self, stages: list[Any], count: int) -> Any:
        """Returns the schedule for a number of micro-batches, or a simpler one for too few of them."""
        known = SCHEDULES[self._config.schedule]
        names = (self._config.schedule, known.for_few)
        for name in names:
            kind = schedules.get_schedule_class(name)
            is_single = issubclass(kind, schedules.PipelineScheduleSingle)
            try:
                return kind(
                    stages[0] if is_single else stages,
                    count,
                    loss_fn=lambda output, target: output,  # of the last stage, which is the loss
                    scale_grads=False,
                )
            except ValueError as error:
                reason = error
        raise ConfigurationError(
            f"schedule={self._config.schedule!r} does not take {count} micro-batches on "
            f"{dist.get_world_size(self.group)} ranks ({reason}). Change microbatches, or set "
            "drop_last=True in the loader."
        ) from reason

    def _compute(self, stage: int, received: Sequence[Tensor], index: int) -> Any:
        part, trace, outputs = self._microbatches[index], self._current_traces[index], None
        try:
            outputs = self.model.compute(stage, trace, received, part.args, part.kwargs)
            if stage < len(self._ranks) - 1:
                return outputs
            assert self._finish is not None
            with self.model.outside() if self._shares_error else nullcontext():
                return self._finish(outputs, index)
        except Exception as error:
            if not self._shares_error:
                raise
            self._error = self._error or error
            # The next stage gets what it waits for, and FSDP has gradients of the same weights on all ranks.
            nothing = zero_loss((received, outputs)).to(self.device)
            if stage == len(self._ranks) - 1:
                return nothing
            return tuple(_zeros_from(spec, nothing, self.device) for spec in trace.boundaries[stage].specs)


def settings_of(containers: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Returns the attributes of modules that are plain values, but for the mode."""
    return [
        {
            key: value
            for key, value in vars(container).items()
            if key != "training" and (value is None or isinstance(value, (bool, str, int, float)))
        }
        for container in containers
    ]


def _zeros_from(spec: TensorInformation, nothing: Tensor, device: torch.device) -> Tensor:
    """Returns zeros that have a gradient if a tensor of that kind may have one."""
    zeros = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    if not spec.dtype.is_floating_point or not torch.is_grad_enabled():
        return zeros
    return zeros + nothing if nothing.requires_grad else zeros.requires_grad_()
