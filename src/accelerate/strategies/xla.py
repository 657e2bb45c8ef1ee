"""Strategies for devices behind torch_xla, with replicas, or with sharded parameters.

FSDP version 2 shards tensors in one process (SPMD), and version 1 uses the wrapper of torch_xla. `open_spmd`
is called before a run opens its devices.

Source: https://docs.pytorch.org/xla/master/learn/api-guide.html, .../perf/spmd_basic.html, .../perf/fsdp.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, ClassVar, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn

from accelerate.base import ConfigurationError, DistributedType
from accelerate.devices import mark_step, of_device, row_axes, share_rows, use_mesh, xla
from accelerate.nested import iterate_tensors
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.plugins import version_of
from accelerate.state import GradientState, PartialState
from accelerate.strategies.base import Parameters, Strategy, as_list, keep_none, refuse_split_model
from accelerate.strategies.request import Context, RunRequest
from accelerate.strategies.state import StrategyState
from accelerate.weights import addressable


class GradientAverage:
    """Averages gradients over replicas, and records the gradients of a step that are averaged already."""

    def __init__(self, size: int, gradients: GradientState) -> None:
        self.size = size
        self.gradients = gradients
        self._averaged: set[int] = set()

    def __call__(self, parameters: Parameters) -> None:
        """Averages gradients in place, each once in a step.

        Called on all ranks.
        """
        if self.size == 1:
            return
        new = [p for p in parameters if p.grad is not None and id(p) not in self._averaged]
        if new:
            xm = import_module("torch_xla.core.xla_model")
            xm.all_reduce("sum", [p.grad for p in new], scale=1.0 / self.size)
            self._averaged.update(map(id, new))
        self.gradients.is_xla_gradients_synced = True

    def clear(self, parameters: Parameters) -> None:
        """Ends the step of parameters, whose next gradients are not averaged yet."""
        self._averaged.difference_update(map(id, parameters))
        self.gradients.is_xla_gradients_synced = False


class XlaOptimizer(AcceleratedOptimizer):
    """Optimizer that averages gradients before it steps, and marks the step outside of loaders."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        average: GradientAverage,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(optimizer, device_placement, scaler)
        self.average = average

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages gradients, also after each call of a closure, and updates the parameters.

        It does nothing while gradients accumulate.
        """
        if not self.gradient_state.sync_gradients:
            return None
        if closure is None:
            self.average(self.parameters())
            result = super().step()
        else:

            def averaging() -> Any:
                loss = closure()
                self.average.clear(self.parameters())
                self.average(self.parameters())
                return loss

            result = super().step(averaging)
        self.average.clear(self.parameters())
        if not self.gradient_state.in_dataloader:  # a loader of torch_xla marks each batch
            mark_step()
        return result


class XlaState(StrategyState):
    """State of models on XLA devices."""

    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        """Returns the whole state on the CPU, because XLA tensors have no memory that can be written."""
        return dict(addressable(super().state_dict(model, unwrap=unwrap)))


class XlaShardedState(StrategyState):
    """State of models in the wrapper of torch_xla, which is not saved."""

    def _refuse_to_save(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(
            "With fsdp_version=1 on XLA devices each process has shards of the model, which this version "
            "neither saves nor loads. Set fsdp_version=2, whose states are whole; or save each process's "
            "`model.state_dict()` with `model.get_shard_metadata()` by torch_xla."
        )

    state_dict = whole_weights = load_weights = optimizer_owners = _refuse_to_save


class XlaReplicas(Strategy):
    """Strategy in which each process trains a replica, and gradients are averaged before a step."""

    distributed_type: ClassVar[DistributedType | None] = DistributedType.XLA
    has_plain_weights = False
    keeps_sharding = staticmethod(keep_none)
    state_class: ClassVar[type[StrategyState]] = XlaState

    averages_itself: ClassVar[bool] = False
    """Whether the backward pass averages gradients."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.replicas = context.topology.size
        self.average = GradientAverage(1 if self.averages_itself else self.replicas, context.gradients)

    def check_model(self, model: nn.Module) -> None:
        refuse_split_model(model, "and XLA devices take whole models")

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, *, to_device: bool) -> AcceleratedOptimizer:
        """Returns the optimizer in a wrapper that averages gradients before it steps."""
        self.session.remap([optimizer])
        return XlaOptimizer(optimizer, self.average, to_device, self.precision.scaler)

    def clip_grad_norm(self, parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return super().clip_grad_norm(self._averaged(parameters), max_norm, norm_type)

    def clip_grad_value(self, parameters: Parameters, clip_value: float) -> None:
        super().clip_grad_value(self._averaged(parameters), clip_value)

    def _averaged(self, parameters: Parameters) -> list[Tensor]:
        listed = as_list(parameters)
        if self.context.gradients.sync_gradients:
            self.average(listed)
        return listed


def open_spmd(request: RunRequest) -> None:
    """Makes this process drive all XLA devices of its machine, if the request shards parameters over them.

    Called before the process opens a device.
    """
    if request.fsdp is None or not version_of(request.fsdp).is_spmd_on_xla or xla.is_shared():
        return
    if PartialState._shared_state:
        raise ConfigurationError(
            "fsdp_plugin with fsdp_version=2 lets one process drive all XLA devices, and this process has "
            "opened one of them alone. Make the Accelerator before anything else that uses the device."
        )
    use_mesh()


def refuse_unsupported(plugin: Any) -> None:
    """Raises an error for settings of FSDP that XLA devices do not support."""
    offload = plugin.cpu_offload  # torch's object of either version
    offloads = type(offload).__name__ == "CPUOffloadPolicy" or bool(getattr(offload, "offload_params", False))
    names = ("cpu_ram_efficient_loading", "activation_checkpointing_offload")
    unsupported = ["cpu_offload"] * offloads + [name for name in names if getattr(plugin, name)]
    if plugin.ignored_modules is not None:
        unsupported.append("ignored_modules")
    if unsupported:
        raise ConfigurationError(
            f"fsdp_plugin has {', '.join(unsupported)}, which FSDP cannot do on XLA devices. Leave it out "
            "there."
        )


def policy_of(plugin: Any, model: nn.Module) -> Callable[..., bool] | None:
    """Returns the policy of a plugin with the arguments of torch_xla, or None if the model is one unit."""
    plugin.set_auto_wrap_policy(model)
    policy = plugin.auto_wrap_policy
    if policy is None:
        return None
    return lambda module, recurse, unwrapped_params, **_: bool(
        policy(module=module, recurse=recurse, nonwrapped_numel=unwrapped_params)
    )


def units_on_xla(model: nn.Module, policy: Callable[..., bool] | None) -> list[nn.Module]:
    """Returns the units of a model, inner units first and the model last."""
    if policy is None:
        return [model]
    units = [model]
    for module in model.modules():
        size = sum(parameter.numel() for parameter in module.parameters())
        if module is not model and policy(module=module, recurse=False, unwrapped_params=size):
            units.insert(0, module)
    return units


class XlaFullyShard(XlaReplicas):
    """Strategy in which one process drives all devices of its machine, with parameters and batches sharded.

    The compiler of XLA decides when parameters are gathered. The model stays the object of the user.
    """

    def __init__(self, context: Context) -> None:
        refuse_unsupported(context.request.fsdp)
        self.mesh = use_mesh()
        super().__init__(context)

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Returns the model itself, with its parameters sharded over all devices."""
        plugin = self.context.request.fsdp
        sharding = import_module("torch_xla.distributed.spmd").xla_sharding
        units = units_on_xla(model, policy_of(plugin, model))
        if plugin.activation_checkpointing:  # type: ignore[union-attr]  # chosen because of it
            for unit in units[:-1]:
                import_module("torch_xla.distributed.fsdp").checkpoint_module(unit)
        for parameter in model.parameters():
            if parameter.ndim:
                longest = max(range(parameter.ndim), key=lambda dim: parameter.shape[dim])
                spec = tuple(row_axes if dim == longest else None for dim in range(parameter.ndim))
                sharding.mark_sharding(parameter, self.mesh, spec)
        for unit in units:
            sharding.apply_backward_optimization_barrier(unit)
            unit.register_forward_hook(self._shard_output)
        return self.compile(model)

    def _shard_output(self, unit: nn.Module, inputs: object, output: object) -> None:
        """Shards the rows of outputs over the devices."""
        for tensor in iterate_tensors(output):
            if of_device(tensor.device).own_runtime:
                share_rows(tensor, self.mesh)


class XlaFullySharded(XlaReplicas):
    """Strategy in which each process has a shard of each parameter, by `XlaFullyShardedDataParallel`."""

    averages_itself: ClassVar[bool] = True
    state_class: ClassVar[type[StrategyState]] = XlaShardedState
    holds_whole_models = False

    def __init__(self, context: Context) -> None:
        refuse_unsupported(context.request.fsdp)
        super().__init__(context)
        self._wrapped: WeakSet[Any] = WeakSet()

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Returns the wrapped model.

        Optimizers step its shards.
        """
        plugin: Any = self.context.request.fsdp
        package = import_module("torch_xla.distributed.fsdp")
        kind = package.XlaFullyShardedDataParallel
        before = dict(model.named_parameters())
        arguments: dict[str, Any] = {
            "reshard_after_forward": plugin.sharding_strategy.name in ("FULL_SHARD", "HYBRID_SHARD"),
            "compute_dtype": torch.bfloat16 if self.context.mixed_precision == "bf16" else None,
            "auto_wrap_policy": policy_of(plugin, model),
        }
        if plugin.activation_checkpointing:
            arguments["auto_wrapper_callable"] = lambda unit, *args, **kwargs: kind(
                package.checkpoint_module(unit), *args, **kwargs
            )
        wrapped: nn.Module = kind(model, **arguments)
        shards = dict(_shards_by_name(wrapped, kind))
        self.session.replace((old, shards[name]) for name, old in before.items() if name in shards)
        self.session.remap([*self.session.waiting, *self.session.prepared.optimizers])
        self._wrapped.add(wrapped)
        return self.compile(wrapped)

    def clip_grad_norm(self, parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> Tensor:
        listed = as_list(parameters)
        clipped = set(map(id, listed))
        for model in self._wrapped:
            if clipped & set(map(id, model.parameters())):
                norm: Tensor = model.clip_grad_norm_(max_norm, norm_type)
                return norm
        return super().clip_grad_norm(listed, max_norm, norm_type)


def _shards_by_name(wrapped: nn.Module, kind: type) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the shards of parameters with the names that they had in the module of the user."""
    for path, module in wrapped.named_modules():
        if isinstance(module, kind):
            for shard in module.sharded_params:  # type: ignore[attr-defined]  # of torch_xla's wrapper
                names = f"{path}.{shard._orig_name}".split(".")
                wrappers = ("", "_fsdp_wrapped_module", "_fpw_module")
                yield ".".join(name for name in names if name not in wrappers), shard
