"""Strategies that shard parameters with FSDP 2 or tensor parallelism.

`Sharded` is also the base class of FSDP 1 (`v1.py`). `strategies/resolve.py` chooses one of the classes.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from accelerate import torch_private
from accelerate.base import DistributedType, PreparationError, StateError
from accelerate.devices import of_device
from accelerate.ops import is_dtensor
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallelism_config import ParallelismConfig
from accelerate.planning import Layout
from accelerate.state import AcceleratorState
from accelerate.strategies.axes import (
    FSDP_DIMENSIONS,
    build_meshes,
    list_experts,
    shard_experts,
    shard_layers,
)
from accelerate.strategies.base import (
    Strategy,
    keep_none,
    refuse_join,
    refuse_sharded_model,
    refuse_split_model,
)
from accelerate.strategies.dtensor_state import DistributedTensorState
from accelerate.strategies.dtensors import (
    NO_SECOND_DERIVATIVES,
    ONE_BACKWARD,
    AssignedData,
    ParameterRemapper,
    UnitsFreedBeforeSteps,
    apply_to_shards,
    explain_step_errors,
    free_unit,
    keep_gathered,
    named_parameters,
    refuse_second_derivatives,
    send_unsharded,
    units_of,
)
from accelerate.strategies.fsdp.gradient_hooks import (
    ERRORS,
    GradientHookCheck,
    hooked_parameters,
    refuse_lost_hooks,
)
from accelerate.strategies.fsdp.sharding import choose_units, split_by_dtype, unshardable
from accelerate.strategies.layer import divided
from accelerate.strategies.replicas import ALL_RANKS, ReplicaCheck, watch_replicas
from accelerate.strategies.request import Context, require_plugin
from accelerate.strategies.session import Bundle, Kind
from accelerate.strategies.state import StrategyState
from accelerate.strategies.views import shard_unit
from accelerate.weights import move_module


def is_unit(model: nn.Module) -> bool:
    """Returns whether a model itself is a unit of FSDP 2."""
    return isinstance(torch_private.uncompiled(model), FSDPModule)


def has_units(model: nn.Module) -> bool:
    return bool(units_of(model))


class FsdpState(StrategyState):
    """State that is saved in shards if the plugin selects it."""

    @property
    def saves_shards(self) -> bool:  # type: ignore[override]  # the plugin may change
        """True if the plugin selects sharded state dicts."""
        plugin = self.strategy.plugin
        return plugin is not None and saves_shards(plugin)


class FsdpTensorState(FsdpState, DistributedTensorState):
    """State of models and optimizers with DTensors, in shards or whole."""


class Sharded(Strategy, ABC):
    """Base class of strategies that shard parameters, gradients and optimizer states over ranks.

    Optimizers are changed to step the sharded parameters, also those that are prepared later than the model.
    """

    distributed_type: ClassVar[DistributedType | None] = DistributedType.FSDP
    state_class: ClassVar[type[StrategyState]] = FsdpState
    holds_whole_models = False
    shards_models = True
    keeps_sharding = staticmethod(keep_none)

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
        size, mesh, plugin = self.context.topology.size, self.context.request.parallelism, self.plugin
        if plugin is None:
            return divided(Layout(shards=size), self.layers)
        is_host = of_device(self.context.device).is_host
        layout = Layout(
            "full_shard" if self.frees_after_forward else "shard_grad_op",
            size // (1 if mesh is None else mesh.dp_replicate_size or 1),
            offload="all" if offloads(plugin.cpu_offload) else "none",
            checkpointing=bool(plugin.activation_checkpointing),
            microbatches=1,
            offload_activations=bool(plugin.activation_checkpointing_offload and not is_host),
        )
        return divided(layout, self.layers)

    def check(self, bundle: Bundle) -> None:
        for other in bundle.of(Kind.OTHER):
            if callable(getattr(other, "step", None)) and callable(getattr(other, "zero_grad", None)):
                raise PreparationError(
                    f"{type(other).__name__} has `step` and `zero_grad` like an optimizer, but is not a "
                    "torch optimizer, so sharded parameters cannot replace those that it steps. Derive it "
                    "from torch.optim.Optimizer."
                )
        super().check(bundle)

    def check_model(self, model: nn.Module) -> None:
        refuse_split_model(model, "and only a model on one device can be sharded")

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Returns the sharded model, compiled before sharding by block and after it as a whole."""
        host, here = torch.empty(0, device="cpu"), torch.empty(0, device=self.context.device)
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        if not on_meta and not torch_private.may_exchange_data(host, here):
            move = partial(move_module, device=self.context.device)
            self.session.change(
                model, move
            )  # otherwise torch moves each unit by replacing the data of its parameters
        if self.context.request.dynamo.use_regional_compilation:
            return self.split(self.compile(model))
        return self.compile(self.split(model))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        try:
            super().backward(loss, **kwargs)
        except RuntimeError as error:
            message = next((text for sign, text in ERRORS.items() if sign in str(error)), None)
            if message is None:
                raise
            raise StateError(message) from error

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
            list_parameters: Returns the parameters of the sharded model by their names before sharding.
        """
        remapper, hooked = ParameterRemapper(model, self.session.waiting), hooked_parameters(model)
        sharded = shard()
        parameters = list_parameters(sharded)
        refuse_lost_hooks(hooked, remapper.replaced(parameters))
        remapper.rejoin(parameters)
        self.names.update(remapper.names_by_group())
        self.session.replace(remapper.replaced(parameters))
        return sharded

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        refuse_join()


class DistributedTensors(Sharded):
    """Base class of strategies whose parameters are DTensors."""

    state_class = FsdpTensorState
    averages_whole: bool = False  # whether gradients of parameters that are not sharded have to be averaged

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, *, to_device: bool) -> AcceleratedOptimizer:
        wrapped = super().wrap_optimizer(optimizer, to_device=to_device)
        is_averaged = self.averages_whole and self.loader_mesh is None
        watch_replicas(wrapped, ReplicaCheck(self, ALL_RANKS if is_averaged else None))
        freed = UnitsFreedBeforeSteps(self.session.prepared.models, units_of, free_unit)
        wrapped.observers = (*wrapped.observers, freed)
        wrapped.step_wrappers = (explain_step_errors(optimizer), *wrapped.step_wrappers)
        return wrapped

    def follow(
        self,
        model: nn.Module,
        shard: Callable[[], nn.Module],
        list_parameters: Callable[[nn.Module], Mapping[str, Any]],
    ) -> nn.Module:
        sharded = super().follow(model, shard, list_parameters)
        AssignedData(sharded)
        return sharded


class Fsdp2(DistributedTensors):
    """Sharding with FSDP 2."""

    gathers_shards = True
    averages_whole = True
    keeps_sharding = staticmethod(is_unit)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, *, to_device: bool) -> AcceleratedOptimizer:
        wrapped = super().wrap_optimizer(optimizer, to_device=to_device)
        wrapped.observers = (*wrapped.observers, GradientHookCheck(is_dtensor))
        return wrapped

    def split(self, model: nn.Module) -> nn.Module:
        """Returns the same model, with DTensors as parameters."""
        parts = next(filter(None, (layer.parts_to_shard(model) for layer in self.layers)), None)
        if parts is None:
            self._check_unsharded(model)
            model.register_forward_hook(partial(refuse_second_derivatives, ONE_BACKWARD))
        for part in [model] if parts is None else parts:
            prepare = self.context.functions().fsdp2_prepare_model
            self.follow(part, partial(prepare, self.context.accelerator(), part), named_parameters)
            for unit in (
                [] if parts is None else units_of(part)
            ):  # schedules gather units once for all micro-batches
                unit.set_reshard_after_forward(False, recurse=False)
        if parts is not None:
            torch_private.set_units_around_layers(model, parts)
        for layer in self.layers:
            layer.model_sharded(model)
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
            fix = "Pass it before it is sharded; fsdp_plugin configures how this run shards it"
            refuse_sharded_model(
                model, f"{fix}, and parallelism_config=ParallelismConfig(tp_size=...) its tp_plan."
            )

    @contextmanager
    def unsharded(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Gathers all units and keeps them gathered inside the block."""
        frees = bool(self.plugin.reshard_after_forward)
        # The outermost unit, which comes first, is never freed after forward.
        units = (
            (unit, frees and inside > 0) for model in models for inside, unit in enumerate(units_of(model))
        )
        with keep_gathered(units), super().unsharded(models):
            yield


class TensorParallel(DistributedTensors):
    """Tensor parallelism without data parallelism, in which all ranks shard each layer."""

    distributed_type = None  # that of the hardware
    keeps_sharding = staticmethod(has_units)

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        require_plugin(model, self.context.request)

    def split(self, model: nn.Module) -> nn.Module:
        self.session.change(model, partial(move_module, device=self.context.device))
        send_unsharded(model.parameters())
        model.register_forward_hook(partial(refuse_second_derivatives, NO_SECOND_DERIVATIVES))
        return self.follow(model, partial(self._shard_layers, model), named_parameters)

    def _shard_layers(self, model: nn.Module) -> nn.Module:
        shard_layers(model, self.context.mesh)
        return model


class ReplicatedTensorParallel(TensorParallel):
    """Tensor parallelism with data parallelism, in which FSDP 2 averages gradients over the replicas."""

    def split(self, model: nn.Module) -> nn.Module:
        sharded = super().split(model)
        for layer in self.layers:
            layer.model_sharded(sharded)
        return sharded

    def _shard_layers(self, model: nn.Module) -> nn.Module:
        """Shards layers, and makes FSDP 2 average gradients, with shards over one rank as replicas."""
        parallelism, mesh = self.context.request.parallelism, self.context.mesh
        assert parallelism is not None
        if parallelism.ep_enabled:
            return self._shard_experts_too(model, parallelism)
        size = mesh["tp"].size()
        shape = (mesh.size() // size, 1, size)
        mesh = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicate", "shard", "tp"))
        units = split_by_dtype(model, [], set())
        shard_layers(model, mesh)
        options = {"reshard_after_forward": False, "ignored_params": unshardable(model)}
        for unit in (*units, model):
            shard_unit(unit, mesh=mesh["replicate", "shard"], **options)
        apply_to_shards(model)
        return model

    def _shard_experts_too(self, model: nn.Module, parallelism: ParallelismConfig) -> nn.Module:
        """Shards layers and experts, and makes FSDP 2 average gradients over the replicas of each."""
        meshes = build_meshes(self.context.mesh, shards=())
        handler = parallelism.ep_handler
        experts = list_experts(model, handler.is_experts if handler is not None else None)
        units = split_by_dtype(model, experts, set())
        shard_layers(model, meshes.others, experts)
        for module in experts:
            shard_experts(module, meshes.experts, meshes.copies, meshes.scale)
        options = {"reshard_after_forward": False, "ignored_params": unshardable(model)}
        for unit in (*units, model):
            mesh = meshes.experts if unit in experts else meshes.others
            shard_unit(unit, mesh=mesh[FSDP_DIMENSIONS], **options)
        apply_to_shards(model)
        return model


def offloads(policy: object) -> bool:
    """Returns whether a policy of FSDP 1 or 2 offloads parameters to the CPU."""
    return isinstance(policy, CPUOffloadPolicy) or bool(getattr(policy, "offload_params", False))


def saves_shards(plugin: Any) -> bool:
    """Returns whether a plugin selects sharded state dicts."""
    return plugin.state_dict_type.name in ("SHARDED_STATE_DICT", "LOCAL_STATE_DICT")
