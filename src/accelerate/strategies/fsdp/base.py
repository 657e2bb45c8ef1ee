"""What both versions of FSDP have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from accelerate.base import ConfigurationError, DistributedType, PreparationError
from accelerate.state import AcceleratorState
from accelerate.strategies.base import Strategy, refuse_split_model
from accelerate.strategies.fsdp.clipping import clip_values
from accelerate.strategies.fsdp.parameters import ParameterRemapper
from accelerate.strategies.request import Context

AUTOCAST = ("fp16", "bf16")
IN_SHARDS = ("SHARDED_STATE_DICT", "LOCAL_STATE_DICT")


class Sharded(Strategy, ABC):
    """Each process keeps a part of every parameter, of its gradient and of the optimizer's state.

    Optimizers follow their parameters: those of the same `prepare` call, and those that come later although
    they were built on the parameters that the model had before.
    """

    distributed_type: ClassVar[DistributedType | None] = DistributedType.FSDP

    holds_whole_models = False

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.places: WeakKeyDictionary[Any, list[list[str]]] = WeakKeyDictionary()
        """Optimizer -> for each of its groups the names that its parameters had before."""
        self.replicas = context.topology.size
        if self.plugin is not None and context.mixed_precision in AUTOCAST:
            self.plugin.set_mixed_precision(context.mixed_precision)

    @property
    def plugin(self) -> Any:
        """The user's plugin: a live object, read when a model is prepared; None without FSDP."""
        return getattr(AcceleratorState(), "fsdp_plugin", None)

    @property
    def saves_shards(self) -> bool:  # type: ignore[override]  # the plugin is a live object
        """Whether states are saved in shards, as the plugin says."""
        return self.plugin is not None and self.plugin.state_dict_type.name in IN_SHARDS

    # Prepare

    def check_model(self, model: nn.Module) -> None:
        """Refuse models that a device map has split."""
        refuse_split_model(model, "and only whole models are shared between processes")

    def prepare_model(self, model: nn.Module, *, place: bool, evaluation: bool) -> nn.Module:
        """Return `model` sharded, or whole for evaluation; units come to the device by themselves."""
        if evaluation:
            return super().prepare_model(model, place=place, evaluation=True)
        return self.wrap(self.convert(model))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the sharded model; repeated blocks are compiled before, a whole model afterwards."""
        if self.context.request.dynamo.use_regional_compilation:
            return self.split(self.compile(model))
        return self.compile(self.split(model))

    @abstractmethod
    def split(self, model: nn.Module) -> nn.Module:
        """Return `model` with each rank keeping its part of all parameters."""

    def follow(
        self,
        model: nn.Module,
        shard: Callable[[], nn.Module],
        named: Callable[[nn.Module], Mapping[str, Any]],
    ) -> nn.Module:
        """Return a sharded model whose optimizers step its new parameters."""
        remapper = ParameterRemapper(model, self.session.waiting)
        remapper.let_go()
        sharded = shard()
        parameters = named(sharded)
        remapper.rejoin(parameters)
        self.places.update(remapper.names_by_group())
        self.session.replace(remapper.replaced(parameters))
        return sharded

    # Step

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Refuse: every forward needs the parts of all ranks."""
        raise ConfigurationError(
            "join_uneven_inputs does not work with FSDP or tensor parallelism: a rank that has run "
            "out of batches would keep its part of the parameters from the others. Leave even_batches on, or "
            "use windows()."
        )

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient element of the local shards."""
        clip_values(parameters, clip_value)

    # Save and end

    def keep_whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a whole state on the first process of each machine, which writes; an empty one on others."""
        return state if self.context.topology.local_rank == 0 else {}


def refuse_unit(model: nn.Module, problem: str, fix: str) -> PreparationError:
    """Return the error for a model that this version cannot shard as it is; the caller raises it."""
    return PreparationError(f"{type(model).__name__} {problem}. {fix}.")
