"""Forward and backward passes of a pipeline, by the schedules of `torch.distributed.pipelining`.

Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from accelerate import torch_private
from accelerate.base import ConfigurationError, PreparationError, StateError, listed, wrong_value
from accelerate.plugins import SCHEDULES, PipelineConfig
from accelerate.strategies.batches import LossFunction, loss_of
from accelerate.strategies.dtensors import Replicas, named_parameters
from accelerate.strategies.pipeline.microbatches import (
    Computed,
    MicroBatch,
    check_loss,
    differ_in_labels,
    merge_outputs,
    pair_to_compare,
    shares_of_labels,
    split_batch,
    split_into_microbatches,
    weight_of_labels,
    zero_loss,
)
from accelerate.strategies.pipeline.nested_tensors import (
    TensorSpec,
    flatten,
    signature_of,
    specs_of,
    to_zeros,
)
from accelerate.strategies.pipeline.split import split_model
from accelerate.strategies.pipeline.stages import PipelineModel, StageModule
from accelerate.strategies.pipeline.tracing import Trace


def stage_ranks(config: PipelineConfig, num_ranks: int) -> list[int]:
    """Returns the rank of each stage, in the order of the stages."""
    ranks = list(range(num_ranks))
    if SCHEDULES[config.schedule].is_v:
        return [*ranks, *reversed(ranks)]
    return ranks * (config.stages_per_rank or 1)


class Verification(Protocol):
    """Comparison of a pipeline with the model that was not split."""

    def check_training(
        self, pipeline: Pipeline, batch: object, loss_fn: LossFunction | None, *, is_sum: bool
    ) -> bool:
        """Raises an error if the pipeline computes another loss or other gradients for a batch.

        Returns:
            Whether they were compared.
        """

    def check_loss(self, pipeline: Pipeline, batch: object, *, is_sum: bool) -> None:
        """Raises an error if the loss that a model computes for a batch is not that of its micro-batches."""

    def check_evaluation(self, pipeline: Pipeline, parts: Sequence[MicroBatch], whole: MicroBatch) -> None:
        """Raises an error if the pipeline computes other outputs for a batch."""


class Pipeline:
    """Pipeline of one model.

    Args:
        model: A model that is not wrapped yet, with all its parameters. Those of other ranks are removed.
        config: Schedule, number of micro-batches and split.
        group: Process group of the ranks of the pipeline.
        device: Device of this rank.

    Attributes:
        group: Process group of the ranks of the pipeline.
        device: Device of this rank.
        stages: Module of each stage on this rank, by the index of the stage.
        model: The model in its stages.
        verification: Comparison with the model that was not split, before the first batches.
        holders: Ranks of the pipeline that have each parameter and buffer, by its name.
        shared: Names of parameters of this rank that other ranks have too, with the process group of these
            ranks.
        parameter_names: Names of the parameters of the whole model, tied ones by each of their names.
    """

    def __init__(
        self, model: nn.Module, config: PipelineConfig, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._config, self.group, self.device = config, group, device
        self._rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = stage_ranks(config, num_ranks)
        self.parameter_names = set(named_parameters(model))
        split = split_model(model, len(self._ranks), config.split)
        own = [stage for stage, rank in enumerate(self._ranks) if rank == self._rank]
        self.model = PipelineModel(model, split, own, device, self._call)
        self.stages = {stage: StageModule(self.model, stage) for stage in own}
        for stage, module in self.stages.items():
            module.compute = partial(self._compute, stage)
        self.holders = {
            name: {self._ranks[stage] for stage in stages} for name, stages in self.model.holders.items()
        }
        self.verification: Verification | None = None
        self.shared: list[tuple[list[str], Any]] = []
        self._summed: dict[nn.Parameter, Tensor | None] | None = None
        self._schedules: dict[bool, tuple[Any, Any]] = {}  # by whether it has a backward pass
        self._traces: dict[Any, tuple[Trace, Any]] = {}  # with the settings of containers
        self._num_trained = 0  # batches
        self._is_verified, self._has_evaluated = False, False
        self._program: Any = None  # of the user, at the end of the last batch
        self._skipped_labels: int | None = None
        self._reduces_gradients = True
        self._error: Exception | None = None  # of a stage of this rank
        self._shares_error = False
        # Of the batch that is computed now
        self._microbatches: list[MicroBatch] = []
        self._current_traces: list[Trace] = []
        self._finish: Callable[[Any, int], Tensor] | None = None

    def train(
        self,
        batch: object,
        loss_fn: LossFunction | None,
        scale: Callable[[Tensor], Tensor],
        *,
        is_sum: bool,
        reduces_gradients: bool,
    ) -> Tensor:
        """Computes the gradients of this rank's stages for a batch, and returns its loss.

        Called on all ranks of the pipeline with the same batch. Only FSDP exchanges gradients with ranks that
        have other batches.

        Args:
            batch: The batch, as for `arguments_of`.
            loss_fn: Returns the loss of the outputs and the target, or None if the model computes it.
            scale: Returns the loss of a micro-batch times its scale in the backward pass.
            is_sum: Whether losses are sums over items.
            reduces_gradients: Whether FSDP reduces the gradients.

        Returns:
            The loss of the batch without its scale, as a 0-d float32 tensor on all ranks of the pipeline.
        """
        self._num_trained += 1
        # The loss may cease to be a mean later, for example with the first ignored label.
        is_checked = self._num_trained & (self._num_trained - 1) == 0
        self._compare_changes()
        if self._num_trained.bit_length() % 2 and is_checked:  # a power of four
            self._is_verified = self._has_evaluated = False
        if self.verification is not None and (is_checked or not self._is_verified):
            # FSDP may have gradients of the last batch that it has not reduced, and would add those of a
            # comparison to them.
            if not self._is_verified and self._reduces_gradients:
                self._is_verified = self.verification.check_training(self, batch, loss_fn, is_sum=is_sum)
            elif is_checked and loss_fn is None:
                self.verification.check_loss(self, batch, is_sum=is_sum)
        microbatches = split_into_microbatches(
            self.model.model, batch, self.count, has_loss=loss_fn is not None, is_sum=is_sum
        )
        # A mean over labels that are not ignored weights micro-batches by their number.
        is_checked = is_checked or (loss_fn is not None and not is_sum and differ_in_labels(microbatches))
        losses: list[Tensor] = []
        finish = self.finisher(microbatches, loss_fn, scale, losses, is_sum=is_sum, is_checked=is_checked)
        self._set_summed_aside()
        self._reduces_gradients = reduces_gradients
        with torch.enable_grad():
            self.run(microbatches, finish, has_backward=True, shares_error=is_checked)
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)
        dist.broadcast(total, self._last_rank, group=self.group)
        self._program = self._program_of_user()
        return total

    def _compare_changes(self) -> None:
        """Lets the next batches be compared if the user has changed the model since the last batch.

        A model may begin later to hand over values outside of the outputs of layers. By its own count of
        batches it may, too, so that some later batches are compared without a change.
        """
        if self._program is not None and self._program != self._program_of_user():
            self._is_verified = self._has_evaluated = False

    def _program_of_user(self) -> Any:
        """Returns the settings of containers, which all ranks have, and the numbers of hooks of all modules.

        Of numbers only those that are 0 count, because schedules may change others in each step.
        """
        if self.verification is None:
            return None
        settings = [
            {key: value if value is None or isinstance(value, (bool, str)) else not value}
            for container in _settings_of(self.model.containers)
            for key, value in container.items()
        ]
        return settings, [torch_private.num_forward_hooks(module) for module in self.model.model.modules()]

    def finisher(
        self,
        microbatches: Sequence[MicroBatch],
        loss_fn: LossFunction | None,
        scale: Callable[[Tensor], Tensor],
        losses: list[Tensor],
        *,
        is_sum: bool,
        is_checked: bool = False,
    ) -> Callable[[Any, int], Tensor]:
        """Returns a function of the outputs and the index of a micro-batch that returns its scaled loss.

        Args:
            microbatches: The micro-batches.
            loss_fn: As for `train`.
            scale: As for `train`.
            losses: List to which the function appends the part of the micro-batch in the loss of the batch.
            is_sum: Whether losses are sums over items.
            is_checked: Whether to check that the loss of two micro-batches is that of their samples.
        """
        first: list[Computed] = []
        weight_of = self._weight_function(microbatches)
        compared = pair_to_compare(microbatches) if loss_fn is not None and is_checked else ()

        def finish(outputs: object, index: int) -> Tensor:
            part = microbatches[index]
            loss = loss_of(outputs, part.target, loss_fn)
            if not loss.requires_grad and torch.is_grad_enabled():
                fix = "Compute it from outputs that are not detached, of layers that are trained"
                raise wrong_value("loss", "a tensor without gradient", "no layer would be trained", fix)
            weight = part.weight
            if loss_fn is None and not is_sum:
                weight = weight_of(index, outputs)
            if not weight:
                return scale(zero_loss(outputs))
            losses.append(weight * loss.detach().float())
            if loss_fn is not None and index in compared:
                first.append(Computed(part, _detached(outputs), loss.detach()))
                if len(first) == 2:
                    check_loss(first, loss_fn, is_sum)
            return scale(loss * weight)

        return finish

    @cached_property
    def order(self) -> dict[str, int]:
        """Position of each name in the state dict of the whole model."""
        return {name: position for position, name in enumerate(self.model.specs)}

    def aliases(self, name: str) -> list[str]:
        """Returns all names of a weight in the whole model, of which tied ones have several."""
        return self.model.aliases.get(name, [name])

    def holders_of(self, name: str) -> set[int]:
        """Returns the ranks of the pipeline that have a weight."""
        return self.holders.get(name, {0})

    def count(self, num_samples: int) -> int:
        """Returns the number of micro-batches of a batch, the largest one that the schedule takes."""
        largest = min(self._config.microbatches, num_samples)
        if not SCHEDULES[self._config.schedule].has_rounds:
            return largest
        num_ranks = dist.get_world_size(self.group)
        fits = (n for n in range(largest, 0, -1) if n % max(1, n // num_ranks) == 0)
        return next(fits)

    def sum_shared_gradients(self) -> None:
        """Adds up the gradients of parameters that several stages use, such as tied ones.

        Called on all ranks of the pipeline.
        """
        for parameters, group in self._shared_parameters():
            Replicas(parameters, set(), group, True, averages=False).average()
            for parameter in parameters:
                summed = (self._summed or {}).get(parameter)
                if summed is not None:
                    parameter.grad = summed if parameter.grad is None else parameter.grad + summed
        self._summed = None

    def _set_summed_aside(self) -> None:
        """Takes gradients that are added up already from their parameters, until the next ones are."""
        if self._summed is None:
            shared = [parameter for parameters, _ in self._shared_parameters() for parameter in parameters]
            self._summed = {parameter: parameter.grad for parameter in shared}
            for parameter in shared:
                parameter.grad = None

    def _shared_parameters(self) -> Iterator[tuple[list[nn.Parameter], Any]]:
        """Yields trained parameters that several ranks have, with the process group of these ranks."""
        for names, group in self.shared:
            found = [self.model.model.get_parameter(name) for name in names]
            trained = {id(parameter): parameter for parameter in found if parameter.requires_grad}
            if trained:
                yield list(trained.values()), group

    def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs of the model on all ranks of the pipeline, without gradients."""
        model = self.model.model
        if self.model.is_running:
            return call(*args, **kwargs)
        if model.training and torch.is_grad_enabled():
            raise StateError(
                f"{type(model).__name__} is in a pipeline of {len(self._ranks)} stages, so its forward and "
                "backward passes overlap. Call accelerator.forward_backward(model, batch, loss_fn) in place "
                "of the model and `backward`. For evaluation call model.eval() before."
            )
        with torch.no_grad():
            return self._evaluate(args, kwargs)

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts, sizes = split_batch((args, kwargs), self.count)
        microbatches = [
            MicroBatch(part[0], part[1], None, size, size) for part, size in zip(parts, sizes, strict=True)
        ]
        self._compare_changes()
        if self.verification is not None and not self._has_evaluated:
            size = sum(sizes)
            self.verification.check_evaluation(self, microbatches, MicroBatch(args, kwargs, None, size, size))
        self._has_evaluated = True
        found: dict[int, Any] = {}
        merged: list[Any] = []
        weight_of = self._weight_function(microbatches)

        def finish(outputs: object, index: int) -> Tensor:
            found[index] = outputs
            if len(found) == len(parts):
                weights = [weight_of(i, found[i]) for i in range(len(parts))]
                merged.append(merge_outputs([found[i] for i in range(len(parts))], sizes, weights))
            return torch.zeros((), device=self.device)

        self.run(microbatches, finish, has_backward=False, shares_error=True)
        self._program = self._program_of_user()
        return self._sent_from_last(merged[0] if merged else None)

    def _weight_function(self, microbatches: Sequence[MicroBatch]) -> Callable[[int, Any], float]:
        """Returns a function of the index and the outputs of a micro-batch that returns its weight."""
        shares = cache(partial(shares_of_labels, microbatches))

        def weight_of(index: int, outputs: object) -> float:
            weight, self._skipped_labels = weight_of_labels(
                microbatches, index, shares, outputs, self._skipped_labels
            )
            return weight

        return weight_of

    def _sent_from_last(self, outputs: object) -> Any:
        """Returns the outputs of the last stage on all ranks of the pipeline."""
        pytree = torch_private.pytree
        specs = [specs_of(outputs)]
        dist.broadcast_object_list(specs, self._last_rank, group=self.group, device=self.device)
        is_last = dist.get_rank() == self._last_rank
        values = outputs if is_last else to_zeros(specs[0], self.device)
        leaves, tree = flatten(values)
        leaves = [leaf.contiguous() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                dist.broadcast(leaf, self._last_rank, group=self.group)
        return pytree.tree_unflatten(leaves, tree)

    @property
    def _last_rank(self) -> int:
        return dist.get_global_rank(self.group, self._ranks[-1])

    # Schedules

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
                if SCHEDULES[self._config.schedule].splits_backward and "second time" in str(error):
                    raise PreparationError(
                        f"The schedule {self._config.schedule} computes the gradients of inputs and of "
                        f"weights in separate passes, and layers of {type(self.model.model).__name__} share "
                        "tensors that need both at once. Use the schedule 1f1b or interleaved1f1b."
                    ) from error
                raise
            finally:
                self._microbatches, self._current_traces, self._finish = [], [], None
        if shares_error:
            self._raise_shared()

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
        texts: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(texts, text, group=self.group)
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
        settings = _settings_of(self.model.containers)
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
        loss = (TensorSpec(torch.Size(()), torch.float32),)
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
                return kind(stages[0] if is_single else stages, count, loss_fn=_output, scale_grads=False)
            except ValueError as error:
                reason = error
        raise ConfigurationError(
            f"schedule={self._config.schedule!r} does not take {count} micro-batches on "
            f"{dist.get_world_size(self.group)} ranks ({reason}). Change microbatches, or set "
            "drop_last=True in the loader."
        ) from reason

    def _compute(self, stage: int, received: Sequence[Tensor], index: int) -> Any:
        part, trace = self._microbatches[index], self._current_traces[index]
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
            # The next stage gets what it waits for.
            nothing = zero_loss(received).to(self.device)
            if stage == len(self._ranks) - 1:
                return nothing
            return tuple(_zeros_from(spec, nothing, self.device) for spec in trace.boundaries[stage].specs)


def _settings_of(containers: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Returns the attributes of modules that are plain values, but for the mode."""
    return [
        {
            key: value
            for key, value in vars(container).items()
            if key != "training" and (value is None or isinstance(value, (bool, str, int, float)))
        }
        for container in containers
    ]


def _zeros_from(spec: TensorSpec, nothing: Tensor, device: torch.device) -> Tensor:
    """Returns zeros that have a gradient if a tensor of that kind may have one."""
    zeros = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    if not spec.dtype.is_floating_point or not torch.is_grad_enabled():
        return zeros
    return zeros + nothing if nothing.requires_grad else zeros.requires_grad_()


def _output(output: Tensor, target: Tensor) -> Tensor:
    """Returns the output of the last stage, which is the loss."""
    return output


def _detached(values: object) -> Any:
    leaves, tree = flatten(values)
    detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return torch_private.pytree.tree_unflatten(detached, tree)
