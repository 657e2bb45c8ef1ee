"""Plugin with the options of FSDP 1 and 2, and functions that find the modules which become FSDP units.

Users pass the plugin to `Accelerator`. `strategies/fsdp` reads it when a model is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from accelerate import torch_private
from accelerate.base import (
    FSDP_AUTO_WRAP_POLICY,
    FSDP_STATE_DICT_TYPE,
    ConfigurationError,
    environ,
    plain_value,
    wrong_value,
)
from accelerate.plugins.checks import at_least, fill, one_of, plain_fields
from accelerate.plugins.fsdp_versions import (
    VERSIONS,
    Converted,
    PrefetchName,
    StateDictName,
    StrategyName,
    WrapPolicyName,
    conflict_error,
    flag_of,
    read_dtype,
    read_member,
    state_dict_configs,
    version_of,
)
from accelerate.settings import read_fields
from accelerate.settings.sections import FsdpSection

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType

Policy = Any
"""Wrap policy of torch, as a callable or as a policy object."""

EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"
"""Variable that makes libraries load weights on rank 0 only."""

_FLAGS = ("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading")


@dataclass
class FullyShardedDataParallelPlugin:
    """Options of sharding parameters, gradients and optimizer states by FSDP.

    Fields that are None are read from the environment when the object is built. The variable of an option,
    which the launcher sets, is FSDP_ with the name of the option in capitals. All fields accept text, and
    hold torch's objects after construction. They are read when a model is prepared, so they can be changed
    until then.

    Args:
        fsdp_version: 1 (`FullyShardedDataParallel`) or 2 (`fully_shard`). Default: 1.
        sharding_strategy: Sharding strategy by name or number, for FSDP 1. Default: FULL_SHARD.
        reshard_after_forward: Whether FSDP 2 frees parameters between forward and backward. Default: True.
            With FSDP 1, another name for `sharding_strategy`.
        backward_prefetch: Time at which FSDP 1 prefetches the next unit in backward. Default: no prefetch.
        mixed_precision_policy: Dtypes of sharded parameters, as a precision by name, the fields of the policy
            as a dictionary, or torch's object. Default: the mixed precision of the run.
        auto_wrap_policy: Policy that selects the units, as "transformer_based_wrap", "size_based_wrap",
            "no_wrap", or a torch policy. Default: the whole model is one unit.
        cpu_offload: Whether parameters and gradients are offloaded to the CPU, or torch's object.
            Default: False.
        ignored_modules: Modules that are not sharded, or a regular expression for their names.
        state_dict_type: Type of saved state dicts. Default: FULL_STATE_DICT with FSDP 1 and
            SHARDED_STATE_DICT with FSDP 2.
        state_dict_config: Configuration of model state dicts. Default: the one for `state_dict_type`.
        optim_state_dict_config: Configuration of optimizer state dicts. Default: the one for
            `state_dict_type`.
        limit_all_gathers: Whether FSDP 1 limits the number of all-gathers in flight, which bounds memory.
        use_orig_params: Whether FSDP 1 keeps the original parameters, so that some can be frozen.
            Default: False.
        param_init_fn: Function with which FSDP 1 initializes the parameters of a module on the meta device.
        sync_module_states: Whether FSDP 1 broadcasts the weights of rank 0 to all ranks. Default: only with
            `cpu_ram_efficient_loading`.
        forward_prefetch: Whether FSDP 1 prefetches the next unit in forward. Default: False.
        activation_checkpointing: Whether units recompute their activations in backward. Default: False.
        activation_checkpointing_offload: Whether FSDP 2 offloads checkpointed activations to the CPU.
            Default: False.
        cpu_ram_efficient_loading: Whether only rank 0 reads weights, and sends them to the other ranks.
            Default: False.
        transformer_cls_names_to_wrap: Class names of the layers that become units. Default:
            `_no_split_modules` of the model.
        min_num_params: Number of parameters from which a module becomes a unit.

    Raises:
        ConfigurationError: A value is not valid, or values conflict.
    """

    fsdp_version: Converted[Literal[1, 2] | None] = None  # type: ignore[assignment]
    sharding_strategy: Converted[StrategyName | ShardingStrategy | int | None] = None  # type: ignore[assignment]
    reshard_after_forward: Converted[bool | StrategyName | ShardingStrategy | None] = None  # type: ignore[assignment]
    backward_prefetch: Converted[PrefetchName | BackwardPrefetch | None] = None  # type: ignore[assignment]
    mixed_precision_policy: Any = None
    auto_wrap_policy: Converted[WrapPolicyName | Callable[..., Any] | None] = None  # type: ignore[assignment]
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Converted[StateDictName | StateDictType | None] = None  # type: ignore[assignment]
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        variables = read_fields(environ.current(), FsdpSection)
        names = ("fsdp_version", "auto_wrap_policy", "ignored_modules", "cpu_offload")
        fill(self, {"fsdp_version": 1, "cpu_offload": False, **variables}, names)
        number = one_of("fsdp_version", str(self.fsdp_version), ("1", "2"), self.fsdp_version)
        version = VERSIONS[int(number)]
        self.fsdp_version = version.number
        self.auto_wrap_policy = read_policy(self.auto_wrap_policy)
        self._read_units(variables)
        for name in _FLAGS:
            setattr(self, name, flag_of(self, name, variables))
        version.read_fields(self, variables)
        self._check_activation_offload()
        self.set_cpu_offload()
        self.set_state_dict_type(self.state_dict_type)
        if isinstance(self.mixed_precision_policy, dict):
            self.mixed_precision_policy = version.policy_of_mapping(self.mixed_precision_policy)
        elif isinstance(self.mixed_precision_policy, str):
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        self.validate_mixed_precision_policy()
        if self.cpu_ram_efficient_loading:
            environ.assign({EFFICIENT_LOADING: "True"})

    def set_state_dict_type(self, state_dict_type: str | StateDictType | None = None) -> None:
        """Sets the type of state dicts, with its configurations for models and optimizers.

        Args:
            state_dict_type: The type. None uses FSDP_STATE_DICT_TYPE, or the default of the version.

        Raises:
            ConfigurationError: The type is unknown, or not supported by this version.
        """
        if state_dict_type is None:
            variables = read_fields(environ.current(), FsdpSection)
            state_dict_type = variables.get("state_dict_type", version_of(self).state_dict_type)
        kind = read_member("state_dict_type", state_dict_type, "StateDictType", FSDP_STATE_DICT_TYPE)
        if kind.name == "LOCAL_STATE_DICT" and not version_of(self).has_local_states:
            fix = "Choose SHARDED_STATE_DICT or FULL_STATE_DICT"
            raise conflict_error("FSDP 2 has no LOCAL_STATE_DICT", fix)
        self.state_dict_type = kind
        models, optimizers = state_dict_configs(kind.name)
        if not isinstance(self.state_dict_config, type(models)):
            self.state_dict_config = models
        if not isinstance(self.optim_state_dict_config, type(optimizers)):
            self.optim_state_dict_config = optimizers

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Binds the wrap policy to the model whose units it selects.

        Args:
            model: The model.

        Raises:
            ConfigurationError: The model has no layer of a class in `transformer_cls_names_to_wrap`.
        """
        self.auto_wrap_policy = bind_policy(
            read_policy(self.auto_wrap_policy), model, self.transformer_cls_names_to_wrap, self.min_num_params
        )

    def set_mixed_precision(
        self, mixed_precision: str | torch.dtype, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Sets the mixed precision policy for a precision, unless a policy is set already.

        Args:
            mixed_precision: "fp16", "bf16", "fp8" (bfloat16 outside of FP8 layers), "fp32" or a dtype.
            buffer_autocast: Whether autocast casts buffers, so that they stay float32.
            override: Whether to replace a policy that is set already.

        Raises:
            ConfigurationError: The precision is unknown.
        """
        import torch

        dtype = read_dtype(mixed_precision)
        buffers = torch.float32 if buffer_autocast else dtype
        if override or self.mixed_precision_policy is None:
            self.mixed_precision_policy = version_of(self).policy_of_dtype(dtype, buffers)

    def validate_mixed_precision_policy(self) -> None:
        """Raises an error for a mixed precision policy of the other version.

        Raises:
            ConfigurationError: The policy is not of the class that this version accepts.
        """
        version_of(self).check_policy(self.mixed_precision_policy)

    def set_cpu_offload(self) -> None:
        """Replaces a boolean in `cpu_offload` by torch's object for this version.

        Raises:
            ConfigurationError: The value is not a boolean, or is the object of the other version.
        """
        self.cpu_offload = version_of(self).offload_of(self.cpu_offload)

    def validate_cpu_offload(self) -> None:
        """Raises an error for an offload object of the other version.

        Raises:
            ConfigurationError: The object is not of the class that this version accepts.
        """
        version_of(self).offload_of(self.cpu_offload)

    def to_fsdp2(self) -> FullyShardedDataParallelPlugin:
        """Returns an equivalent plugin for FSDP 2, or this plugin if it is one.

        Units, offload, dtypes, ignored modules, activation checkpointing and loading are kept. If FSDP 2
        replaces the sharding strategy by something else (replicas, no shards), a warning names it.
        """
        return version_of(self).to_fsdp2(self)

    def _read_units(self, variables: Mapping[str, Any]) -> None:
        name = getattr(self.auto_wrap_policy, "__name__", "")
        layers = self.transformer_cls_names_to_wrap
        if layers is None and name == "transformer_auto_wrap_policy":
            layers = variables.get("transformer_cls_names_to_wrap")
        if isinstance(layers, str):
            layers = [layer.strip() for layer in layers.split(",") if layer.strip()]
        self.transformer_cls_names_to_wrap = layers
        if self.min_num_params is None and name == "size_based_auto_wrap_policy":
            self.min_num_params = variables.get("min_num_params", 0)
        if self.min_num_params is not None:
            at_least("min_num_params", self.min_num_params, 0)

    def _check_activation_offload(self) -> None:
        if not self.activation_checkpointing_offload:
            return
        if not self.activation_checkpointing:
            raise conflict_error(
                "activation_checkpointing_offload=True offloads checkpointed activations, and "
                "activation_checkpointing is off",
                "Set activation_checkpointing=True",
            )
        if not version_of(self).offloads_activations:
            problem = "activation_checkpointing_offload=True works with FSDP 2 only"
            raise conflict_error(problem, "Set fsdp_version=2")


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Returns the class with a given name among a module and its submodules, or None.

    Args:
        module: Module to search.
        name: Name of the class, without its package.
    """
    return next((type(inner) for inner in module.modules() if type(inner).__name__ == name), None)


def read_policy(value: object) -> Policy | None:
    """Returns torch's wrap policy for a name in any case, None for "no_wrap", and other values unchanged."""
    if value is None or callable(value):
        return value
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    policies = (transformer_auto_wrap_policy, size_based_auto_wrap_policy, None)
    table = dict(zip(FSDP_AUTO_WRAP_POLICY, policies, strict=True))
    name = str(plain_value(value)).upper()
    if name not in table:
        fix = f"Choose one of {', '.join(table)}, or give a callable"
        raise wrong_value("auto_wrap_policy", value, "it is neither a policy nor the name of one", fix)
    return table[name]


def bind_policy(
    policy: Policy | None, model: nn.Module, layers: Iterable[str] | None, min_params: int | None
) -> Policy | None:
    """Returns a wrap policy that is bound to its model.

    A policy that is bound already, or was written by the user, is returned unchanged. Without `layers` the
    `_no_split_modules` of the model become units. Without `min_params` no module becomes one.
    """
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    if policy is transformer_auto_wrap_policy:
        names = layers or getattr(model, "_no_split_modules", None) or ()
        argument = "transformer_cls_names_to_wrap" if layers else ""
        return partial(policy, transformer_layer_cls=set(find_classes(model, names, argument)))
    if policy is size_based_auto_wrap_policy:
        return partial(policy, min_num_params=min_params) if min_params else None
    return policy


def find_classes(model: nn.Module, names: Iterable[str], argument: str = "") -> list[type[nn.Module]]:
    """Returns the classes of these names among the modules of a model.

    Raises a `ConfigurationError` for a class that the model lacks, if `argument` has the name of the argument
    that gives the names.
    """
    classes = {name: get_module_class_from_name(model, name) for name in names}
    missing = [name for name, kind in classes.items() if kind is None]
    if argument and missing:
        known = sorted({type(inner).__name__ for inner in model.modules() if any(inner.children())})
        raise ConfigurationError(
            f"{argument} names {', '.join(missing)}, and {type(model).__name__} has no module of that class. "
            f"Name some of {', '.join(known)}."
        )
    return [kind for kind in classes.values() if kind is not None]


def find_units(model: nn.Module, policy: Policy | None) -> list[nn.Module]:
    """Returns the submodules of a model that become units by a policy bound to it, inner ones first.

    They do not include the model itself. The policy is called as torch does, with `module`, `recurse` and
    `nonwrapped_numel`.
    """
    if policy is None:
        return []
    if isinstance(policy, torch_private.Policy):
        selected = torch_private.run_policy(policy, model)
        return [
            module for module in reversed(list(model.modules())) if module in selected and module is not model
        ]
    units: list[nn.Module] = []
    _collect_units(model, policy, units, root=True)
    return units


def _collect_units(module: nn.Module, policy: Policy, units: list[nn.Module], root: bool = False) -> int:
    """Appends the units inside a module and then the module, and returns their number of parameters."""
    if module in units:
        return 0
    numel = sum(p.numel() for p in module.parameters())
    wrapped_numel = 0
    if policy(module=module, recurse=True, nonwrapped_numel=numel):
        wrapped_numel = sum(_collect_units(child, policy, units) for child in module.children())
    if root or not policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped_numel):
        return wrapped_numel
    units.append(module)
    return numel
