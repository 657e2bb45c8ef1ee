"""Shard a model: which modules become units, recomputation, and FSDP 2 with loading from rank 0."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accelerate import torch_private
from accelerate.base import PreparationError, listed
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.plugins import bind_policy, find_units, read_policy
from accelerate.strategies.fsdp.parameters import (
    MainWeights,
    check_ignored,
    fsdp2_load_full_state_dict,
    get_parameters_from_modules,
    named_parameters,
)

# torch.distributed.fsdp takes a second to import, and names of this file are public: so inside functions.
Model = TypeVar("Model", bound=nn.Module)

logger = get_logger(__name__)


def fsdp2_prepare_model(accelerator: Any, model: Model) -> Model:
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

    from accelerate.strategies.axes import shard_layers

    if issubclass(type(model), FSDPModule):  # the class that torch gave it
        return model
    plugin = accelerator.state.fsdp_plugin
    streams = plugin.cpu_ram_efficient_loading
    # Ignored parameters are moved before anything goes to the meta device; the rest follows unit by unit.
    ignored, chosen, exact = plan_units(
        plugin,
        model,
        accelerator.mixed_precision,
        None if streams else accelerator.device,
        getattr(accelerator, "scaler_handler", None),
    )
    units = split_by_dtype(model, [*exact, *chosen], ignored)
    names_of_ignored = [name for name, parameter in named_parameters(model).items() if parameter in ignored]
    weights = MainWeights(model) if streams else None
    shard_layers(model, accelerator.torch_device_mesh)
    if plugin.activation_checkpointing:
        model = fsdp2_apply_ac(accelerator, model)
    parameters = named_parameters(model)
    _shard(accelerator, model, units, {parameters[name] for name in names_of_ignored}, set(exact))
    if weights is not None:
        fsdp2_load_full_state_dict(
            accelerator, model, weights.state, isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        )
        weights.restore_buffers(accelerator.device)
    return model


def plan_units(
    plugin: Any, model: nn.Module, mixed_precision: str, device: torch.device | None, scaler: Any = None
) -> tuple[set[nn.Parameter], list[nn.Module], list[nn.Module]]:
    """Return a model's ignored parameters, maybe moved to a device, its units, and those in float32."""
    keeps_fp16 = scaler is not None and scaler.allow_fp16_gradients
    if mixed_precision != "no":
        keep_master_weights(model, keeps_fp16)
    check_ignored(plugin.ignored_modules, model)
    ignored = get_parameters_from_modules(plugin.ignored_modules, model, device)
    names = [name for name, p in model.named_parameters() if p.requires_grad and p in ignored]
    if names:
        logger.warning(
            f"{len(names)} parameters of {type(model).__name__} train and are in ignored_modules, so no rank "
            f"averages their gradients over ranks: {listed(names)}. Freeze them, or do not ignore them."
        )
    chosen = choose_units(plugin, model)
    policy = plugin.mixed_precision_policy
    is_low = policy is not None and policy.param_dtype not in (None, torch.float32)
    return ignored, chosen, kept_in_float32(model, chosen) if is_low else []


def _shard(
    accelerator: Any,
    model: nn.Module,
    units: Iterable[nn.Module],
    ignored: set[nn.Parameter],
    exact: set[nn.Module],
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plugin = accelerator.state.fsdp_plugin
    mesh = _sharding_mesh(accelerator)
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    shared: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": offload_policy(plugin.cpu_offload, mesh),
        "ignored_params": ignored or None,
    }
    # among units that compute by another policy
    in_float32 = dataclasses.replace(
        policy, param_dtype=torch.float32, output_dtype=policy.param_dtype, cast_forward_inputs=True
    )
    wrappers = outermost_wrappers(model)
    for unit in units:
        fully_shard(
            wrappers.get(unit, unit),
            mp_policy=in_float32 if unit in exact else policy,
            reshard_after_forward=plugin.reshard_after_forward,
            **shared,
        )
    if accelerator.mixed_precision != "no":  # models return float32 under every mixed precision
        policy = dataclasses.replace(policy, output_dtype=torch.float32)
    # Freeing the outermost unit after forward is of no use: backward begins with it. None lets torch see.
    reshard = None if plugin.reshard_after_forward else False
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard, **shared)


def _sharding_mesh(accelerator: Any) -> DeviceMesh:
    """Return the mesh over which parameters are sharded (its last axis) and replicated (the one before)."""
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


def keep_master_weights(model: nn.Module, keeps_fp16: bool = False) -> None:
    """Turn trainable parameters of low precision to float32, in place: updates would be lost in them."""
    dtypes = (torch.bfloat16,) if keeps_fp16 else (torch.float16, torch.bfloat16)
    low = {name: p for name, p in model.named_parameters() if p.requires_grad and p.dtype in dtypes}
    for parameter in low.values():
        parameter.data = parameter.data.float()
    if low:
        logger.warning(
            f"{len(low)} trainable parameters of {type(model).__name__} are kept in float32 and computed in "
            f"the number format of the run: {listed(list(low))}."
        )


def fsdp2_apply_ac(accelerator: Any, model: Model) -> Model:
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
    # A CPU's activations are already where offloading would put them.
    offload = plugin.activation_checkpointing_offload and not of_device(accelerator.device).is_host
    recompute(model, units, offload)
    return model


def recompute(model: nn.Module, units: Iterable[nn.Module], offload: bool = False) -> None:
    """Wrap modules inside a model, at all of their names, so that they recompute in backward."""
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
        for name, child in list(module._modules.items()):  # named_children() leaves out second names
            if child in wrapped:
                setattr(module, name, wrapped[child])


def outermost_wrappers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return for each module that recomputes its outermost wrapper."""
    wrappers: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        inner = module
        while isinstance(inner, torch_private.checkpoint_wrapper.ActivationWrapper):
            inner = torch_private.recomputed_module(inner)
        if inner is not module:
            wrappers.setdefault(inner, module)
    return wrappers


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """Return what tells whether a module of a model is a unit; None when there are no units.

    Args:
        fsdp2_plugin: a `FullyShardedDataParallelPlugin`.
        model: not wrapped yet.
    """
    policy = _policy_of(fsdp2_plugin, model)
    if policy is None:
        return None
    units = set(find_units(model, policy))
    return lambda module: module in units


def _policy_of(plugin: Any, model: nn.Module) -> Any:
    names, size = plugin.transformer_cls_names_to_wrap, plugin.min_num_params
    return bind_policy(read_policy(plugin.auto_wrap_policy), model, names, size)


# Units

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called, so nothing would fetch their parameters."""


class Holding(NamedTuple):
    """A parameter that a unit holds, with the module that has it and its name in the whole model."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


def choose_units(plugin: Any, model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that become units besides the model itself, inner ones first.

    Modules that share a tied parameter with the rest of the model stay in one unit with it.
    """
    policy = _policy_of(plugin, model)
    candidates = [unit for unit in find_units(model, policy) if not isinstance(unit, _CONTAINERS)]
    tied = _owners_of_tied(model)
    split = {id(unit) for unit in candidates if _splits_tied(unit, tied)}
    if split:
        logger.info(
            f"{len(split)} modules of {type(model).__name__} share parameters with the rest of it and are no "
            "units of their own."
        )
    if policy is not None and not candidates:
        logger.warning(
            f"auto_wrap_policy finds no module in {type(model).__name__}: it is sharded as one unit, which "
            "takes the most memory. Name its layers in transformer_cls_names_to_wrap, or set min_num_params."
        )
    return [unit for unit in candidates if id(unit) not in split]


def kept_in_float32(model: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that transformers' models want in float32 in all number formats."""
    wanted = {
        name
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for name in getattr(model, attribute, None) or ()
    }
    exact: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in exact)
        if wanted & set(name.split(".")) and not inside and next(module.parameters(), None) is not None:
            exact[name] = module
    tied = _owners_of_tied(model)
    wrong = [
        name
        for name, module in exact.items()
        if _splits_tied(module, tied) or set(units) & set(module.modules())
    ]
    if wrong:
        raise PreparationError(
            f"{type(model).__name__} keeps {listed(wrong)} in float32, which hold units or share parameters "
            "with the rest of the model. Name single layers, such as norms."
        )
    return list(exact.values())


def holdings(
    model: nn.Module, units: Iterable[nn.Module], ignored: Iterable[nn.Parameter] = ()
) -> Iterator[list[Holding]]:
    """Iterate over what each unit holds itself, the model being the last one."""
    prefixes, ignored = {module: name for name, module in model.named_modules()}, set(ignored)
    for unit in [*units, model]:
        inside = unit.named_modules(memo={*units, model} - {unit})  # which leaves out those of other units
        yield [
            Holding(module, f"{prefixes[module]}.{name}".lstrip("."), parameter)
            for _, module in inside
            for name, parameter in module.named_parameters(recurse=False)
            if parameter not in ignored
        ]


def split_by_dtype(
    model: nn.Module, units: list[nn.Module], ignored: Iterable[nn.Parameter] = ()
) -> list[nn.Module]:
    """Return units of which none trains parameters of two dtypes: odd modules become units of their own."""
    odd: list[nn.Module] = []
    for held in holdings(model, units, ignored):
        trained = [holding for holding in held if holding.parameter.requires_grad]
        sizes: Counter[torch.dtype] = Counter()
        for holding in trained:
            sizes[holding.parameter.dtype] += holding.parameter.numel()
        if len(sizes) > 1:
            usual = sizes.most_common(1)[0][0]
            odd += _odd_modules(model, trained, usual)
    if odd:
        logger.info(f"{len(odd)} modules are units of their own, for they have another dtype than the rest.")
    return [*odd, *units]


def _odd_modules(model: nn.Module, trained: list[Holding], usual: torch.dtype) -> list[nn.Module]:
    wanted = {id(h.module): h.module for h in trained if h.parameter.dtype != usual}
    mixed = [h.name for h in trained if id(h.module) in wanted and h.parameter.dtype == usual]
    tied = _owners_of_tied(model)
    split = [h.name for h in trained if id(h.module) in wanted and id(h.parameter) in tied]
    if mixed or split or id(model) in wanted:
        dtypes = sorted({str(h.parameter.dtype).removeprefix("torch.") for h in trained})
        at_fault = mixed or split or [h.name for h in trained if h.module is model]
        raise PreparationError(
            f"{type(model).__name__} trains parameters of several dtypes ({', '.join(dtypes)}) in one "
            f"module, near {listed(at_fault)}, and a unit of FSDP has one. Cast them to one dtype, freeze "
            "those of the other, or train with mixed_precision, which keeps all in float32."
        )
    return list(wanted.values())


def _owners_of_tied(model: nn.Module) -> dict[int, set[int]]:
    """Return for each tied parameter the modules that have it, all by identity."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    return {parameter: modules for parameter, modules in owners.items() if len(modules) > 1}


def _splits_tied(unit: nn.Module, tied: dict[int, set[int]]) -> bool:
    """Whether a unit has some but not all of the modules that share a parameter."""
    inside = {id(module) for module in unit.modules()}
    return any(modules & inside and modules - inside for modules in tied.values())
