"""Table of the layers of which a strategy is composed, in the order in which their hooks are called."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from torch import nn

from accelerate.base import wrong_value
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallelism_config import MeshAxis
from accelerate.strategies.base import Strategy
from accelerate.strategies.bundle import needs_whole_matrices
from accelerate.strategies.layer import Layer

Composed = TypeVar("Composed", bound=Strategy)


class Row(NamedTuple):
    """Row of the table.

    Attributes:
        purpose: What the layer adds to a run.
        build: Returns the layer of a strategy, and imports its module.
        is_requested: Returns whether a run begins with the layer.
        is_needed_for: Returns whether an object that is prepared needs the layer.
    """

    purpose: str
    build: Callable[[Strategy], Layer]
    is_requested: Callable[[Strategy], bool]
    is_needed_for: Callable[[Strategy, Any, bool | None], bool] = lambda strategy, obj, requested: False


def _has(axis: MeshAxis) -> Callable[[Strategy], bool]:
    """Returns a function that returns whether a dimension of the mesh of a run has several ranks."""

    def has_axis(strategy: Strategy) -> bool:
        parallelism = strategy.context.request.parallelism
        return parallelism is not None and getattr(parallelism, f"{axis.value}_size") > 1

    return has_axis


def _kept_structures(strategy: Strategy) -> Layer:
    from accelerate.strategies.pipeline import KeptStructures

    return KeptStructures(strategy)


def _compares_pipelines(strategy: Strategy) -> bool:
    parallelism = strategy.context.request.parallelism
    handler = None if parallelism is None else parallelism.pp_handler
    return handler is not None and handler.verify and _has(MeshAxis.PP)(strategy)


def _context(strategy: Strategy) -> Layer:
    from accelerate.strategies.axes import ContextAxis

    context = strategy.context
    assert context.request.parallelism is not None
    return ContextAxis(context.mesh, context.request.parallelism.cp_handler, context.mixed_precision)


def _ulysses(strategy: Strategy) -> Layer:
    from accelerate.strategies.axes import UlyssesAxis

    parallelism = strategy.context.request.parallelism
    assert parallelism is not None
    return UlyssesAxis(parallelism.sp_size, parallelism.sp_handler)


def _experts(strategy: Strategy) -> Layer:
    from accelerate.strategies.axes import ExpertAxis

    return ExpertAxis(strategy)


def _tensor(strategy: Strategy) -> Layer:
    from accelerate.strategies.axes import TensorAxis

    return TensorAxis(strategy)


def _pipeline(strategy: Strategy) -> Layer:
    from accelerate.strategies.pipeline import PipelineAxis

    return PipelineAxis(strategy)


def _sharded(strategy: Strategy) -> Layer:
    from accelerate.strategies.sharded_models import ShardedModels

    return ShardedModels(strategy)


def _shards_some(strategy: Strategy) -> bool:
    """Returns whether a run shards parameters, of which some may stay whole."""
    return strategy.shards_models and not strategy.flattens_parameters or _has(MeshAxis.PP)(strategy)


def _is_sharded(strategy: Strategy, obj: Any, requested: bool | None) -> bool:
    return isinstance(obj, nn.Module) and strategy.keeps_sharding(obj)


def _recomputation(strategy: Strategy) -> Layer:
    from accelerate.strategies.recomputation import Recomputation

    return Recomputation(strategy)


def _recomputes(strategy: Strategy) -> bool:
    return strategy.context.request.activations is not None


def _matrices(strategy: Strategy) -> Layer:
    from accelerate.strategies.matrix_owners import WholeMatrices

    return WholeMatrices(strategy)


def _steps_matrices(strategy: Strategy, obj: Any, requested: bool | None) -> bool:
    if not isinstance(obj, AcceleratedOptimizer):
        return False
    return needs_whole_matrices(obj.optimizer) if requested is None else requested


def _never(strategy: Strategy) -> bool:
    return False


LAYERS = (
    Row("keeps structures of models to compare their pipelines with", _kept_structures, _compares_pipelines),
    Row("splits sequences, with attention over all ranks", _context, _has(MeshAxis.CP)),
    Row("splits sequences, and exchanges heads for them (DeepSpeed)", _ulysses, _has(MeshAxis.SP)),
    Row("shards experts, whose ranks have different batches", _experts, _has(MeshAxis.EP)),
    Row("shards the weights of layers", _tensor, _has(MeshAxis.TP)),
    Row("keeps the layers of this rank, and runs micro-batches in a schedule", _pipeline, _has(MeshAxis.PP)),
    Row("keeps the meshes of models that are sharded already", _sharded, _shards_some, _is_sharded),
    Row("computes activations again in backward", _recomputation, _recomputes),
    Row("steps some parameters of an optimizer as a whole", _matrices, _never, _steps_matrices),
)
"""Layers in their order."""


def compose(strategy: Composed) -> Composed:
    """Adds the layers of its run to a strategy, and returns it."""
    rows = [index for index, row in enumerate(LAYERS) if row.is_requested(strategy)]
    strategy.layers = tuple(_build(strategy, index) for index in rows)
    strategy.admit = admit
    return strategy


def admit(strategy: Strategy, obj: Any, requested: bool | None = None) -> None:
    """Adds the layers to a strategy that an object needs, before it is prepared.

    Args:
        strategy: A strategy.
        obj: A model, or a prepared optimizer.
        requested: Whether the program requests that ranks step whole matrices, or None.
    """
    present = {layer.position for layer in strategy.layers}
    for index, row in enumerate(LAYERS):
        if index not in present and row.is_needed_for(strategy, obj, requested):
            layers = [*strategy.layers, _build(strategy, index)]
            strategy.layers = tuple(sorted(layers, key=attrgetter("position")))


def _build(strategy: Strategy, index: int) -> Layer:
    layer = LAYERS[index].build(strategy)
    layer.position = index
    return layer


def divide_steps(strategy: Strategy, optimizer: AcceleratedOptimizer, whole_matrices: object) -> None:
    """Lets layers change how a prepared optimizer steps.

    Args:
        strategy: Strategy of the run.
        optimizer: A prepared optimizer.
        whole_matrices: Whether it needs whole matrices, as True or False. None is the default of its class.
    """
    if whole_matrices is not None and not isinstance(whole_matrices, bool):
        reason = "it is for all optimizers of the call"
        fix = "Pass True, False or None, and prepare other optimizers in a call of their own"
        raise wrong_value("whole_matrices", whole_matrices, reason, fix)
    admit(strategy, optimizer, whole_matrices)
    for layer in strategy.layers:
        layer.wrap_optimizer(optimizer, whole_matrices)
