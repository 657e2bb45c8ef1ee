"""What all strategies that shard parameters have in common, and the norms of sharded gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accelerate.base import ConfigurationError, DistributedType, wrong_value
from accelerate.state import AcceleratorState
from accelerate.strategies.base import Parameters, Strategy, refuse_split_model
from accelerate.strategies.fsdp.parameters import ParameterRemapper
from accelerate.strategies.session import Context, as_list

Groups = tuple[dist.ProcessGroup, ...]
"""The groups of ranks over which a parameter is sharded; none for a replicated one."""


class Sharded(Strategy, ABC):
    """Each process keeps a part of every parameter, of its gradient and of the optimizer's state.

    Optimizers follow their parameters: those of the same `prepare` call, and those that come later although
    they were built on the parameters that the model had before.
    """

    distributed_type: ClassVar[DistributedType | None] = DistributedType.FSDP
    holds_whole_models = False

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.names: WeakKeyDictionary[Any, list[list[str]]] = WeakKeyDictionary()
        """Optimizer -> for each of its groups the names that its parameters had before."""
        self.replicas = context.topology.size
        if self.plugin is not None and context.mixed_precision in ("fp16", "bf16"):
            self.plugin.set_mixed_precision(context.mixed_precision)

    @property
    def plugin(self) -> Any:
        """The user's plugin: a live object, read when a model is prepared; None without FSDP."""
        return getattr(AcceleratorState(), "fsdp_plugin", None)

    @property
    def keeps_whole_states(self) -> bool:
        """Whether this process keeps gathered states: the first one of each machine, which writes them."""
        return self.context.topology.local_rank == 0

    @property
    def saves_shards(self) -> bool:  # type: ignore[override]  # the plugin is a live object
        """Whether states are saved in shards, as the plugin says."""
        return self.plugin is not None and saves_shards(self.plugin)

    def check_model(self, model: nn.Module) -> None:
        refuse_split_model(model, "and only whole models are shared between processes")

    def prepare_model(self, model: nn.Module, *, to_device: bool, evaluation: bool) -> nn.Module:
        """Return `model` sharded, or whole for evaluation; units come to the device by themselves."""
        if evaluation:
            return super().prepare_model(model, to_device=to_device, evaluation=True)
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
        list_parameters: Callable[[nn.Module], Mapping[str, Any]],
    ) -> nn.Module:
        """Return a sharded model whose optimizers step its new parameters, listed by their old names."""
        remapper = ParameterRemapper(model, self.session.waiting)
        remapper.release()
        sharded = shard()
        parameters = list_parameters(sharded)
        remapper.rejoin(parameters)
        self.names.update(remapper.names_by_group())
        self.session.replace(remapper.replaced(parameters))
        return sharded

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        raise ConfigurationError(
            "join_uneven_inputs does not work with FSDP or tensor parallelism: a rank that has run "
            "out of batches would keep its part of the parameters from the others. Leave even_batches on, or "
            "use windows()."
        )

    def clip_grad_norm(self, parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients by their norm over all ranks; return it as a plain tensor."""
        parameters = as_list(parameters)
        norm = gradient_norm(parameters, norm_type, self.context.device, self.groups_of)
        scale_down(parameters, norm, max_norm)
        return norm

    def groups_of(self, parameter: Tensor) -> Groups:
        """Return the groups of ranks over which a parameter and its gradient are sharded."""
        return groups_of(parameter)

    def clip_grad_value(self, parameters: Parameters, clip_value: float) -> None:
        clip_values(parameters, clip_value)


@dataclass(eq=False)
class GatheredOptimizer:
    """Saves and loads an optimizer as one process would: with whole tensors, by the order of parameters."""

    optimizer: Any
    state: Mapping[str, Any] | None  # gathered; None where nothing is saved

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that was gathered."""
        assert self.state is not None
        return self.state


def saves_shards(plugin: Any) -> bool:
    """Whether states are saved in shards, as a plugin says."""
    return plugin.state_dict_type.name in ("SHARDED_STATE_DICT", "LOCAL_STATE_DICT")


def local_parts(parameters: Parameters) -> list[Tensor]:
    """Return the local shards of the gradients that exist; writing to them changes the gradients.

    The backward pass leaves some gradients replicated, or as partial sums: these get the placements of their
    parameters first, in place, so all ranks call this.
    """
    parts = []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            if gradient.placements != parameter.placements:
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
            gradient = gradient.to_local()
        if gradient is not None:
            parts.append(gradient)
    return parts


def groups_of(parameter: Tensor) -> Groups:
    """Return the groups of ranks over which a distributed tensor is sharded."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    sharded = (dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return tuple(mesh.get_group(dim) for dim in sharded)


@torch.no_grad()
def gradient_norm(
    parameters: Sequence[Tensor],
    norm_type: float,
    device: torch.device,
    find_groups: Callable[[Tensor], Groups] = groups_of,
) -> Tensor:
    """Return the p-norm of all gradients together, as if each were whole: a 0-d float32 tensor.

    Called on all ranks, with the same parameters in the same order; gradients may be missing. There is one
    collective for each set of groups, however many gradients there are.
    """
    if norm_type <= 0:
        raise wrong_value("norm_type", norm_type, "it is no p of a p-norm", "Give a number above 0, or inf")
    # A rank without gradients must call the same collectives as the others: parameters decide which.
    by_groups: dict[tuple[str, ...], tuple[Groups, list[Tensor]]] = {}
    for parameter in parameters:
        groups = find_groups(parameter)
        names = tuple(group.group_name for group in groups)
        by_groups.setdefault(names, (groups, []))[1].append(parameter)
    is_max = norm_type == float("inf")
    powers = [torch.zeros((), device=device)]
    for groups, members in by_groups.values():
        shards = [shard for shard in local_parts(members) if shard.numel()]
        power = torch.zeros((), device=device)
        if shards:
            norm = torch.nn.utils.get_total_norm(shards, norm_type).to(device=device, dtype=torch.float32)
            power = norm if is_max else norm**norm_type
        for group in groups:
            dist.all_reduce(power, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
        powers.append(power)
    stacked = torch.stack(powers)
    return stacked.max() if is_max else stacked.sum() ** (1.0 / norm_type)


@torch.no_grad()
def scale_down(parameters: Parameters, norm: Tensor, max_norm: float) -> None:
    """Scale gradients so that a norm they have together is at most `max_norm`, in place."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for part in local_parts(parameters):
        by_device.setdefault(part.device, []).append(part)
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device))


@torch.no_grad()
def clip_values(parameters: Tensor | Parameters, clip_value: float) -> None:
    """Cut each gradient element to the range from `-clip_value` to `clip_value`, in place."""
    for part in local_parts(as_list(parameters)):
        part.clamp_(-clip_value, clip_value)
