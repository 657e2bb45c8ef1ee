"""Batches of a pipeline, with their micro-batches, losses and outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import StateError, wrong_value
from accelerate.ops import is_on_any_rank
from accelerate.plugins import SCHEDULES, PipelineConfig
from accelerate.strategies.batches import LossFunction, loss_of
from accelerate.strategies.dtensors import Replicas, named_parameters, whole_tensor
from accelerate.strategies.pipeline.counted_values import CountedValues
from accelerate.strategies.pipeline.microbatches import (
    Computed,
    MicroBatch,
    WholeSizes,
    check_loss,
    merge_outputs,
    shares_of_labels,
    split_batch,
    split_into_microbatches,
    weight_of_labels,
    zero_loss,
)
from accelerate.strategies.pipeline.nested_tensors import (
    flatten,
    specs_of,
    tensors_in,
    to_zeros,
)
from accelerate.strategies.pipeline.scheduled_stages import ScheduledStages, settings_of
from accelerate.strategies.tolerances import must_compare

if TYPE_CHECKING:
    from accelerate.strategies.pipeline.verification import Verification


class Pipeline(ScheduledStages):
    """Pipeline of one model.

    Args:
        model: A model that is not wrapped yet, with all its parameters. Those of other ranks are removed.
        config: Schedule, number of micro-batches and split.

    Attributes:
        verification: Comparison with the model that was not split, before the first batches.
        holders: Ranks of the pipeline that have each parameter and buffer, by its name.
        shared: Names of parameters of this rank that other ranks have too, with the process group of these
            ranks.
        parameter_names: Names of the parameters of the whole model, tied ones by each of their names.
        without_gradients: Names of the parameters that the loss did not use in the last verified batch.
        whole_sizes: Sizes of tensors in earlier batches, see `split_batch`.
    """

    def __init__(
        self, model: nn.Module, config: PipelineConfig, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.parameter_names = set(named_parameters(model))
        super().__init__(model, config, group, device, self._call)
        self.holders = {
            name: {self._ranks[stage] for stage in stages} for name, stages in self.model.holders.items()
        }
        self.verification: Verification | None = None
        self.shared: list[tuple[list[str], Any]] = []
        self._summed: dict[nn.Parameter, Tensor | None] | None = None
        self._num_trained = 0  # batches
        self._is_verified, self._has_evaluated = False, False
        self._program: Any = None  # of the user, at the end of the last batch
        self._skipped_labels: int | None = None
        self.without_gradients: Collection[str] = ()
        self.counted_values = CountedValues()
        self.whole_sizes: WholeSizes = {}

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
        if any(tensor.requires_grad for tensor in tensors_in(batch)):
            fix = "Compute it in the forward of the model, or pass detached tensors"
            reason = "no gradient reaches them from the stages of other ranks"
            raise wrong_value("batch", "tensors that need gradients", reason, fix)
        self._num_trained += 1
        is_checked = must_compare(self._num_trained)
        self._compare_changes()
        if self._num_trained.bit_length() % 2 and is_checked:  # a power of four
            self._is_verified = self._has_evaluated = False
        has_loss = loss_fn is not None
        microbatches = split_into_microbatches(
            self.model.model, batch, self.count, self.whole_sizes, has_loss=has_loss, is_sum=is_sum
        )
        # The loss may cease to be a mean later, for example with the first ignored label.
        compared, is_new = self.counted_values.differing(microbatches, has_loss)
        is_checked = is_checked or (has_loss and is_new and not is_sum)
        is_compared = False
        if self.verification is not None:
            is_compared = not has_loss and (is_checked or self._is_on_any_rank(is_new))
            # FSDP may have gradients of the last batch that it has not reduced, and would add those of a
            # comparison to them.
            if not self._is_verified and self._reduces_gradients:
                self._is_verified = self.verification.check_training(self, batch, loss_fn, is_sum=is_sum)
            elif is_compared:
                self.verification.check_loss(self, batch, is_sum=is_sum)
        losses: list[Tensor] = []
        compared = compared or {0, 1} if is_checked else set()
        finish = self.finisher(microbatches, loss_fn, scale, losses, is_sum=is_sum, compared=compared)
        self._reduces_gradients = reduces_gradients
        with torch.enable_grad(), self._summed_aside():
            self.run(microbatches, finish, has_backward=True, shares_error=is_checked)
        if is_checked or is_compared:
            self.counted_values.accept(has_loss)
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        if losses:
            total = torch.stack(losses).sum()
        dist.broadcast(total, self._last_rank, group=self.group)
        self._program = self._program_of_user()
        return total

    def _is_on_any_rank(self, value: bool) -> bool:
        """Returns whether a value is true on any rank, because other pipelines have other batches."""
        is_alone = dist.get_world_size() == dist.get_world_size(self.group)
        return value if is_alone else is_on_any_rank(value, self.device)

    def _compare_changes(self) -> None:
        """Lets the next batches be compared if the user has changed the model since the last batch.

        A model may begin later to pass values outside of the outputs of layers, also by its own count of
        batches. Therefore, some later batches are compared without a change.
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
            for container in settings_of(self.model.containers)
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
        compared: Collection[int] = (),
    ) -> Callable[[Any, int], Tensor]:
        """Returns a function of the outputs and the index of a micro-batch that returns its scaled loss.

        Args:
            loss_fn: As for `train`.
            scale: As for `train`.
            losses: List to which the function appends the part of the micro-batch in the loss of the batch.
            is_sum: Whether losses are sums over items.
            compared: Indices of micro-batches whose loss together must be that of their samples.
        """
        first: list[Computed] = []
        weight_of = self._weight_function(microbatches)

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
                if len(first) == len(compared):
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
        self.sum_new_gradients()
        for parameter, summed in (self._summed or {}).items():
            if summed is not None:
                parameter.grad = summed if parameter.grad is None else parameter.grad + summed
        self._summed = None

    @torch.no_grad()
    def drop_unused_gradients(self) -> None:
        """Removes gradients of zeros that parameters do not have on one rank, where optimizers skip them.

        The next stage sends zeros for a tensor that the loss does not use. Called on all ranks that shard
        the stages of this rank.
        """
        own = named_parameters(self.model.model) if self.without_gradients else {}
        unused = [own[name] for name in self.without_gradients if name in own]
        for parameter in unused:
            if parameter.grad is not None and not whole_tensor(parameter.grad.abs().sum()):
                parameter.grad = None

    def sum_new_gradients(self) -> None:
        """Adds up gradients like `sum_shared_gradients`, without those of earlier backward passes."""
        for parameters, group in self._shared_parameters():
            Replicas(parameters, set(), group, True, averages=False).average()

    @contextmanager
    def _summed_aside(self) -> Iterator[None]:
        """Takes gradients that are added up already from their parameters, until the next ones are.

        They are set again if the block fails, because the program may continue without this batch.
        """
        is_first = self._summed is None
        if is_first:
            shared = [parameter for parameters, _ in self._shared_parameters() for parameter in parameters]
            self._summed = {parameter: parameter.grad for parameter in shared}
            for parameter in shared:
                parameter.grad = None
        try:
            yield
        except BaseException:
            if is_first:
                for parameter, summed in (self._summed or {}).items():
                    parameter.grad = summed
                self._summed = None
            raise

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
        parts, sizes = split_batch((args, kwargs), self.count, self.whole_sizes)
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
                of_parts = [found[i] for i in range(len(parts))]
                merged.append(merge_outputs(of_parts, sizes, weights, self.whole_sizes))
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


def _detached(values: object) -> Any:
    leaves, tree = flatten(values)
    detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return torch_private.pytree.tree_unflatten(detached, tree)
