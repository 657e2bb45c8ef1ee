"""State of models whose layers are on different ranks of a pipeline, and of their optimizers.

Each rank saves the weights of its stages under their names in the whole model. A checkpoint loads with
another number of stages, and on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from accelerate import checkpointing
from accelerate.base import CheckpointError
from accelerate.checkpointing import (
    Change,
    CheckpointReader,
    KeyPath,
    LocalShards,
    ModuleShards,
    OptimizerShards,
    PlainValue,
    ShardedState,
    ShardIndex,
)
from accelerate.ops import gather_in_group
from accelerate.strategies.dtensor_state import GatheredState
from accelerate.strategies.dtensors import distribute_like, named_parameters, whole_tensor
from accelerate.strategies.pipeline.runner import Pipeline
from accelerate.strategies.pipeline.weights import whole_weights
from accelerate.strategies.state import Fill, WholeWeights, local_states, owned_states

if TYPE_CHECKING:
    import torch

    from accelerate.optimizer import AcceleratedOptimizer

Names = list[list[list[str]]]
"""Names of each parameter of each group of an optimizer, the saved one first."""


class OptimizerNames(NamedTuple):
    """Names of the parameters that an optimizer steps on all ranks of a pipeline.

    Attributes:
        have_prefix: Whether they begin with the number of the model, of which the optimizer steps several.
    """

    groups: Names
    have_prefix: bool


class Owner(NamedTuple):
    """Rank of a pipeline that saves values, and the first rank of the run with the same stages.

    Attributes:
        is_this_rank: Whether this rank has the stage that saves them.
    """

    is_this_rank: bool
    first: int


class PipelineState(GatheredState):
    """State of the models and optimizers of a run with pipeline parallelism."""

    saves_shards = True

    def __init__(self, strategy: Any, axis: Any) -> None:
        super().__init__(strategy)
        self._axis = axis

    @property
    def _names(self) -> WeakKeyDictionary[Any, OptimizerNames]:
        names: WeakKeyDictionary[Any, OptimizerNames] = self._axis.optimizer_names
        return names

    def _pipeline(self, model: nn.Module) -> Pipeline | None:
        pipeline: Pipeline | None = self._axis.pipelines.get(self._inner(model))
        return pipeline

    # Whole states

    def whole_weights(self, model: nn.Module) -> WholeWeights:
        pipeline = self._pipeline(model)
        if pipeline is None:
            return self._inner(model).state_dict(keep_vars=True), whole_tensor
        return whole_weights(pipeline)

    def load_weights(self, model: nn.Module, state: Mapping[str, Any], fill: Fill) -> None:
        pipeline, inner = self._pipeline(model), self._inner(model)
        targets = inner.state_dict(keep_vars=True)
        if pipeline is not None:
            unknown = {name: value for name, value in state.items() if name not in pipeline.model.specs}
            own = {
                name: state[alias] for name in targets for alias in pipeline.aliases(name) if alias in state
            }
            state = {**own, **unknown}
        fill(inner, {name: distribute_like(value, targets.get(name, value)) for name, value in state.items()})

    def live_weights(self, model: nn.Module) -> Mapping[str, Any]:
        pipeline = self._pipeline(model)
        live = super().live_weights(model)
        return live if pipeline is None else {**pipeline.model.specs, **live}

    def optimizer_owners(self, optimizers: Sequence[Any], *, gather: bool) -> list[Any]:
        models = self.strategy.session.prepared.models
        return [
            WholeOptimizerOfStages(
                optimizer, self._names_of(optimizer).groups, self.parameter_names(optimizer, models)
            )
            for optimizer in optimizers
        ]

    # Shards

    def model_shards(self, model: nn.Module) -> ShardedState:
        pipeline = self._pipeline(model)
        if pipeline is None:
            return super().model_shards(model)
        return StageShards(ModuleShards(self._inner(model)), pipeline, self._owner)

    def optimizer_shards(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> ShardedState:
        names = self.parameter_names(optimizer, models)
        pipelines = [self._pipeline(model) for model in models]
        owners = {}
        for own, members in zip(names, self._members(optimizer, models), strict=True):
            for aliases, (index, name) in zip(own, members, strict=True):
                pipeline = pipelines[index]
                owners[aliases[0]] = self._owner({0} if pipeline is None else pipeline.holders_of(name))
        whole = self._names_of(optimizer).groups
        shards = OptimizerShards(optimizer, names, owned_states(optimizer))
        return StageOptimizerShards(shards, names, whole, owners)

    def parameter_keys(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        names = self.parameter_names(optimizer, self.strategy.session.prepared.models)
        return [[own[0] for own in group] for group in names]

    def _owner(self, holders: set[int]) -> Owner:
        return Owner(dist.get_rank(self._axis.group) == min(holders), self._axis.first_rank)

    # Names

    def _names_of(self, optimizer: torch.optim.Optimizer) -> OptimizerNames:
        return self._names[_inner(optimizer)]

    def parameter_names(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> Names:
        whole = self._names_of(optimizer)
        by_name = {name: names for group in whole.groups for names in group for name in names}
        return [
            [by_name[f"model_{index}.{name}" if whole.have_prefix else name] for index, name in group]
            for group in self._members(optimizer, models)
        ]

    def _members(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> list[list[tuple[int, str]]]:
        """Returns the model and the name of each parameter of each group of an optimizer on this rank."""
        names: dict[int, tuple[int, str]] = {}
        for index, model in enumerate(models):
            for name, parameter in named_parameters(self._inner(model)).items():
                names.setdefault(id(parameter), (index, name))
        return [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]

    def gather_names(self, optimizer: AcceleratedOptimizer, models: Sequence[nn.Module]) -> None:
        """Gathers the names of the parameters that an optimizer steps on all ranks of the pipeline.

        Called on all ranks, when models or optimizers are prepared.
        """
        optimizer = _inner(optimizer)
        gathered = gather_in_group(self._members(optimizer, models), self._axis.group)
        pipelines = [self._pipeline(model) for model in models]
        orders = [{} if pipeline is None else pipeline.order for pipeline in pipelines]

        def aliases(index: int, name: str) -> list[str]:
            pipeline = pipelines[index]
            return [name] if pipeline is None else pipeline.aliases(name)

        have_prefix = len({index for part in gathered for group in part for index, _ in group}) > 1
        whole: Names = []
        for groups in zip(*gathered, strict=True):
            members = {(index, aliases(index, name)[0]) for group in groups for index, name in group}
            ordered = sorted(members, key=lambda member: (member[0], orders[member[0]].get(member[1], 0)))
            whole.append(
                [
                    [f"model_{index}.{alias}" if have_prefix else alias for alias in aliases(index, name)]
                    for index, name in ordered
                ]
            )
        self._names[optimizer] = OptimizerNames(whole, have_prefix)


def _inner(optimizer: torch.optim.Optimizer) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _local_shards(value: object, position: int, owner: Owner) -> Any:
    """Returns the part of a value on this rank, which one of the ranks with the value saves."""
    if isinstance(value, (LocalShards, PlainValue)):  # state of a matrix that this rank owns
        return value
    local = checkpointing.to_local_shards(value, position, dist.get_rank(), owner.first)
    return local if owner.is_this_rank else replace(local, owned=False)


@dataclass(frozen=True)
class StageShards:
    """Weights of the stages of this rank."""

    shards: ModuleShards
    pipeline: Pipeline
    owner_of: Callable[[set[int]], Owner]
    root: str = checkpointing.MODEL

    def state(self) -> dict[KeyPath, Any]:
        order, pipeline = self.pipeline.order, self.pipeline
        return {
            (checkpointing.MODEL, alias): _local_shards(
                value, order[alias], self.owner_of(pipeline.holders_of(alias))
            )
            for path, value in self.shards.state().items()
            for alias in pipeline.aliases(str(path[1]))
        }

    def targets(self, index: ShardIndex, reader: CheckpointReader) -> dict[KeyPath, LocalShards | None]:
        foreign = set(self.pipeline.model.specs) - {str(path[1]) for path in self.shards.state()}
        return self.shards.targets(index.without(foreign), reader)

    def plan(self, values: Mapping[KeyPath, Any], reader: CheckpointReader) -> Change:
        return self.shards.plan(values, reader)


@dataclass(frozen=True)
class StageOptimizerShards:
    """State of an optimizer of the parameters of this rank's stages."""

    shards: OptimizerShards
    names: Names
    whole: Names
    owners: Mapping[str, Owner]
    root: str = checkpointing.OPTIMIZER

    def state(self) -> dict[KeyPath, Any]:
        order = {names[0]: position for group in self.whole for position, names in enumerate(group)}
        shards: dict[KeyPath, Any] = {}
        for path, value in self.shards.state().items():
            if path[1] in (checkpointing.STATE, checkpointing.LAYOUTS):
                shards[path] = _local_shards(value, order[path[2]], self.owners[path[2]])
            elif path[3] == checkpointing.PARAMETERS:
                shards[path] = [names[0] for names in self.whole[path[2]]]
            else:
                shards[path] = value
        return shards

    @property
    def _foreign(self) -> set[str]:
        """Names of parameters that other ranks step."""
        whole, own = (
            {name for group in groups for names in group for name in names}
            for groups in (self.whole, self.names)
        )
        return whole - own

    def targets(self, index: ShardIndex, reader: CheckpointReader) -> dict[KeyPath, LocalShards | None]:
        return self.shards.targets(index.without(self._foreign), reader)

    def plan(self, values: Mapping[KeyPath, Any], reader: CheckpointReader) -> Change:
        foreign = self._foreign
        own = {
            path: [name for name in value if name not in foreign]
            if path[1] == checkpointing.GROUPS and path[3] == checkpointing.PARAMETERS
            else value
            for path, value in values.items()
        }
        return self.shards.plan(own, reader)


class WholeOptimizerOfStages:
    """Optimizer that loads the state of all stages in the format of one process."""

    def __init__(self, optimizer: torch.optim.Optimizer, whole: Names, own: Names) -> None:
        self.optimizer, self._whole, self._own = optimizer, whole, own

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises an error for a state with other numbers of parameters."""
        saved = [len(group["params"]) for group in state["param_groups"]]
        expected = [len(group) for group in self._whole]
        if saved != expected:
            raise CheckpointError(
                f"The state of {type(_inner(self.optimizer)).__name__} has groups of {saved} parameters, and "
                f"the optimizer steps {expected} on all stages."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the state of the parameters of this rank."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        names = [own[0] for group in self._whole for own in group]
        by_name = dict(zip(names, numbers, strict=True))
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        owned = owned_states(self.optimizer)
        local: dict[Any, Any] = {key: own for key, own in state["state"].items() if isinstance(key, str)}
        groups, count = list[Any](), 0
        for group, own in zip(state["param_groups"], self._own, strict=True):
            options = {key: value for key, value in group.items() if key != "param_names"}  # of all stages
            groups.append({**options, "params": list(range(count, count + len(own)))})
            for index, aliases in enumerate(own, start=count):
                values = state["state"].get(by_name[aliases[0]], {})
                if owned_values := local_states(values, parameters[index], owned[index] if owned else None):
                    local[index] = owned_values
            count += len(own)
        self.optimizer.load_state_dict({**state, "state": local, "param_groups": groups})
