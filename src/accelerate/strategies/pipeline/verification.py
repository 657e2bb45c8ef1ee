"""Comparison of a pipeline with the model that was not split, on the first batch.

The code of a model may pass values in ways that no trace follows, such as attributes of layers, and its
loss may be another one than the mean over samples. So the first batch is computed in two more ways:

1. The model on one rank computes the micro-batches and the whole batch, which must have the same loss.
2. The pipeline and the model on one rank compute the first micro-batches, which must have the same outputs of
   layers, losses and gradients.

Random functions return fixed values during the comparison. The state of the model is restored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate import rng, torch_private
from accelerate.base import ConfigurationError, PreparationError, StateError, listed
from accelerate.ops import gather_in_group
from accelerate.strategies.batches import LossFunction, loss_of
from accelerate.strategies.dtensors import named_parameters, whole_tensor
from accelerate.strategies.fixed_draws import FixedDraws
from accelerate.strategies.pipeline.microbatches import MicroBatch, not_additive, split_into_microbatches
from accelerate.strategies.pipeline.nested_tensors import flatten, tensors_in
from accelerate.strategies.pipeline.reference import (
    changed_names,
    copy_structure,
    fixed_statistics,
    restored_state,
    state_of,
    state_of_other,
    warn_of_state,
    whole_reference,
)
from accelerate.strategies.pipeline.runner import Pipeline
from accelerate.strategies.pipeline.side_effects import observe
from accelerate.strategies.tolerances import TOLERANCES, as_real, relative_difference, tolerance_of

SCALE = 2.0**7
"""Factor of the losses of the pipeline, so that gradients in float16 do not vanish."""
NUM_COMPARED = 2
"""Number of micro-batches that the pipeline computes for the comparison."""
HINT = "PipelineConfig(verify=False) trains without this comparison."
Finisher = Callable[..., Callable[[Any, int], Tensor]]
"""`Pipeline.finisher` with the loss function."""


class LayerCall(NamedTuple):
    """Call of a layer with parameters in the forward of a micro-batch."""

    position: int
    name: str
    stage: int


class Computation(NamedTuple):
    """Values of micro-batches, of which a rank of a pipeline has some.

    Attributes:
        layers: Name and output of each called layer, by the index of the micro-batch and the position.
        outputs: Tensors in the outputs of the model by the index of the micro-batch.
        losses: Parts of the micro-batches in the loss of the batch.
        gradients: Gradients by the name of the parameter.
        changes: What layers change besides their outputs, on one rank.
        without_gradients: Names of the trained parameters that the loss does not use, on one rank.
    """

    layers: dict[tuple[int, int], tuple[str, list[Tensor]]]
    outputs: dict[int, list[Tensor]]
    losses: list[Tensor]
    gradients: dict[str, Tensor]
    changes: Collection[str] = ()
    without_gradients: Collection[str] = ()


class Difference(NamedTuple):
    """Difference between the pipeline and the model on one rank.

    Attributes:
        order: Position in the computation.
        text: What the pipeline computes.
    """

    order: tuple[int, ...]
    text: str


class Verification:
    """Comparison of a pipeline with the model that was not split.

    Args:
        model: The model before it is changed.
        autocast: Returns the autocast context of the run.
    """

    def __init__(
        self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]], precision: str
    ) -> None:
        self._structure, self._autocast = copy_structure(model), autocast
        self._tolerance = tolerance_of(model, precision)

    def check_training(
        self, pipeline: Pipeline, batch: object, loss_fn: LossFunction | None, *, is_sum: bool
    ) -> bool:
        """Raises an error if a pipeline computes another loss or other gradients than the model on one rank.

        Called on all ranks of the run.

        Args:
            batch: Batch of this rank. All ranks compare that of rank 0, so that gradients that are averaged
                over ranks are those of one batch.
            loss_fn: As for `Pipeline.train`.
            is_sum: As for `Pipeline.train`.

        Returns:
            Whether they were compared. A loss on one rank that is not finite proves nothing.
        """
        _check_batches(pipeline, batch)
        batch = _batch_of_first_rank(pipeline, batch)
        parts, whole = _split(pipeline, batch, has_loss=loss_fn is not None, is_sum=is_sum)
        compared = parts[:NUM_COMPARED]
        calls = _calls_of_layers(pipeline, compared)
        finisher = partial(pipeline.finisher, loss_fn=loss_fn, is_sum=is_sum)
        with whole_reference(self._structure, pipeline) as reference, pipeline.sharing_errors():
            reading = loss_fn and partial(_loss_with_reference, loss_fn, pipeline.model.model, reference)
            on_one_rank = partial(pipeline.finisher, loss_fn=reading, is_sum=is_sum)
            with pipeline.counted_values.recording():
                if len(parts) > 1:
                    self._check_parts(reference, parts, whole, on_one_rank, reading, is_sum)
                with torch.enable_grad(), self._autocast(), FixedDraws():
                    expected = _compute(reference, pipeline, compared, on_one_rank)
            del reference, on_one_rank, reading
        if not all(loss.isfinite() for loss in expected.losses):
            return False
        with torch.enable_grad():
            found = _compute_in_pipeline(pipeline, calls, compared, expected.changes, finisher)
        _raise_first(pipeline, self._differences(pipeline, expected, found), None, expected.changes)
        pipeline.without_gradients = expected.without_gradients
        return True

    def check_loss(self, pipeline: Pipeline, batch: object, *, is_sum: bool) -> None:
        """Raises an error if the loss that a model computes for a batch is not that of its micro-batches.

        Called on all ranks of the pipeline.

        Args:
            is_sum: As for `Pipeline.train`.
        """
        parts, whole = _split(pipeline, batch, has_loss=False, is_sum=is_sum)
        if len(parts) > 1:
            finisher = partial(pipeline.finisher, loss_fn=None, is_sum=is_sum)
            with whole_reference(self._structure, pipeline) as reference, pipeline.sharing_errors():
                self._check_parts(reference, parts, whole, finisher, None, is_sum)

    def check_evaluation(self, pipeline: Pipeline, parts: Sequence[MicroBatch], whole: MicroBatch) -> None:
        """Raises an error if a pipeline computes other outputs than the model on one rank.

        Called on all ranks of the pipeline, without gradients.
        """
        parts, (whole,) = (_without_caches(pipeline, each) for each in (parts, [whole]))
        compared = parts[:NUM_COMPARED]
        calls = _calls_of_layers(pipeline, compared)
        with whole_reference(self._structure, pipeline) as reference, pipeline.sharing_errors():
            if len(parts) > 1:
                self._check_parts(reference, parts, whole)
            with self._autocast(), FixedDraws():
                expected = _compute(reference, pipeline, compared)
            del reference
        found = _compute_in_pipeline(pipeline, calls, compared, expected.changes)
        _raise_first(pipeline, self._differences(pipeline, expected, found), pipeline.group, expected.changes)

    def _check_parts(
        self,
        reference: nn.Module,
        parts: Sequence[MicroBatch],
        whole: MicroBatch,
        finisher: Finisher | None = None,
        loss_fn: LossFunction | None = None,
        is_sum: bool = False,
    ) -> None:
        """Raises an error if the loss or the outputs of a batch are not those of its parts."""
        used = [*reference.parameters(), *tensors_in((whole.args, whole.kwargs))]
        is_exact = all(each.element_size() >= 4 for each in used if each.is_floating_point())
        context = nullcontext() if is_exact else self._autocast()
        tolerance = TOLERANCES["no"] if is_exact else self._tolerance
        losses: list[Tensor] = []
        with torch.no_grad(), context, FixedDraws(), fixed_statistics(reference) as statistics:
            finish = finisher and finisher(parts, scale=lambda loss: loss, losses=losses)

            def compute(index: int) -> Any:
                part = _call(reference, parts[index])
                if finish is not None:
                    finish(part, index)
                return part

            with restored_state(reference):
                found = [compute(0)]
                first = state_of(reference)
                found += [compute(index) for index in range(1, len(parts))]
                last = state_of(reference)
            with restored_state(reference):
                outputs = _call(reference, whole)
                expected = state_of(reference)
                if finisher is not None:
                    together = loss_of(outputs, whole.target, loss_fn).float()
        warn_of_state(reference, parts, [*statistics, *changed_names(first, last, expected)])
        if losses and together.isfinite():
            apart = torch.stack(losses).sum().to(together.device)
            if not torch.allclose(together, apart, rtol=tolerance.relative / 10, atol=1e-5):
                raise not_additive(len(parts), together, apart, is_sum)
        sizes = [part.size for part in parts]
        for leaf, *leaves in zip(*(flatten(each)[0] for each in (outputs, *found)), strict=False):
            if not _is_per_sample(leaf, leaves, sizes):
                continue
            if difference := relative_difference(torch.cat(leaves), leaf, tolerance.relative):
                raise PreparationError(
                    f"{type(reference).__name__} computes other outputs for {sum(sizes)} samples together "
                    f"than for parts of {sizes} samples (relative difference {difference:.1e}), so the "
                    "samples of a batch depend on each other, and a pipeline computes micro-batches. Set "
                    "microbatches=1 in PipelineConfig, or compute what depends on several samples in "
                    f"loss_fn. {HINT}"
                )

    def _differences(
        self, pipeline: Pipeline, expected: Computation, found: Computation
    ) -> Iterator[Difference]:
        """Yields the differences of this rank, those of layers first."""
        relative = self._tolerance.relative
        for (index, position), (name, tensors) in found.layers.items():
            other, expected_tensors = expected.layers.get((index, position), ("no layer", []))
            if other != name:
                text = f"calls {name} where the model on one rank calls {other}"
                yield Difference((0, position, index), text)
                continue
            for difference in _all_differences(tensors, expected_tensors, relative):
                text = f"computes another output of {name} (relative difference {difference:.1e})"
                yield Difference((0, position, index), text)
        if found.losses:
            values, right = (torch.stack(each.losses).sum() for each in (found, expected))
            if relative_difference(values, right, relative):
                text = f"computes {values.item():.6g} as a loss that is {right.item():.6g} on one rank"
                yield Difference((1,), text)
        for index, outputs in found.outputs.items():
            for difference in _all_differences(outputs, expected.outputs[index], relative):
                yield Difference((1,), f"returns other outputs (relative difference {difference:.1e})")
        norms = [float(as_real(gradient).float().norm()) for gradient in expected.gradients.values()]
        zero = self._tolerance.absolute * max(norms, default=0.0)
        for number, (name, parameter) in enumerate(named_parameters(pipeline.model.model).items()):
            values, right = (each.gradients.get(name, torch.zeros(())) for each in (found, expected))
            if difference := relative_difference(values, right, relative, zero):
                text = f"computes another gradient of {name} (relative difference {difference:.1e})"
                if torch_private.has_gradient_hooks(parameter):
                    text += ", which has hooks that are called for each micro-batch"
                yield Difference((2, number), text)


def _all_differences(values: Iterable[Tensor], right: Iterable[Tensor], tolerance: float) -> Iterator[float]:
    """Yields the relative differences of tensors that are not equal."""
    for pair in zip(values, right, strict=False):
        if difference := relative_difference(*pair, tolerance):
            yield difference


def _is_per_sample(leaf: torch.Tensor, leaves: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Returns whether values of a batch and of its parts are tensors with one entry for each sample."""
    if not all(
        isinstance(each, Tensor) and each.ndim and each.is_floating_point() for each in (leaf, *leaves)
    ):
        return False
    shapes = [each.shape[1:] for each in leaves]
    return [len(leaf), *map(len, leaves)] == [sum(sizes), *sizes] and set(shapes) == {leaf.shape[1:]}


def _split(
    pipeline: Pipeline, batch: object, *, has_loss: bool, is_sum: bool
) -> tuple[list[MicroBatch], MicroBatch]:
    """Returns the micro-batches of a batch, and the batch as one."""
    split = partial(split_into_microbatches, pipeline.model.model, batch, has_loss=has_loss, is_sum=is_sum)
    sizes = pipeline.whole_sizes
    parts, (whole,) = (
        _without_caches(pipeline, split(count, sizes)) for count in (pipeline.count, lambda num_samples: 1)
    )
    return parts, whole


def _without_caches(pipeline: Pipeline, parts: Sequence[MicroBatch]) -> list[MicroBatch]:
    return [part._replace(kwargs=pipeline.without_cache(part.kwargs)) for part in parts]


def _check_batches(pipeline: Pipeline, batch: object) -> None:
    """Raises an error if the ranks of a pipeline have different batches."""
    digest = hashlib.sha256()
    for tensor in tensors_in(batch):
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.layout is torch.strided:
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if len(set(gather_in_group(digest.hexdigest(), pipeline.group))) > 1:
        raise PreparationError(
            "The ranks of a pipeline have different batches: the first stage uses the inputs of one rank, "
            "and the last one the labels of another. Read the batches from a loader of `prepare`, and draw "
            "random numbers with the same seed on these ranks."
        )


def _batch_of_first_rank(pipeline: Pipeline, batch: object) -> Any:
    if dist.get_world_size() == dist.get_world_size(pipeline.group):
        return batch
    tree_map = torch_private.pytree.tree_map_only
    sent = [tree_map(Tensor, lambda tensor: tensor.detach().cpu(), batch) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent, 0, device=pipeline.device)
    return tree_map(Tensor, lambda tensor: tensor.to(pipeline.device), sent[0])


def _calls_of_layers(pipeline: Pipeline, parts: Sequence[MicroBatch]) -> list[list[LayerCall]]:
    """Returns the calls of layers with parameters in the forward of each micro-batch."""
    traced = [
        [call for call in trace.calls if call.submodule.has_parameters] for trace in pipeline.trace(parts)
    ]
    return [
        [LayerCall(position, call.submodule.names[0], call.stage) for position, call in enumerate(calls)]
        for calls in traced
    ]


def _copies(values: object) -> list[Tensor]:
    """Returns copies of the tensors in nested values, whole ones of DTensors."""
    return [whole_tensor(tensor).clone() for tensor in tensors_in(values)]


def _call(model: nn.Module, part: MicroBatch) -> Any:
    """Returns the outputs of a model on its device."""
    device = next(model.parameters()).device
    args, kwargs = torch_private.pytree.tree_map_only(
        Tensor, lambda tensor: tensor.to(device), (part.args, part.kwargs)
    )
    return model(*args, **kwargs)


def _loss_with_reference(
    loss_fn: LossFunction, model: nn.Module, reference: nn.Module, outputs: object, target: object
) -> Tensor:
    """Returns a loss of the reference, whose weights and attributes the model has meanwhile."""
    with state_of_other(model, reference):
        return loss_fn(outputs, target)


def _compute(
    reference: nn.Module, pipeline: Pipeline, parts: Sequence[MicroBatch], finisher: Finisher | None = None
) -> Computation:
    """Returns what the model on one rank computes."""
    changes: dict[str, None] = {}
    unused: list[str] = []
    result = Computation({}, {}, [], {}, changes, unused)
    finish = finisher and finisher(parts, scale=lambda loss: loss, losses=result.losses, compared={0, 1})
    outputs_of_forward: list[tuple[str, list[Tensor]]] = []

    def record(name: str, module: nn.Module, args: tuple[Any, ...], outputs: object) -> None:
        outputs_of_forward.append((name, _copies(outputs)))

    for submodule in pipeline.model.split.submodules:
        name = submodule.names[0]
        observe(name, reference.get_submodule(name), changes)
        if submodule.has_parameters:
            reference.get_submodule(name).register_forward_hook(partial(record, name))
    for index, part in enumerate(parts):
        outputs_of_forward.clear()  # of a recomputation in the last backward pass
        outputs = _call(reference, part)
        result.layers.update({(index, i): layer for i, layer in enumerate(outputs_of_forward)})
        if finish is None:
            result.outputs[index] = _copies(outputs)
        else:
            torch.autograd.backward(finish(outputs, index))
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            result.gradients[name] = parameter.grad
        elif parameter.requires_grad:
            unused.append(name)
    return result


def _compute_in_pipeline(
    pipeline: Pipeline,
    calls: Sequence[Sequence[LayerCall]],
    parts: list[MicroBatch],
    changes: Collection[str],
    finisher: Finisher | None = None,
) -> Computation:
    """Returns what the stages of this rank compute.

    Called on all ranks of the pipeline, and of the meshes that shard its stages.
    """
    model, result = pipeline.model.model, Computation({}, {}, [], {})
    finish = finisher and finisher(parts, scale=lambda loss: loss * SCALE, losses=result.losses)
    waiting: list[tuple[int, LayerCall]] = []  # calls of the current forward

    def record(module: nn.Module, args: tuple[Any, ...], outputs: object) -> None:
        if waiting:
            index, call = waiting.pop(0)
            result.layers[index, call.position] = call.name, _copies(outputs)

    def compute(stage: int, original: Callable[..., Any], received: object, index: int) -> Any:
        waiting[:] = [(index, call) for call in calls[index] if call.stage == stage]
        try:
            return original(received, index)
        finally:
            waiting.clear()

    def end(outputs: object, index: int) -> Tensor:
        if finish is not None:
            return finish(outputs, index)
        result.outputs[index] = _copies(outputs)
        return torch.zeros((), device=pipeline.device)

    names = {call.name for part in calls for call in part if call.stage in pipeline.stages}
    hooks = [model.get_submodule(name).register_forward_hook(record) for name in names]
    originals = [(stage, module, module.compute) for stage, module in pipeline.stages.items()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        for stage, module, original in originals:
            assert original is not None
            module.compute = partial(compute, stage, original)
        with restored_state(model), rng.restored_generators(pipeline.device), FixedDraws():
            pipeline.run(parts, end, has_backward=finish is not None, shares_error=True)
            if finish is not None:
                pipeline.sum_new_gradients()
    except (ConfigurationError, PreparationError, StateError):
        raise
    except Exception as error:
        raise _not_equal(pipeline, f"raises {type(error).__name__} ({error})", changes) from error
    else:
        for name, parameter in named_parameters(model).items():
            if parameter.grad is not None:
                result.gradients[name] = whole_tensor(parameter.grad) / SCALE
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for _, module, original in originals:
            module.compute = original
        for hook in hooks:
            hook.remove()
    return result


def _raise_first(
    pipeline: Pipeline,
    differences: Iterable[Difference],
    group: dist.ProcessGroup | None,
    changes: Collection[str],
) -> None:
    """Raises an error for the first difference of all ranks of a group."""
    first = gather_in_group(min(differences, default=None), group)
    if found := [difference for difference in first if difference is not None]:
        raise _not_equal(pipeline, min(found).text, changes)


def _not_equal(pipeline: Pipeline, text: str, changes: Collection[str]) -> PreparationError:
    """Returns the error for a pipeline that does not compute what the model on one rank does."""
    seen = f" On one rank, {listed(list(changes))}." if changes else ""
    return PreparationError(
        f"{type(pipeline.model.model).__name__} cannot be split into {pipeline.model.num_stages} stages: the "
        f"pipeline {text}.{seen} Layers of other stages compute nothing on a rank, so values that a layer "
        "passes in an attribute, a buffer, an argument that it changes, a hook or another object do not "
        "reach later stages or loss_fn. Return them from the layer, or begin stages at other layers with "
        f"PipelineConfig(split=[...]). {HINT}"
    )
