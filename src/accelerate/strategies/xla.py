"""Devices behind torch_xla: replicas on each, or parameters and batches sharded over them.

FSDP version 2 shards tensors in one process (SPMD), version 1 uses torch_xla's wrapper.

Source: https://docs.pytorch.org/xla/master/learn/api-guide.html, .../perf/spmd_basic.html, .../perf/fsdp.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, ClassVar, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn

from accelerate.base import ConfigurationError, DistributedType
from accelerate.devices import mark_step, of_device, row_axes, share_rows, use_mesh
from accelerate.nested import iterate_tensors
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState
from accelerate.strategies.base import Parameters, Strategy, refuse_split_model
from accelerate.strategies.bundle import as_list
from accelerate.strategies.request import Context
from accelerate.weights import addressable


class GradientAverage:
    """Averages gradients over `size` replicas, and records which of this step are averaged already."""

    def __init__(self, size: int, gradients: GradientState) -> None:
        self.size = size
        self.gradients = gradients
        self._averaged: set[int] = set()

    def __call__(self, parameters: Parameters) -> None:
        """Average gradients in place, each once for each step; called on all ranks."""
        if self.size == 1:
            return
        new = [p for p in parameters if p.grad is not None and id(p) not in self._averaged]
        if new:
            xm = import_module("torch_xla.core.xla_model")
            xm.all_reduce("sum", [p.grad for p in new], scale=1.0 / self.size)
            self._averaged.update(map(id, new))
        self.gradients.is_xla_gradients_synced = True

    def clear(self, parameters: Parameters) -> None:
        """Expect new gradients of these parameters."""
        self._averaged.difference_update(map(id, parameters))


class XlaOptimizer(AcceleratedOptimizer):
    """Averages gradients before it steps, and starts the device's computation where no loader does."""

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
        """Update the parameters, with gradients averaged after each call of a closure; not while they
        accumulate."""
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


class XlaReplicas(Strategy):
    """Each process trains a replica on its share of the data; gradients are averaged before a step."""

    distributed_type: ClassVar[DistributedType | None] = DistributedType.XLA

    averages_itself: ClassVar[bool] = False
    """Whether the backward pass gives averaged gradients already."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.replicas = context.topology.size
        self.average = GradientAverage(1 if self.averages_itself else self.replicas, context.gradients)

    def check_model(self, model: nn.Module) -> None:
        refuse_split_model(model, "and XLA devices take whole models")

    def follow(self, parameters: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Let optimizers step the parameters that have taken the places of others."""
        self.session.replace(parameters)
        self.session.remap([*self.session.waiting, *self.session.prepared.optimizers])

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *, to_device: bool) -> AcceleratedOptimizer:
        """Return `optimizer` in a wrapper that averages gradients before it steps."""
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

    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        """Return the whole state of `model`, on the CPU: XLA's tensors have no memory to write from."""
        return dict(addressable(super().state_dict(model, unwrap=unwrap)))


def refuse_unsupported(plugin: Any) -> None:
    """Refuse what FSDP does on GPUs only."""
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
    """Return the plugin's policy with torch_xla's arguments; None where the whole model is one unit."""
    plugin.set_auto_wrap_policy(model)
    policy = plugin.auto_wrap_policy
    if policy is None:
        return None
    return lambda module, recurse, unwrapped_params, **_: bool(
        policy(module=module, recurse=recurse, nonwrapped_numel=unwrapped_params)
    )


def units_on_xla(model: nn.Module, policy: Callable[..., bool] | None) -> list[nn.Module]:
    """Return the units of a model, inner ones first, itself last."""
    if policy is None:
        return [model]
    units = [model]
    for module in model.modules():
        size = sum(parameter.numel() for parameter in module.parameters())
        if module is not model and policy(module=module, recurse=False, unwrapped_params=size):
            units.insert(0, module)
    return units


class XlaFullyShard(XlaReplicas):
    """One process drives all devices of its machine: parameters and batches are sharded over them, and XLA's
    compiler decides when they are gathered. The model stays the user's own object, with the names it has."""

    def __init__(self, context: Context) -> None:
        refuse_unsupported(context.request.fsdp)
        self.mesh = use_mesh()
        super().__init__(context)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the very model, with its parameters sharded over all devices."""
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
            unit.register_forward_hook(self._share_output)
        return self.compile(model)

    def _share_output(self, unit: nn.Module, inputs: Any, output: Any) -> None:
        """Let each device compute its rows."""
        for tensor in iterate_tensors(output):
            if of_device(tensor.device).own_runtime:
                share_rows(tensor, self.mesh)


class XlaFullySharded(XlaReplicas):
    """Each process keeps a shard of every parameter, by torch_xla's `XlaFullyShardedDataParallel`."""

    averages_itself: ClassVar[bool] = True
    holds_whole_models = False

    def __init__(self, context: Context) -> None:
        refuse_unsupported(context.request.fsdp)
        super().__init__(context)
        self._wrapped: WeakSet[Any] = WeakSet()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the wrapped model; optimizers step its shards."""
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
        self.follow((old, shards[name]) for name, old in before.items() if name in shards)
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

    def _refuse_to_save(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(
            "With fsdp_version=1 on XLA devices each process has parts of the model only, which this version "
            "neither saves nor loads. Set fsdp_version=2, whose states are whole; or save each process's "
            "`model.state_dict()` with `model.get_shard_metadata()` by torch_xla."
        )

    state_dict = load_weights = optimizer_owners = _refuse_to_save


def _shards_by_name(wrapped: nn.Module, kind: type) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over the shards of parameters by the names that these had in the user's module."""
    for path, module in wrapped.named_modules():
        if isinstance(module, kind):
            for shard in module.sharded_params:  # type: ignore[attr-defined]  # of torch_xla's wrapper
                names = f"{path}.{shard._orig_name}".split(".")
                wrappers = ("", "_fsdp_wrapped_module", "_fpw_module")
                yield ".".join(name for name in names if name not in wrappers), shard
