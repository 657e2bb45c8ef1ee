"""Shard a model with FSDP 2: units, recomputation, number formats, offloading, loading from rank 0."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn

from accelerate import torch_private
from accelerate.base import listed
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.plugins import bind_policy, find_units, read_policy
from accelerate.strategies.fsdp.loading import MainWeights, fsdp2_load_full_state_dict
from accelerate.strategies.fsdp.parameters import (
    check_ignored,
    get_parameters_from_modules,
    named_parameters,
)
from accelerate.strategies.fsdp.units import choose_units, kept_in_float32, split_by_dtype

# torch.distributed.fsdp takes a second to import, and names of this file are public: so inside functions.
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=nn.Module)

logger = get_logger(__name__)


class ShardingRun(Protocol):
    """What sharding needs to know of a run; `Accelerator` is one."""

    @property
    def state(self) -> Any: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def mixed_precision(self) -> str: ...
    @property
    def torch_device_mesh(self) -> Any: ...


def fsdp2_prepare_model(accelerator: ShardingRun, model: Model) -> Model:
    """Shard a model in place with FSDP 2; called on all ranks.

    Args:
        accelerator: the run; its `state.fsdp_plugin` says how.
        model: a module; one that is sharded already is returned as it is.

    Returns:
        The same module, with distributed tensors as parameters.

    Raises:
        PreparationError: the model cannot be sharded.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    from accelerate.strategies.axes import TensorAxis

    if issubclass(type(model), FSDPModule):  # the class that torch gave it
        return model
    plugin = accelerator.state.fsdp_plugin
    if accelerator.mixed_precision != "no":
        keep_master_weights(model)
    check_ignored(plugin.ignored_modules, model)
    # The ignored are moved before anything goes to the meta device; the rest follows unit by unit.
    streams = plugin.cpu_ram_efficient_loading
    ignored = get_parameters_from_modules(
        plugin.ignored_modules, model, None if streams else accelerator.device
    )
    warn_about_ignored(model, ignored)
    chosen = choose_units(plugin, model)
    exact = kept_in_float32(model, chosen) if computes_low(plugin) else []
    units = split_by_dtype(model, [*exact, *chosen], ignored)
    kept = [name for name, parameter in named_parameters(model).items() if parameter in ignored]
    weights = MainWeights(model) if streams else None
    TensorAxis(accelerator.torch_device_mesh).transform([model])
    if plugin.activation_checkpointing:
        model = fsdp2_apply_ac(accelerator, model)
    parameters = named_parameters(model)
    _shard(accelerator, model, units, {parameters[name] for name in kept}, set(exact))
    if weights is not None:
        fsdp2_load_full_state_dict(
            accelerator, model, weights.state, isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        )
        weights.restore_buffers(accelerator.device)
    return model


def _shard(
    accelerator: ShardingRun,
    model: nn.Module,
    units: Iterable[nn.Module],
    ignored: set[nn.Parameter],
    exact: set[nn.Module],
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plugin = accelerator.state.fsdp_plugin
    mesh = sharding_mesh(accelerator)
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    shared: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": offload_policy(plugin.cpu_offload, mesh),
        "ignored_params": ignored or None,
    }
    outside = outermost_wrappers(model)
    for unit in units:
        fully_shard(
            outside.get(unit, unit),
            mp_policy=in_float32(policy) if unit in exact else policy,
            reshard_after_forward=plugin.reshard_after_forward,
            **shared,
        )
    if accelerator.mixed_precision != "no":  # models return float32 under every mixed precision
        policy = dataclasses.replace(policy, output_dtype=torch.float32)
    # Freeing the outermost unit after forward is of no use: backward begins with it. None lets torch see.
    reshard = None if plugin.reshard_after_forward else False
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard, **shared)


def computes_low(plugin: Any) -> bool:
    """Whether sharded parameters compute in a lower precision than float32."""
    policy = plugin.mixed_precision_policy
    return policy is not None and policy.param_dtype not in (None, torch.float32)


def in_float32(policy: Any) -> Any:
    """Return the policy of a unit that computes in float32 among others that compute by another one."""
    return dataclasses.replace(
        policy, param_dtype=torch.float32, output_dtype=policy.param_dtype, cast_forward_inputs=True
    )


def sharding_mesh(accelerator: ShardingRun) -> DeviceMesh:
    """Return the mesh over which parameters are sharded (its last axis) and replicated (the one before)."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = accelerator.torch_device_mesh
    if mesh is None:
        size = accelerator.state.num_processes
        return init_device_mesh(accelerator.device.type, (size,), mesh_dim_names=("dp_shard",))
    with warnings.catch_warnings():
        # torch has no other way yet to a mesh of one axis and the union of two
        warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
        return mesh[tuple(accelerator.state.parallelism_config.fsdp_dim_names)]  # type: ignore[no-any-return]


def offload_policy(policy: Any, mesh: DeviceMesh) -> Any:
    """Return an offload policy that works on the devices of a mesh: CPUs have no memory to pin for."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    if isinstance(policy, CPUOffloadPolicy) and of_device(torch.device(mesh.device_type)).is_host:
        return CPUOffloadPolicy(pin_memory=False)
    return policy


def keep_master_weights(model: nn.Module) -> None:
    """Turn trainable parameters of low precision to float32, in place: updates would be lost in them."""
    low = {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16)
    }
    for parameter in low.values():
        parameter.data = parameter.data.float()
    if low:
        logger.warning(
            f"{len(low)} trainable parameters of {type(model).__name__} are kept in float32 and computed in "
            f"the number format of the run: {listed(list(low))}."
        )


def warn_about_ignored(model: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Say which ignored parameters train on each rank for itself."""
    names = [name for name, p in model.named_parameters() if p.requires_grad and p in ignored]
    if names:
        logger.warning(
            f"{len(names)} parameters of {type(model).__name__} train and are in ignored_modules, so nobody "
            f"averages their gradients over ranks: {listed(names)}. Freeze them, or do not ignore them."
        )


def fsdp2_apply_ac(accelerator: ShardingRun, model: Model) -> Model:
    """Let the units of a model recompute their activations in backward, in place.

    Args:
        accelerator: the run; its `state.fsdp_plugin` says which modules are units.
        model: not sharded yet.

    Returns:
        The same module.
    """
    plugin = accelerator.state.fsdp_plugin
    units = choose_units(plugin, model)
    if not units:
        logger.warning(
            f"activation_checkpointing has no effect on {type(model).__name__}: it is one unit. Set "
            "auto_wrap_policy, so that there are units to recompute."
        )
    # A CPU's activations are where offloading would bring them.
    offload = plugin.activation_checkpointing_offload and not of_device(accelerator.device).is_host
    recompute(model, units, offload)
    return model


def recompute(model: nn.Module, units: Iterable[nn.Module], offload: bool = False) -> None:
    """Wrap modules inside a model, wherever they stand, so that they recompute in backward."""
    torch_wrappers = torch_private.checkpoint_wrapper
    wrapped: dict[nn.Module, nn.Module] = {}
    wrap: Callable[[nn.Module], nn.Module] = partial(
        torch_wrappers.checkpoint_wrapper, checkpoint_impl=torch_wrappers.CheckpointImpl.NO_REENTRANT
    )
    for unit in units:
        wrapped[unit] = torch_wrappers.offload_wrapper(wrap(unit)) if offload else wrap(unit)
    for module in list(model.modules()):
        if isinstance(module, torch_wrappers.ActivationWrapper):
            continue
        for name, child in list(module._modules.items()):  # named_children() leaves out second places
            if child in wrapped:
                setattr(module, name, wrapped[child])


def outermost_wrappers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return for each module that recomputes its outermost wrapper."""

    found: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        inner = module
        while isinstance(inner, torch_private.checkpoint_wrapper.ActivationWrapper):
            inner = torch_private.recomputed_module(inner)
        if inner is not module:
            found.setdefault(inner, module)
    return found


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """Return what tells whether a module of a model is a unit; None when there are no units.

    Args:
        fsdp2_plugin: a `FullyShardedDataParallelPlugin`.
        model: not wrapped yet.
    """
    policy = bind_policy(
        read_policy(fsdp2_plugin.auto_wrap_policy),
        model,
        fsdp2_plugin.transformer_cls_names_to_wrap,
        fsdp2_plugin.min_num_params,
    )
    if policy is None:
        return None
    units = set(find_units(model, policy))
    return lambda module: module in units
