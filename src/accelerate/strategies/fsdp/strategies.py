"""Strategies that shard parameters with FSDP 2 or tensor parallelism.

`Sharded` is also the base class of FSDP 1 (`v1.py`). `strategies/resolve.py` chooses one of the classes.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from accelerate import torch_private
from accelerate.base import DistributedType
from accelerate.checkpointing import (
    LAYOUTS,
    check_optimizer,
    layouts_of,
    live_state,
    place_state,
    refuse_inner_dtensors,
    refuse_own_form,
)
from accelerate.ops import to_full_tensor
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.planning import Layout
from accelerate.state import AcceleratorState
from accelerate.strategies.axes import TensorAxis, shard_layers
from accelerate.strategies.base import (
    Parameters,
    Strategy,
    refuse_join,
    refuse_sharded_model,
    refuse_split_model,
    require_plugin,
)
from accelerate.strategies.bundle import Bundle, Kind, as_list
from accelerate.strategies.dtensors import (
    Groups,
    ParameterRemapper,
    apply_to_shards,
    clip_values,
    distribute_like,
    gradient_sync,
    groups_of,
    keep_gathered,
    named_parameters,
    reduction_in_replicas,
    scale_down,
    send_unsharded,
    units_of,
    whole_tensor,
)
from accelerate.strategies.fsdp.sharding import choose_units, split_by_dtype
from accelerate.strategies.matrix_states import gather_owned_states, local_states, owned_states
from accelerate.strategies.replicas import ALL_RANKS, ReplicaCheck, watch_replicas
from accelerate.strategies.request import Context
from accelerate.strategies.state import Fill, GatheredOptimizer, StrategyState, WholeWeights
from accelerate.strategies.views import shard_unit


class FsdpState(StrategyState):
    """State whose full form is kept on the first rank of each node only."""

    def keep(self, whole: Tensor) -> Tensor:
        """Returns a whole tensor on the CPU of the first rank of each node, and an empty one on others."""
        return whole.detach().cpu().contiguous() if self.keeps_whole_states else whole.new_empty(0)

    @property
    def saves_shards(self) -> bool:  # type: ignore[override]  # the plugin may change
        """True if the plugin selects sharded state dicts."""
        plugin = self.strategy.plugin
        return plugin is not None and saves_shards(plugin)


class DistributedTensorState(FsdpState):
    """State of models and optimizers with DTensors."""

    def optimizer_owners(self, optimizers: Sequence[Any], *, gather: bool) -> list[Any]:
        return [
            WholeOptimizer(optimizer, gather_state(optimizer, self.keeps_whole_states) if gather else None)
            for optimizer in optimizers
        ]

    def gatherable_weights(self, model: nn.Module) -> tuple[dict[str, Any], Callable[[Any], Tensor]] | None:
        return self._inner(model).state_dict(keep_vars=True), self._gather

    def whole_weights(self, model: nn.Module) -> WholeWeights:
        return self._inner(model).state_dict(keep_vars=True), whole_tensor

    @torch.no_grad()
    def _gather(self, value: Any) -> Any:
        """Returns a whole tensor on the CPU of the first rank of each node, and an empty one on others.

        Other values, such as extra states of modules, are returned unchanged.
        """
        if not isinstance(value, Tensor):
            return value
        return self.keep(whole_tensor(value))

    def load_weights(self, model: nn.Module, state: Mapping[str, Any], fill: Fill) -> None:
        inner = self._inner(model)
        targets = inner.state_dict(keep_vars=True)
        fill(inner, {name: distribute_like(value, targets.get(name, value)) for name, value in state.items()})

    @torch.no_grad()
    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        """Returns the full state dict on the CPU of the first rank of each node."""
        source = self._inner(model) if unwrap else model
        state: dict[str, Any] = {}
        gathered: dict[int, Any] = {}  # tied tensors stay tied
        for name, value in source.state_dict(keep_vars=True).items():
            if id(value) not in gathered:
                gathered[id(value)] = self._gather(value)
            state[name] = gathered[id(value)]
        return state if self.keeps_whole_states else {}


class Sharded(Strategy, ABC):
    """Base class of strategies that shard parameters, gradients and optimizer states over ranks.

    Optimizers are changed to step the sharded parameters, also those that are prepared later than the model.
    """

    distributed_type: ClassVar[DistributedType | None] = DistributedType.FSDP
    state_class: ClassVar[type[StrategyState]] = FsdpState
    holds_whole_models = False

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.names: WeakKeyDictionary[Any, list[list[str]]] = WeakKeyDictionary()
        """Optimizer -> the names of the original parameters of each group."""
        self.replicas = context.topology.size
        if self.plugin is not None and context.mixed_precision in ("fp16", "bf16"):
            self.plugin.set_mixed_precision(context.mixed_precision)

    @property
    def plugin(self) -> Any:
        """The plugin of the user, which is read when a model is prepared, or None without FSDP."""
        return getattr(AcceleratorState(), "fsdp_plugin", None)

    @property
    def frees_after_forward(self) -> bool:
        """True if units are freed between forward and backward."""
        return bool(self.plugin.reshard_after_forward)

    def memory_layout(self) -> Layout:
        mesh, plugin = self.context.request.parallelism, self.plugin
        layers = mesh.tp_size or 1 if mesh is not None else 1
        replicas = mesh.dp_replicate_size or 1 if mesh is not None else 1
        stages = 1 if self.axes.pipeline is None else self.axes.pipeline.size
        experts = self.axes.expert.size
        shards = self.context.topology.size // (layers * stages * experts)
        if plugin is None:
            return Layout(shards=shards, tensor_parallel=layers, expert_parallel=experts)
        return Layout(
            "full_shard" if self.frees_after_forward else "shard_grad_op",
            shards // replicas,
            layers,
            "all" if offloads(plugin.cpu_offload) else "none",
            bool(plugin.activation_checkpointing),
            stages=stages,
            microbatches=1 if mesh is None or mesh.pp_handler is None else mesh.pp_handler.microbatches,
            expert_parallel=experts,
        )

    def check_model(self, model: nn.Module) -> None:
        refuse_split_model(model, "and only a model on one device can be sharded")

    def wrap_model(self, model: nn.Module, *, to_device: bool, evaluation: bool) -> nn.Module:
        """Returns the sharded model, or the whole model for evaluation."""
        if evaluation or self.keeps_sharding(model):
            return super().wrap_model(model, to_device=to_device, evaluation=evaluation)
        return self.parallelize(self.convert(model))

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Returns the sharded model, compiled before sharding by block and after it as a whole."""
        host, here = torch.empty(0, device="cpu"), torch.empty(0, device=self.context.device)
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        if not on_meta and not torch_private.may_exchange_data(host, here):
            self.place(model)  # otherwise torch moves each unit by replacing the data of its parameters
        if self.context.request.dynamo.use_regional_compilation:
            return self.split(self.compile(model))
        return self.compile(self.split(model))

    @abstractmethod
    def split(self, model: nn.Module) -> nn.Module:
        """Returns the model with sharded parameters."""

    def follow(
        self,
        model: nn.Module,
        shard: Callable[[], nn.Module],
        list_parameters: Callable[[nn.Module], Mapping[str, Any]],
    ) -> nn.Module:
        """Returns a sharded model whose optimizers step the new parameters.

        Args:
            model: The model before sharding.
            shard: Shards the model and returns it.
            list_parameters: Returns the parameters of the sharded model by their names before sharding.
        """
        remapper = ParameterRemapper(model, self.session.waiting)
        sharded = shard()
        parameters = list_parameters(sharded)
        remapper.rejoin(parameters)
        self.names.update(remapper.names_by_group())
        self.session.replace(remapper.replaced(parameters))
        return sharded

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        refuse_join()

    def clip_grad_norm(self, parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips gradients by their global norm, and returns the norm as a plain tensor."""
        parameters = as_list(parameters)
        norm = self.gradient_norm(parameters, norm_type, find_groups=self.groups_of)
        scale_down(parameters, norm, max_norm)
        return norm

    def groups_of(self, parameter: Tensor) -> Groups:
        """Returns the process groups over which a parameter and its gradient are sharded."""
        return groups_of(parameter)

    def clip_grad_value(self, parameters: Parameters, clip_value: float) -> None:
        clip_values(parameters, clip_value)


class DistributedTensors(Sharded):
    """Base class of strategies whose parameters are DTensors."""

    state_class = DistributedTensorState
    averages_whole: bool = False  # whether gradients of parameters that are not sharded have to be averaged

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, *, to_device: bool) -> AcceleratedOptimizer:
        wrapped = super().wrap_optimizer(optimizer, to_device=to_device)
        is_averaged = self.averages_whole and self.loader_mesh is None
        watch_replicas(wrapped, ReplicaCheck(self, ALL_RANKS if is_averaged else None))
        return wrapped


class Fsdp2(DistributedTensors):
    """Sharding with FSDP 2."""

    gathers_shards = True
    averages_whole = True

    def keeps_sharding(self, model: nn.Module) -> bool:
        return isinstance(torch_private.uncompiled(model), FSDPModule)

    def split(self, model: nn.Module) -> nn.Module:
        """Returns the same model, with DTensors as parameters."""
        context, pipeline = self.context, self.axes.pipeline
        if pipeline is None or not self.is_in_stages(model):
            self._check_unsharded(model)
            shard = partial(context.functions().fsdp2_prepare_model, context.accelerator(), model)
            sharded = self.follow(model, shard, named_parameters)
            if any(p.requires_grad and not isinstance(p, DTensor) for p in sharded.parameters()):
                self.adopt(sharded).send_unsharded()  # FSDP does not average what it ignores
            return sharded
        for stage in pipeline.stages_to_shard(model):
            shard = partial(context.functions().fsdp2_prepare_model, context.accelerator(), stage)
            self.follow(stage, shard, named_parameters)
            for unit in units_of(stage):  # schedules gather units once for all micro-batches
                unit.set_reshard_after_forward(False, recurse=False)
        self.adopt(model).send_unsharded()
        return model

    def _check_unsharded(self, model: nn.Module) -> None:
        """Raises an error for a model that is sharded, except by FSDP 2 or over the "tp" dimension."""
        mesh, size = self.context.mesh, self.context.topology.size
        has_axis = mesh is not None and "tp" in (mesh.mesh_dim_names or ())
        units: list[Any] = list(units_of(model))
        averaged = torch_private.meshes_of_fsdp2(model)
        wrapped = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        others = [
            p
            for p in model.parameters()
            if isinstance(p, DTensor) and (p not in averaged or averaged[p].size() < size)
        ]
        # torch raises an error for a module that is sharded twice
        again = not isinstance(model, FSDPModule) and set(units) & set(
            choose_units(self.plugin, model) if units else []
        )
        if wrapped or again or (others and not has_axis):
            fix = "Pass it before it is sharded; fsdp_plugin says how this run shards it"
            refuse_sharded_model(
                model, f"{fix}, and parallelism_config=ParallelismConfig(tp_size=...) its tp_plan."
            )

    def check(self, bundle: Bundle) -> None:
        """Checks the objects, after optimizers of gathered parameters are changed to step shards."""
        if bundle.new(Kind.OPTIMIZER):
            for model in self.session.prepared.models:
                self._free(model)
        super().check(bundle)

    def unsharded(self, models: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Gathers all units and keeps them gathered inside the block."""
        frees = bool(self.plugin.reshard_after_forward)
        # The outermost unit, which comes first, is never freed after forward.
        gathered = keep_gathered(
            (unit, frees and inside > 0) for model in models for inside, unit in enumerate(units_of(model))
        )
        return self.with_experts(gathered, models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return gradient_sync(model, enabled=False)

    def early_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return reduction_in_replicas(model)


class TensorParallel(DistributedTensors):
    """Tensor parallelism without data parallelism, in which all ranks shard each layer."""

    distributed_type = None  # that of the hardware

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        require_plugin(model, self.context.request)

    def keeps_sharding(self, model: nn.Module) -> bool:
        return bool(units_of(model))

    def split(self, model: nn.Module) -> nn.Module:
        self.place(model)
        send_unsharded(model.parameters())
        return self.follow(model, lambda: self._shard_layers(model), named_parameters)

    def _shard_layers(self, model: nn.Module) -> nn.Module:
        return self.axes.tensor.transform_model(model)


class ReplicatedTensorParallel(TensorParallel):
    """Tensor parallelism with data parallelism, in which FSDP 2 averages gradients over the replicas."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return gradient_sync(model, enabled=False)

    def early_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return reduction_in_replicas(model)

    def _shard_layers(self, model: nn.Module) -> nn.Module:
        """Shards layers, and makes FSDP 2 average gradients, with shards over one rank as replicas."""
        if self.axes.expert.size > 1:
            return self._shard_experts_too(model)
        mesh, size = self.context.mesh, self.axes.tensor.size
        shape = (mesh.size() // size, 1, size)
        mesh = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicate", "shard", "tp"))
        units = split_by_dtype(model, [], set())
        model = TensorAxis(mesh).transform_model(model)
        for unit in (*units, model):
            shard_unit(unit, mesh=mesh["replicate", "shard"], reshard_after_forward=False)
        apply_to_shards(model)
        return model

    def _shard_experts_too(self, model: nn.Module) -> nn.Module:
        """Shards layers and experts, and makes FSDP 2 average gradients over the replicas of each."""
        from accelerate.strategies.axes import FSDP_DIMENSIONS, build_meshes, shard_experts

        meshes = build_meshes(self.context.mesh, shards=())
        experts = self.axes.expert.find_experts(model)
        units = split_by_dtype(model, experts, set())
        shard_layers(model, meshes.others, experts)
        for module in experts:
            shard_experts(module, meshes.experts, meshes.copies, meshes.scale)
        for unit in (*units, model):
            mesh = meshes.experts if unit in experts else meshes.others
            shard_unit(unit, mesh=mesh[FSDP_DIMENSIONS], reshard_after_forward=False)
        apply_to_shards(model)
        return model


class WholeOptimizer(GatheredOptimizer):
    """Optimizer of DTensors in a checkpoint, with full tensors in the format of a single process."""

    takes_layouts = True

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Verifies that a full state can be loaded, and that the layouts of its tensors are known."""
        check_optimizer(self.optimizer, {key: value for key, value in state.items() if key != LAYOUTS})
        self._placements(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the shards of this rank from a full state, without communication."""
        parameters, placements = self._parameters(), self._placements(state)
        owned = owned_states(self.optimizer)
        local = {
            key: local_states(values, parameters[key], owned[key] if owned else None, placements.get(key))
            if isinstance(key, int)
            else values
            for key, values in state["state"].items()
        }
        shards = {key: values for key, values in local.items() if values is not None}
        self.optimizer.load_state_dict({"state": shards, "param_groups": state["param_groups"]})

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _placements(self, state: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Returns the placements of each state of the parameters whose states are not whole."""
        parameters, owned = self._parameters(), owned_states(self.optimizer)
        layouts = state.get(LAYOUTS, {})
        return {
            number: {
                key: place_state(
                    f"{key!r} of parameter {number}",
                    value,
                    parameters[number],
                    layouts.get(number, {}).get(key),
                    live_state(self.optimizer, number, key),
                )
                for key, value in values.items()
            }
            for number, values in state["state"].items()
            if isinstance(number, int) and not (owned and owned[number] is not None)
        }


@torch.no_grad()
def gather_state(optimizer: Any, keep: bool) -> dict[str, Any]:
    """Returns the full state dict of an optimizer on the CPU, without states if `keep` is False.

    Called on all ranks.
    """
    state: dict[str, Any] = optimizer.state_dict()
    refuse_own_form(optimizer, state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    owned = owned_states(optimizer)
    numbered = {key: values for key, values in state["state"].items() if isinstance(key, int)}
    shared = {number: parameters[number] for number in numbered if not (owned and owned[number] is not None)}
    layouts = layouts_of(numbered, shared)
    for key in state["state"].keys() - numbered.keys():
        refuse_inner_dtensors(repr(key), {key: state["state"][key]})

    def gather(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        whole = to_full_tensor(value)
        return whole.cpu() if keep else None

    whole = {
        key: {name: gather(value) for name, value in values.items()} if key in numbered else values
        for key, values in state["state"].items()
    }
    gathered = {**state, "state": whole, **({LAYOUTS: layouts} if layouts else {})}
    if owned:
        return gather_owned_states(optimizer, gathered, keep)
    return gathered if keep else {**state, "state": {}}


def offloads(policy: Any) -> bool:
    """Returns whether a policy of FSDP 1 or 2 offloads parameters to the CPU."""
    return isinstance(policy, CPUOffloadPolicy) or bool(getattr(policy, "offload_params", False))


def saves_shards(plugin: Any) -> bool:
    """Returns whether a plugin selects sharded state dicts."""
    return plugin.state_dict_type.name in ("SHARDED_STATE_DICT", "LOCAL_STATE_DICT")
