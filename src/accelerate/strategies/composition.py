"""Table of the layers of which a strategy is composed, in the order in which their hooks are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from torch import nn

from accelerate.base import DynamoBackend, wrong_value
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallelism_config import MeshAxis
from accelerate.strategies.base import Strategy
from accelerate.strategies.layer import Layer
from accelerate.strategies.session import needs_whole_matrices

Composed = TypeVar("Composed", bound=Strategy)


class Row(NamedTuple):
    """Row of the table.

    Attributes:
        layer: Class of the layer, in `accelerate.strategies`, whose module is imported with the first object.
        purpose: What it does.
        is_requested: Returns whether a run begins with the layer.
        is_needed_for: Returns whether an object that is prepared needs the layer.
    """

    layer: str
    purpose: str
    is_requested: Callable[[Strategy], bool]
    is_needed_for: Callable[[Strategy, Any, bool | None], bool] = lambda strategy, obj, requested: False

    def build(self, strategy: Strategy) -> Layer:
        module, _, name = self.layer.rpartition(".")
        layer: Layer = getattr(import_module(f"accelerate.strategies.{module}"), name)(strategy)
        layer.row = self.layer
        return layer


def _has(axis: MeshAxis) -> Callable[[Strategy], bool]:
    """Returns a function that returns whether a dimension of the mesh of a run has several ranks."""

    def has_axis(strategy: Strategy) -> bool:
        parallelism = strategy.context.request.parallelism
        return parallelism is not None and getattr(parallelism, f"{axis.value}_size") > 1

    return has_axis


def _rotates_keys(strategy: Strategy) -> bool:
    """Returns whether torch shards the sequences of a run by context parallelism alone."""
    return _has(MeshAxis.CP)(strategy) and not _exchanges_heads("torch")(strategy)


def _exchanges_heads(backend: str) -> Callable[[Strategy], bool]:
    """Returns a function that returns whether a backend shards the sequences of a run by Ulysses."""

    def has_backend(strategy: Strategy) -> bool:
        parallelism = strategy.context.request.parallelism
        return parallelism is not None and parallelism.sequence_backend == backend

    return has_backend


def _compares_pipelines(strategy: Strategy) -> bool:
    parallelism = strategy.context.request.parallelism
    handler = None if parallelism is None else parallelism.pp_handler
    return handler is not None and handler.verify and _has(MeshAxis.PP)(strategy)


def _shards_some(strategy: Strategy) -> bool:
    """Returns whether the strategy or a layer shards parameters, of which some may stay whole."""
    is_sharding = strategy.shards_models and not strategy.flattens_parameters
    return is_sharding or _has(MeshAxis.PP)(strategy) or _has(MeshAxis.EP)(strategy)


def _is_sharded(strategy: Strategy, obj: object, requested: bool | None) -> bool:
    return isinstance(obj, nn.Module) and strategy.keeps_sharding(obj)


def _recomputes(strategy: Strategy) -> bool:
    return strategy.context.request.activations is not None


def _is_compiled(strategy: Strategy, obj: object, requested: bool | None) -> bool:
    return isinstance(obj, nn.Module) and strategy.context.request.dynamo.backend != DynamoBackend.NO


def _never(strategy: Strategy) -> bool:
    return False


def _steps_matrices(strategy: Strategy, obj: object, requested: bool | None) -> bool:
    if not isinstance(obj, AcceleratedOptimizer):
        return False
    return needs_whole_matrices(obj.optimizer) if requested is None else requested


def _may_be_packed(strategy: Strategy, obj: object, requested: bool | None) -> bool:
    """Returns whether the first batch of a model with positions is checked, which each rank computes."""
    if not isinstance(obj, nn.Module) or not strategy.context.request.dataloader_config.check_packing:
        return False
    if any(layer.divided_by or not layer.masks_documents for layer in strategy.layers):
        return False
    kinds: set[Any] = set(map(type, obj.modules()))
    forwards = (inspect.unwrap(kind.forward) for kind in kinds)
    codes = (getattr(forward, "__code__", None) for forward in forwards)
    return any(code is not None and "position_ids" in code.co_varnames for code in codes)


LAYERS = (
    Row("pipeline.KeptStructures", "keeps structures of models before they are split", _compares_pipelines),
    Row("axes.ContextAxis", "shards sequences, with attention over all ranks", _rotates_keys),
    Row(
        "axes.UlyssesAxis",
        "shards sequences, and exchanges heads for them (DeepSpeed)",
        _exchanges_heads("deepspeed"),
    ),
    Row("axes.SequenceAxis", "shards sequences, and exchanges heads for them", _exchanges_heads("torch")),
    Row("axes.ExpertAxis", "shards experts, whose ranks have different batches", _has(MeshAxis.EP)),
    Row("axes.TensorAxis", "shards the weights of layers of models", _has(MeshAxis.TP)),
    Row("pipeline.PipelineAxis", "keeps and runs the stages of this rank", _has(MeshAxis.PP)),
    Row("sharded_models.ShardedModels", "keeps the meshes of sharded models", _shards_some, _is_sharded),
    Row("recomputation.Recomputation", "computes activations again in backward", _recomputes),
    Row("compilation.Compilation", "compiles models", _never, _is_compiled),
    Row("matrix_owners.WholeMatrices", "steps parameters as a whole", _never, _steps_matrices),
    Row("isolation.PackingCheck", "checks that packed documents are isolated", _never, _may_be_packed),
)
"""Layers in their order."""


def compose(strategy: Composed) -> Composed:
    """Adds the layers of its run to a strategy, and returns it."""
    strategy.layers = tuple(row.build(strategy) for row in LAYERS if row.is_requested(strategy))
    strategy.admit = admit
    return strategy


def admit(strategy: Strategy, obj: object, requested: bool | None = None) -> None:
    """Adds the layers to a strategy that an object needs, before it is prepared.

    Args:
        requested: Whether the program requests that ranks step whole matrices, or None.
    """
    present = {layer.row: layer for layer in strategy.layers}
    needed = [
        row for row in LAYERS if row.layer not in present and row.is_needed_for(strategy, obj, requested)
    ]
    if needed:
        present |= {row.layer: row.build(strategy) for row in needed}
        strategy.layers = tuple(present[row.layer] for row in LAYERS if row.layer in present)


def divide_steps(strategy: Strategy, optimizer: AcceleratedOptimizer, whole_matrices: object) -> None:
    """Lets layers change how a prepared optimizer steps.

    Args:
        whole_matrices: Whether it needs whole matrices, as True or False. None is the default of its class.
    """
    if whole_matrices is not None and not isinstance(whole_matrices, bool):
        reason = "it is for all optimizers of the call"
        fix = "Pass True, False or None, and prepare other optimizers in a call of their own"
        raise wrong_value("whole_matrices", whole_matrices, reason, fix)
    admit(strategy, optimizer, whole_matrices)
    for layer in strategy.layers:
        layer.wrap_optimizer(optimizer, whole_matrices)
