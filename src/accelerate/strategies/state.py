"""Interface of the state of a strategy, with the weights and optimizer states of checkpoints.

`Accelerator.save_state`, `load_state`, `save_model` and `get_state_dict` call it as `strategy.state`. The
base class is the state of one process, with whole models and optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from accelerate.base import PreparationError
from accelerate.checkpointing import ModuleShards, OptimizerShards, Part, ShardedState, distribute
from accelerate.hooks import get_state_dict_offloaded_model, is_any_offloaded, stored_weights
from accelerate.nested import recursively_apply
from accelerate.ops import current_transport
from accelerate.strategies.dtensors import distribute_like, named_parameters, names_by_group
from accelerate.strategies.request import Context

if TYPE_CHECKING:
    import torch

    from accelerate.optimizer import AcceleratedOptimizer


# States of the matrices that ranks own, in whole state dicts of optimizers


class Owners:
    """Observer of an optimizer whose ranks each own some of its parameters."""

    def owners(self) -> list[int | None]:
        """Returns the rank that owns each parameter of all groups, or None for those stepped in shards."""
        raise NotImplementedError


def owners_of(optimizer: torch.optim.Optimizer) -> Owners | None:
    """Returns the owners of the parameters of a prepared optimizer, or None if ranks own none."""
    observers = getattr(optimizer, "observers", ())
    return next((each for each in observers if isinstance(each, Owners)), None)


def owned_states(optimizer: torch.optim.Optimizer) -> list[bool | None]:
    """Returns for each parameter whether this rank owns its state, None for states that are like shards.

    The list is empty for an optimizer whose ranks own no matrices.
    """
    owners = owners_of(optimizer)
    if owners is None:
        return []
    rank = current_transport().rank
    return [None if owner is None else owner == rank for owner in owners.owners()]


def local_states(
    values: Mapping[str, Any],
    parameter: Tensor,
    is_owned: bool | None,
    placements: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Returns the part of the whole state of a parameter on this rank, or None if it is on another rank.

    Args:
        is_owned: Whether this rank has the whole state, or None if all ranks share it.
        placements: Placements of each tensor, None for a plain one. By default those with the shape of the
            parameter are distributed like it.
    """
    if is_owned is False:
        return None
    if is_owned:
        return dict(values)
    if placements is None:
        return {name: distribute_like(value, parameter) for name, value in values.items()}
    return {
        name: value if placements[name] is None else distribute(value, parameter, placements[name])
        for name, value in values.items()
    }


def gather_owned_states(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], keep: bool
) -> dict[str, Any]:
    """Returns the state dict of an optimizer with the states of the matrices of all ranks, on the CPU.

    Called on all ranks. The states are sent one by one, so that other ranks need memory for one of them.

    Args:
        keep: Whether to return states. False returns a state dict without them.
    """
    states: dict[int, Any] = dict(state["state"])
    owners = owners_of(optimizer)
    for number, owner in enumerate([] if owners is None else owners.owners()):
        if owner is None:
            continue
        own = recursively_apply(Tensor.cpu, states.get(number))
        values = current_transport().broadcast_object(own, owner)
        if values is not None:
            states[number] = values if keep else None
    ordered = sorted(states.items(), key=lambda item: (isinstance(item[0], str), item[0]))
    return {**state, "state": dict(ordered) if keep else {}}


# State of a strategy

WholeWeights = tuple[dict[str, Any], Callable[[Any], Tensor]]
"""Weights of a model by name, which have a shape and a dtype, and a function that returns one as a tensor."""
Fill = Callable[[nn.Module, Mapping[str, Any]], None]
"""Function that loads the whole weights of a module, by name."""


@dataclass(eq=False)
class GatheredOptimizer:
    """Optimizer in a checkpoint, with full tensors in the format of a single process."""

    optimizer: Any
    state: Mapping[str, Any] | None  # gathered, or None if nothing is saved

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the gathered state."""
        assert self.state is not None
        return self.state


class StrategyState:
    """State of the models and optimizers that a strategy has prepared."""

    saves_shards: bool = False  # whether each rank saves its own shards of models and optimizers
    has_engines: bool = False  # whether engines save models and optimizers themselves
    takes_dtensors: bool = False  # whether whole states are gathered from DTensors

    def __init__(self, strategy: Any) -> None:
        self.strategy: Any = strategy
        self.context: Context = strategy.context

    def _inner(self, model: nn.Module) -> nn.Module:
        """Returns the module of the user in a prepared model."""
        inner: nn.Module = self.strategy.unwrap(model, keep_compiled=False)
        return inner

    def keep(self, whole: Tensor) -> Tensor:
        """Returns a whole tensor on the CPU of the first rank of each node, and an empty one on others."""
        return whole.detach().cpu().contiguous() if self.keeps_whole_states else whole.new_empty(0)

    # Whole states

    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        """Returns the whole state dict of a prepared model.

        Called on all ranks.

        Args:
            model: A prepared model.
            unwrap: Whether the names have no prefixes of wrappers.
        """
        inner = self._inner(model) if unwrap else model
        if _has_offloaded(inner):
            return get_state_dict_offloaded_model(inner)
        state: dict[str, Any] = inner.state_dict()
        return state

    def gatherable_weights(self, model: nn.Module) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
        """Returns the sharded weights of a model, and a function that gathers one of them.

        The function is called on all ranks in the same order, and returns the whole tensor on the CPU.

        Returns:
            None if weights are not sharded, or can only be gathered together.
        """
        return None

    def whole_weights(self, model: nn.Module) -> WholeWeights:
        """Returns the weights of a prepared model, and a function that returns one as a whole tensor.

        Called on all ranks. The function is called on all ranks in the same order, and returns the tensor on
        each of them, which may share memory with the model. Tied weights are one object.
        """
        inner = self._inner(model)
        if _has_offloaded(inner):
            return stored_weights(inner)
        return inner.state_dict(keep_vars=True), lambda weight: weight.detach()

    def load_weights(self, model: nn.Module, state: Mapping[str, Any], fill: Fill) -> None:
        """Loads whole weights into a prepared model.

        Called on all ranks, which all have the weights.
        """
        fill(self._inner(model), state)

    def live_weights(self, model: nn.Module) -> Mapping[str, Any]:
        """Returns the tensors of a prepared model by name, with the shapes and dtypes of whole weights."""
        state: Mapping[str, Any] = self._inner(model).state_dict(keep_vars=True)
        return state

    @property
    def keeps_whole_states(self) -> bool:
        """True on the first rank of each node, which keeps gathered states and writes them."""
        return self.context.topology.local_rank == 0

    def optimizer_owners(self, optimizers: Sequence[Any], *, gather: bool) -> list[Any]:
        """Returns for each optimizer an object with `state_dict` and `load_state_dict` of whole states.

        Args:
            gather: Whether to gather the states now, which is called on all ranks.
        """
        return [self._gathered(each) if gather and owned_states(each) else each for each in optimizers]

    def _gathered(self, optimizer: AcceleratedOptimizer) -> GatheredOptimizer:
        whole = gather_owned_states(optimizer, optimizer.optimizer.state_dict(), self.keeps_whole_states)
        return GatheredOptimizer(optimizer, whole)

    # Shards

    def model_shards(self, model: nn.Module) -> ShardedState:
        """Returns the object that saves and loads this rank's shards of a model, without other ranks."""
        return ModuleShards(self._inner(model))

    def optimizer_shards(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> ShardedState:
        """Returns the object that saves and loads this rank's shards of an optimizer state."""
        return OptimizerShards(optimizer, self.parameter_names(optimizer, models), owned_states(optimizer))

    def parameter_keys(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Returns a key of each parameter of each group of an optimizer, which is equal on all ranks."""
        return [
            [f"parameter {index} of group {number}" for index, _ in enumerate(group["params"])]
            for number, group in enumerate(optimizer.param_groups)
        ]

    def parameter_names(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> list[list[list[str]]]:
        """Returns the names of the parameters of an optimizer in some models, by group and parameter."""
        return names_by_group(optimizer, [named_parameters(self._inner(model)) for model in models])

    # Averages

    def check_averages(self, model: nn.Module) -> None:
        """Raises an error for a prepared model whose weights cannot be averaged."""
        if not self.strategy.has_plain_weights:
            raise PreparationError(
                f"{type(self.strategy).__name__} keeps the weights of models itself, and "
                "accelerator.average() cannot follow them. Train with DistributedDataParallel, FSDP or "
                "parallelism_config."
            )

    def stepped_weights(self, optimizer: AcceleratedOptimizer, model: nn.Module) -> list[Tensor]:
        """Returns the weights of a model on this rank that a prepared optimizer steps."""
        own = set(map(id, model.parameters()))
        return [parameter for parameter in optimizer.parameters() if id(parameter) in own]

    # Engines

    def engine_part(self, index: int, model: nn.Module, folder: Path | None = None) -> Part | None:
        """Returns the checkpoint part of an engine, or None if model and optimizer are saved separately.

        Args:
            index: Position of the model among those in engines.
            folder: Folder to save to, or None to load.
        """
        return None

    # Order of gradients

    def gradient_order(self, model: nn.Module) -> list[int]:
        """Returns the order of parameters on which the rounding of summed gradients depends, or no order."""
        return []

    def adopt_gradient_order(self, model: nn.Module, order: Sequence[int]) -> None:
        """Makes the next backward pass sum gradients in an order from a checkpoint.

        Called on all ranks.
        """


def _has_offloaded(model: nn.Module) -> bool:
    """Returns whether weights of a model are loaded for each forward, and are on the meta device now."""
    return any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers())) and is_any_offloaded(
        model
    )
