"""Units of FSDP, and sharding of a model with FSDP 2.

A unit is a module whose parameters are gathered and freed together. Both FSDP strategies call `plan_units` to
choose the units; FSDP 2 calls `fsdp2_prepare_model`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accelerate import torch_private
from accelerate.base import PreparationError, listed
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.plugins import bind_policy, find_units, read_policy
from accelerate.strategies.axes import (
    ExpertMeshes,
    list_experts,
    mesh_of_fsdp,
    meshes_of,
    shard_experts,
    shard_layers,
)
from accelerate.strategies.dtensors import apply_to_shards, named_parameters
from accelerate.strategies.fsdp.arguments import check_arguments
from accelerate.strategies.fsdp.gathered import GatheredWeights, UnitParameter, refuse_renormalized
from accelerate.strategies.fsdp.parameters import (
    MainWeights,
    check_ignored,
    fsdp2_load_full_state_dict,
    get_parameters_from_modules,
)
from accelerate.strategies.recomputed_blocks import recompute
from accelerate.strategies.views import shard_unit

if TYPE_CHECKING:
    from accelerate.plugins import FullyShardedDataParallelPlugin

# torch.distributed.fsdp takes a second to import, so functions import it.
Model = TypeVar("Model", bound=nn.Module)

logger = get_logger(__name__)


def fsdp2_prepare_model(accelerator: Any, model: Model) -> Model:
    """Shards a model in place with FSDP 2.

    Called on all ranks.

    Args:
        accelerator: Has `state.fsdp_plugin`.
        model: The model. If it is sharded already, it is returned without a change.

    Returns:
        The same module, with DTensors as parameters.

    Raises:
        PreparationError: The model cannot be sharded.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    if issubclass(type(model), FSDPModule):  # the class that fully_shard sets
        return model
    plugin = accelerator.state.fsdp_plugin
    whole: set[nn.Parameter] | None = getattr(model, "whole_on_ranks", None)
    # Rank 0 has no weights of other stages of a pipeline.
    loads_from_rank0 = plugin.cpu_ram_efficient_loading and whole is None
    # Ignored parameters are moved before the model is moved to the meta device.
    ignored, chosen, in_float32 = plan_units(
        plugin,
        model,
        accelerator.mixed_precision,
        None if loads_from_rank0 else accelerator.device,
        getattr(accelerator, "scaler_handler", None),
    )
    ignored |= unshardable(model) | (whole or set())
    for parameter in model.parameters():
        if not (parameter in ignored or parameter.is_contiguous()):  # such as channels_last
            parameter.data = parameter.data.contiguous()
    parallelism = accelerator.state.parallelism_config
    has_experts = parallelism is not None and parallelism.ep_enabled
    experts = list_experts(model, parallelism.ep_handler.is_experts) if has_experts else []
    inside = {module for unit in experts for module in unit.modules()}
    chosen = [*experts, *(unit for unit in chosen if unit not in inside)]
    units = split_by_dtype(model, [*in_float32, *chosen], ignored)
    names_of_ignored = [name for name, parameter in named_parameters(model).items() if parameter in ignored]
    weights = MainWeights(model) if loads_from_rank0 else None
    meshes = _meshes_with_experts(accelerator)
    shard_layers(model, accelerator.torch_device_mesh if meshes is None else meshes.others, experts)
    for module in experts:
        assert meshes is not None
        shard_experts(module, meshes.experts, meshes.copies, meshes.scale)
    if plugin.activation_checkpointing:
        model = fsdp2_apply_ac(accelerator, model)
    parameters = named_parameters(model)
    ignored = {parameters[name] for name in names_of_ignored}
    _shard(accelerator, model, units, ignored, set(in_float32), set(experts))
    if weights is not None:
        fsdp2_load_full_state_dict(
            accelerator, model, weights.state, isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        )
        weights.restore_buffers(accelerator.device)
    return model


def unshardable(model: nn.Module) -> set[nn.Parameter]:
    """Returns parameters without dimensions or elements, whose gradients are averaged instead."""
    return {parameter for parameter in model.parameters() if parameter.ndim == 0 or not parameter.numel()}


def _meshes_with_experts(accelerator: Any) -> ExpertMeshes | None:
    """Returns the meshes of a run with expert parallelism, or None without it."""
    parallelism = accelerator.state.parallelism_config
    if parallelism is None or not parallelism.ep_enabled:
        return None
    return meshes_of(parallelism)


def plan_units(
    plugin: FullyShardedDataParallelPlugin,
    model: nn.Module,
    mixed_precision: str,
    device: torch.device | None,
    scaler: Any = None,
) -> tuple[set[nn.Parameter], list[nn.Module], list[nn.Module]]:
    """Returns the ignored parameters of a model, its units, and its modules that compute in float32."""
    keeps_fp16 = scaler is not None and scaler.allow_fp16_gradients
    if mixed_precision != "no":
        keep_master_weights(model, keeps_fp16)
    check_ignored(plugin.ignored_modules, model)
    ignored = get_parameters_from_modules(plugin.ignored_modules, model, device)
    refuse_renormalized(model, ignored)
    chosen = choose_units(plugin, model)
    policy = plugin.mixed_precision_policy
    is_low = policy is not None and policy.param_dtype not in (None, torch.float32)
    return ignored, chosen, find_float32_modules(model, chosen) if is_low else []


def _shard(
    accelerator: Any,
    model: nn.Module,
    units: Iterable[nn.Module],
    ignored: set[nn.Parameter],
    in_float32: set[nn.Module],
    experts: set[nn.Module],
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin = accelerator.state.fsdp_plugin
    mesh, mesh_of_experts = _sharding_meshes(accelerator)
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    options: dict[str, Any] = {
        "offload_policy": offload_policy(plugin.cpu_offload, mesh),
        "ignored_params": ignored or None,
    }
    # float32 modules receive inputs from units with another dtype
    float32_policy = dataclasses.replace(
        policy, param_dtype=torch.float32, output_dtype=policy.param_dtype, cast_forward_inputs=True
    )
    wrappers, units = outermost_wrappers(model), list(units)
    for unit, held in zip([*units, model], parameters_by_unit(model, units, ignored), strict=True):
        GatheredWeights(held).register(unit)
    for unit in units:
        shard_unit(
            wrappers.get(unit, unit),
            mesh=mesh_of_experts if unit in experts else mesh,
            mp_policy=float32_policy if unit in in_float32 else policy,
            reshard_after_forward=plugin.reshard_after_forward,
            **options,
        )
        check_arguments(wrappers.get(unit, unit))
    if accelerator.mixed_precision != "no":  # models return float32 under every mixed precision
        policy = dataclasses.replace(policy, output_dtype=torch.float32)
    # The backward begins with the outermost unit, so it is not freed after forward: None is this default.
    reshard = None if plugin.reshard_after_forward else False
    name = type(model).__name__
    shard_unit(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, **options)
    torch_private.keep_name(model, name)
    apply_to_shards(model)


def _sharding_meshes(accelerator: object) -> tuple[DeviceMesh, DeviceMesh]:
    """Returns the meshes of all parameters outside of experts, and of those of experts.

    The last dimension of a mesh shards parameters, and the first of two replicates them.
    """
    meshes = _meshes_with_experts(accelerator)
    if meshes is not None:
        return mesh_of_fsdp(meshes.others), mesh_of_fsdp(meshes.experts)
    mesh = _sharding_mesh(accelerator)
    return mesh, mesh


def _sharding_mesh(accelerator: Any) -> DeviceMesh:
    """Returns the mesh of FSDP without expert parallelism."""
    mesh = accelerator.torch_device_mesh
    if mesh is None:
        size = accelerator.state.num_processes
        return init_device_mesh(accelerator.device.type, (size,), mesh_dim_names=("dp_shard",))
    with warnings.catch_warnings():
        # torch has no other way yet to select a dimension and a flattened dimension
        warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
        return mesh[tuple(accelerator.state.parallelism_config.fsdp_dim_names)]  # type: ignore[no-any-return]


def offload_policy(policy: object, mesh: DeviceMesh) -> Any:
    """Returns the offload policy, without pinned memory if the mesh is on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    if isinstance(policy, CPUOffloadPolicy) and of_device(torch.device(mesh.device_type)).is_host:
        return CPUOffloadPolicy(pin_memory=False)
    return policy


def keep_master_weights(model: nn.Module, keeps_fp16: bool = False) -> None:
    """Converts trainable parameters of low precision to float32, in place, for precise updates."""
    dtypes = (torch.bfloat16,) if keeps_fp16 else (torch.float16, torch.bfloat16)
    low = {name: p for name, p in model.named_parameters() if p.requires_grad and p.dtype in dtypes}
    for parameter in low.values():
        parameter.data = parameter.data.float()
    if low:
        logger.warning(
            f"{len(low)} trainable parameters of {type(model).__name__} are kept in float32 and computed in "
            f"the dtype of the mixed precision: {listed(list(low))}."
        )


def fsdp2_apply_ac(accelerator: Any, model: Model) -> Model:
    """Applies activation checkpointing to the units of a model, in place.

    Args:
        accelerator: Has `state.fsdp_plugin`, which defines the units.
        model: A model that is not sharded yet.

    Returns:
        The same module.
    """
    plugin = accelerator.state.fsdp_plugin
    units, whole = choose_units(plugin, model), _whole_model(model)
    if not units and (whole is model or not choose_units(plugin, whole)):
        logger.warning(
            f"activation_checkpointing has no effect on {type(whole).__name__}: it is one unit. Set "
            "auto_wrap_policy, so that there are units to recompute."
        )
    offload = None
    if plugin.activation_checkpointing_offload:
        from accelerate.strategies.activation_offload import offload_to_host

        offload = offload_to_host(model, accelerator.device)
    recompute(model, units, offload, parallelism=getattr(accelerator.state, "parallelism_config", None))
    return model


def outermost_wrappers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Returns the outermost wrapper of each module with activation checkpointing."""
    wrappers: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        inner = module
        while isinstance(inner, torch_private.checkpoint_wrapper.ActivationWrapper):
            inner = torch_private.recomputed_module(inner)
        if inner is not module:
            wrappers.setdefault(inner, module)
    return wrappers


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: object, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Returns a function that decides whether a module of a model is a unit.

    Args:
        fsdp2_plugin: A `FullyShardedDataParallelPlugin`.
        model: A model that is not wrapped yet.

    Returns:
        None if the plugin has no policy.
    """
    policy = _policy_of(fsdp2_plugin, model)
    if policy is None:
        return None
    units = set(find_units(model, policy))
    return lambda module: module in units


def _policy_of(plugin: Any, model: nn.Module) -> Any:
    names, size = plugin.transformer_cls_names_to_wrap, plugin.min_num_params
    return bind_policy(read_policy(plugin.auto_wrap_policy), _whole_model(model), names, size)


def _whole_model(model: nn.Module) -> nn.Module:
    """Returns the model of a stage of a pipeline, and other models unchanged."""
    whole: Callable[[], nn.Module] | None = getattr(model, "model_of_stage", None)
    return model if whole is None else whole()


# Units


def choose_units(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> list[nn.Module]:
    """Returns the modules of a model that become units besides the model itself, inner ones first.

    A module with a parameter that is tied to the rest of the model becomes no unit.
    """
    policy = _policy_of(plugin, model)
    candidates, whole = _find_candidates(model, policy), _whole_model(model)
    tied = _owners_of_tied(model)
    split = {id(unit) for unit in candidates if _splits_tied(unit, tied)}
    if split:
        logger.info(
            f"{len(split)} modules of {type(model).__name__} have parameters that are tied to the rest of "
            "it, and become no units."
        )
    if policy is not None and not _find_candidates(whole, policy):
        logger.warning(
            f"auto_wrap_policy finds no module in {type(whole).__name__}: it is sharded as one unit, which "
            "needs the most memory. Name its layers in transformer_cls_names_to_wrap, or set min_num_params."
        )
    return [unit for unit in candidates if id(unit) not in split]


def _find_candidates(model: nn.Module, policy: Any) -> list[nn.Module]:
    return [unit for unit in find_units(model, policy) if not _is_container(unit)]


def _is_container(module: nn.Module) -> bool:
    """Returns whether a module has no forward, such as nn.ModuleList, so FSDP would not gather parameters."""
    return getattr(module.forward, "__func__", None) is nn.Module.forward


def find_float32_modules(model: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the modules that a model of transformers keeps in float32 in mixed precision."""
    names = {
        name
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for name in getattr(model, attribute, None) or ()
    }
    in_float32: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in in_float32)
        if names & set(name.split(".")) and not inside and next(module.parameters(), None) is not None:
            in_float32[name] = module
    tied = _owners_of_tied(model)
    wrong = [
        name
        for name, module in in_float32.items()
        if _splits_tied(module, tied) or set(units) & set(module.modules())
    ]
    if wrong:
        raise PreparationError(
            f"{type(model).__name__} keeps {listed(wrong)} in float32, which contain units or parameters "
            "that are tied to the rest of the model. Name single layers, such as norms."
        )
    return list(in_float32.values())


def parameters_by_unit(
    model: nn.Module, units: Iterable[nn.Module], ignored: Iterable[nn.Parameter] = ()
) -> Iterator[list[UnitParameter]]:
    """Yields the parameters of each unit, and then those of the model that are in no unit."""
    prefixes, ignored = {module: name for name, module in model.named_modules()}, set(ignored)
    for unit in [*units, model]:
        inside = unit.named_modules(memo={*units, model} - {unit})  # skips the modules of other units
        yield [
            UnitParameter(module, f"{prefixes[module]}.{name}".lstrip("."), parameter)
            for _, module in inside
            for name, parameter in module.named_parameters(recurse=False)
            if parameter not in ignored
        ]


def split_by_dtype(
    model: nn.Module, units: list[nn.Module], ignored: Iterable[nn.Parameter] = ()
) -> list[nn.Module]:
    """Returns units with one dtype each, to which modules with another dtype are added as units."""
    added: list[nn.Module] = []
    for parameters in parameters_by_unit(model, units, ignored):
        trained = [p for p in parameters if p.parameter.requires_grad]
        sizes: Counter[torch.dtype] = Counter()
        for _, _, parameter in trained:
            sizes[parameter.dtype] += parameter.numel()
        if len(sizes) > 1:
            added += _modules_of_other_dtypes(model, trained, sizes.most_common(1)[0][0])
    if added:
        logger.info(f"{len(added)} modules become units because their dtype is not that of the rest.")
    return [*added, *units]


def _modules_of_other_dtypes(
    model: nn.Module, trained: list[UnitParameter], main_dtype: torch.dtype
) -> list[nn.Module]:
    """Returns the modules with another dtype, or raises an error if they cannot become units."""
    modules = {id(p.module): p.module for p in trained if p.parameter.dtype != main_dtype}
    mixed = [p.name for p in trained if id(p.module) in modules and p.parameter.dtype == main_dtype]
    tied = _owners_of_tied(model)
    split = [p.name for p in trained if id(p.module) in modules and id(p.parameter) in tied]
    if mixed or split or id(model) in modules:
        dtypes = sorted({str(p.parameter.dtype).removeprefix("torch.") for p in trained})
        wrong = mixed or split or [p.name for p in trained if p.module is model]
        raise PreparationError(
            f"{type(model).__name__} trains parameters of several dtypes ({', '.join(dtypes)}) in one "
            f"module, near {listed(wrong)}, and a unit of FSDP has one. Cast them to one dtype, freeze "
            "those of the other, or train with mixed_precision, which keeps all in float32."
        )
    return list(modules.values())


def _owners_of_tied(model: nn.Module) -> dict[int, set[int]]:
    """Returns the modules of each tied parameter, all by `id`."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    return {parameter: modules for parameter, modules in owners.items() if len(modules) > 1}


def _splits_tied(unit: nn.Module, tied: dict[int, set[int]]) -> bool:
    """Returns whether a tied parameter is in modules inside and outside of a unit."""
    inside = {id(module) for module in unit.modules()}
    return any(modules & inside and modules - inside for modules in tied.values())
