"""Conversion of text, numbers and flags to the torch objects of FSDP 1 and FSDP 2.

`FullyShardedDataParallelPlugin` calls the `FsdpVersion` of its `fsdp_version` for all that differs.
"""

from __future__ import annotations

import dataclasses
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar

from accelerate.base import (
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    ConfigurationError,
    plain_value,
    wrong_value,
)
from accelerate.plugins.checks import fill, one_of, read_flag
from accelerate.settings import ARGUMENT_KEY_MAPPING, ARGUMENT_VALUE_MAPPING, STRATEGY_NOTES
from accelerate.settings.sections import FsdpSection

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

    from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin

T = TypeVar("T", contravariant=True)


class Converted(Protocol[T]):
    """Type of a field that accepts `T` and holds torch's object after construction, for type checkers."""

    def __get__(self, plugin: object, kind: object = None) -> Any: ...
    def __set__(self, plugin: object, value: T) -> None: ...


# Types of the names in `base/constants.py`, in upper and lower case.
StrategyName: TypeAlias = Literal[
    Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"],
    Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"],
]
PrefetchName: TypeAlias = Literal[
    Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"],
    Literal["backward_pre", "backward_post", "no_prefetch"],
]
WrapPolicyName: TypeAlias = Literal[
    Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
    Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"],
]
StateDictName: TypeAlias = Literal[
    Literal["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"],
    Literal["full_state_dict", "local_state_dict", "sharded_state_dict"],
]

COMPUTE_DTYPES = {"fp8": "bfloat16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Mixed precision -> the dtype of all-gathered parameters. FP8 layers cast their inputs themselves."""

_FLAGS_OF_FSDP1 = ("use_orig_params", "sync_module_states", "forward_prefetch")


def torch_class(name: str) -> Any:
    """Returns a class of torch.distributed.fsdp, which takes a second to import."""
    return getattr(import_module("torch.distributed.fsdp"), name)


def flag_of(plugin: object, name: str, variables: Mapping[str, Any]) -> bool:
    """Returns the boolean of a field, else of its variable, else False."""
    value = getattr(plugin, name)
    return read_flag(name, variables.get(name, False) if value is None else value)


def read_member(field: str, value: object, class_name: str, names: list[str]) -> Any:
    """Returns the member of one of torch's enumerations for a name in any case."""
    kind = torch_class(class_name)
    if isinstance(value, kind):
        return value
    return kind[one_of(field, str(plain_value(value)).upper(), names, value, KeyError)]


def read_strategy(field: str, value: object) -> ShardingStrategy:
    """Returns the sharding strategy of FSDP 1 for a name in any case, or for a number from 1."""
    text = str(plain_value(value)).upper()
    if text.isdecimal() and 1 <= int(text) <= len(FSDP_SHARDING_STRATEGY):
        value = text = FSDP_SHARDING_STRATEGY[int(text) - 1]
    if text == "HYBRID_SHARD_ZERO2":
        value = torch_class("ShardingStrategy")["_HYBRID_SHARD_ZERO2"]
    return read_member(field, value, "ShardingStrategy", FSDP_SHARDING_STRATEGY)  # type: ignore[no-any-return]


def read_prefetch(value: object) -> BackwardPrefetch | None:
    """Returns the backward prefetch of FSDP 1, or None for no prefetch."""
    if value is None or str(plain_value(value)).upper() == "NO_PREFETCH":
        return None
    return read_member("backward_prefetch", value, "BackwardPrefetch", FSDP_BACKWARD_PREFETCH)  # type: ignore[no-any-return]


def state_dict_configs(kind: str) -> tuple[Any, Any]:
    """Returns the configurations of a state dict type for models and for optimizers, which may be None."""
    prefix = kind.removesuffix("_STATE_DICT").capitalize()
    if prefix == "Local":
        return None, None
    arguments = {"offload_to_cpu": True, **({"rank0_only": True} if prefix == "Full" else {})}
    names = (f"{prefix}StateDictConfig", f"{prefix}OptimStateDictConfig")
    models, optimizers = (torch_class(name)(**arguments) for name in names)
    return models, optimizers


def read_dtype(value: object) -> torch.dtype:
    """Returns the dtype for "fp8", "fp16", "bf16", "fp32" or a dtype."""
    import torch

    if isinstance(value, torch.dtype):
        return value
    text = str(plain_value(value)).lower()
    one_of("mixed_precision", text, COMPUTE_DTYPES, value, KeyError)
    return getattr(torch, COMPUTE_DTYPES[text])  # type: ignore[no-any-return]


def dtype_of_field(name: str, value: object) -> Any:
    """Returns the value of a field of a policy, as a dtype if the name of the field ends with "_dtype"."""
    import torch

    if not name.endswith("_dtype") or value is None or isinstance(value, torch.dtype):
        return value
    dtype = getattr(torch, str(plain_value(value)).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else read_dtype(value)


def conflict_error(problem: str, fix: str) -> ConfigurationError:
    """Returns the error for values that conflict, which the caller raises."""
    return ConfigurationError(f"FullyShardedDataParallelPlugin: {problem}. {fix}.")


class FsdpVersion(ABC):
    """Interface of one version of FSDP."""

    number: ClassVar[Literal[1, 2]]
    policy_name: ClassVar[str]  # name of torch's class of mixed precision policies
    offload_name: ClassVar[str]  # name of torch's class of CPU offload
    state_dict_type: ClassVar[str]  # default type of saved state dicts
    shards_in_place: ClassVar[bool] = False  # keeps the modules of a model, with DTensors as parameters
    takes_any_mesh: ClassVar[bool] = False  # shards over several mesh dimensions without a hybrid strategy
    is_spmd_on_xla: ClassVar[bool] = False  # one process drives all XLA devices of its node
    has_local_states: ClassVar[bool] = True  # supports LOCAL_STATE_DICT
    takes_state_dict_options: ClassVar[bool] = False  # state dicts are built with torch's `StateDictOptions`
    offloads_activations: ClassVar[bool] = False  # can offload checkpointed activations to the CPU

    @abstractmethod
    def policy_of_dtype(self, dtype: torch.dtype, buffer_dtype: torch.dtype) -> Any:
        """Returns the policy that computes and reduces in one dtype.

        FSDP 2 does not cast buffers.
        """

    def policy_of_mapping(self, value: dict[str, Any]) -> Any:
        """Returns the policy with these fields, whose dtypes may be given by name."""
        kind = torch_class(self.policy_name)
        known = [entry.name for entry in dataclasses.fields(kind)]
        unknown = [name for name in value if name not in known]
        if unknown:
            reason = f"{self.policy_name} of fsdp_version={self.number} has no {', '.join(unknown)}"
            raise wrong_value("mixed_precision_policy", value, reason, f"Use some of {', '.join(known)}")
        return kind(**{name: dtype_of_field(name, entry) for name, entry in value.items()})

    def check_policy(self, policy: Callable[..., Any] | None) -> None:
        """Raises an error for a mixed precision policy of the other version."""
        if policy is not None and not isinstance(policy, torch_class(self.policy_name)):
            reason = f"fsdp_version={self.number} takes torch.distributed.fsdp.{self.policy_name}"
            fix = "Give that, a dictionary of its fields, or the name of a precision, such as 'bf16'"
            raise wrong_value("mixed_precision_policy", policy, reason, fix)

    def offload_of(self, value: object) -> Any:
        """Returns torch's object of CPU offload for a boolean or an object."""
        kinds = tuple(torch_class(version.offload_name) for version in VERSIONS.values())
        if not isinstance(value, kinds):
            return self._offload(read_flag("cpu_offload", value))
        if not isinstance(value, torch_class(self.offload_name)):
            reason = f"fsdp_version={self.number} takes torch.distributed.fsdp.{self.offload_name}"
            raise wrong_value("cpu_offload", value, reason, "Give True or False, which fit both versions")
        return value

    @abstractmethod
    def _offload(self, offloads: bool) -> Any: ...

    @abstractmethod
    def read_fields(self, plugin: FullyShardedDataParallelPlugin, variables: Mapping[str, Any]) -> None:
        """Fills the fields that differ between the versions, with `variables` as values by field."""

    def to_fsdp2(self, plugin: FullyShardedDataParallelPlugin) -> FullyShardedDataParallelPlugin:
        """Returns an equivalent plugin for FSDP 2."""
        return plugin


class VersionOne(FsdpVersion):
    """FSDP 1 (`FullyShardedDataParallel`)."""

    number = 1
    policy_name = "MixedPrecision"
    offload_name = "CPUOffload"
    state_dict_type = "FULL_STATE_DICT"

    def policy_of_dtype(self, dtype: torch.dtype, buffer_dtype: torch.dtype) -> Any:
        return torch_class(self.policy_name)(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=buffer_dtype)

    def _offload(self, offloads: bool) -> Any:
        return torch_class(self.offload_name)(offload_params=offloads)

    def read_fields(self, plugin: FullyShardedDataParallelPlugin, variables: Mapping[str, Any]) -> None:
        self._read_strategy(plugin, variables)
        fill(plugin, variables, ("backward_prefetch",))
        plugin.backward_prefetch = read_prefetch(plugin.backward_prefetch)
        sync = plugin.sync_module_states
        for name in _FLAGS_OF_FSDP1:
            setattr(plugin, name, flag_of(plugin, name, variables))
        if plugin.cpu_ram_efficient_loading and not plugin.sync_module_states:
            if sync is not None or "sync_module_states" in variables:
                raise conflict_error(
                    "with cpu_ram_efficient_loading only rank 0 has weights, and sync_module_states=False "
                    "does not send them to the other ranks",
                    "Set sync_module_states=True",
                )
            plugin.sync_module_states = True

    @staticmethod
    def _read_strategy(plugin: FullyShardedDataParallelPlugin, variables: Mapping[str, Any]) -> None:
        reshard = plugin.reshard_after_forward
        if isinstance(reshard, bool):
            fix = "Give FULL_SHARD (for True), SHARD_GRAD_OP (for False) or another, or fsdp_version=2"
            reason = "FSDP 1 takes a sharding strategy there"
            raise wrong_value("reshard_after_forward", reshard, reason, fix)
        variable = variables.get("reshard_after_forward", "true")
        if reshard is None and str(variable).lower() not in ("true", "false"):
            reshard = variable
        if reshard is not None:
            plugin.reshard_after_forward = read_strategy("reshard_after_forward", reshard)
        strategy = plugin.sharding_strategy or plugin.reshard_after_forward
        strategy = strategy or variables.get("sharding_strategy", "FULL_SHARD")
        plugin.sharding_strategy = read_strategy("sharding_strategy", strategy)
        default = torch_class("ShardingStrategy").FULL_SHARD  # transformers always passes it
        if plugin.reshard_after_forward not in (None, default, plugin.sharding_strategy):
            raise conflict_error(
                f"sharding_strategy={plugin.sharding_strategy.name} and reshard_after_forward="
                f"{plugin.reshard_after_forward.name} differ",
                "Give one of them",
            )

    def to_fsdp2(self, plugin: FullyShardedDataParallelPlugin) -> FullyShardedDataParallelPlugin:
        """Returns a plugin of version 2, and warns of options that FSDP 2 replaces by others.

        The tables are those of `accelerate to-fsdp2`, which converts configuration files.
        """
        strategy, policy = plugin.sharding_strategy.name, plugin.mixed_precision_policy
        for part, note in STRATEGY_NOTES.items():
            if part in strategy:
                warnings.warn(f"FSDP 2 instead of {strategy}: {note}.", stacklevel=3)
        rows = [row for row in FsdpSection.options() if isinstance(ARGUMENT_KEY_MAPPING[str(row.key)], str)]
        fields: dict[str, Any] = {row.field: getattr(plugin, row.field) for row in rows}
        fields.update(
            fsdp_version=2,
            sharding_strategy=None,
            reshard_after_forward=ARGUMENT_VALUE_MAPPING["fsdp_sharding_strategy"][strategy.lstrip("_")],
            forward_prefetch=False,
            cpu_offload=plugin.cpu_offload.offload_params,
            mixed_precision_policy=policy
            and {name: getattr(policy, name) for name in ("param_dtype", "reduce_dtype")},
            state_dict_type=plugin.state_dict_type.name.replace("LOCAL", "SHARDED"),
        )
        return type(plugin)(**fields)


class VersionTwo(FsdpVersion):
    """FSDP 2 (`fully_shard`)."""

    number = 2
    policy_name = "MixedPrecisionPolicy"
    offload_name = "OffloadPolicy"
    state_dict_type = "SHARDED_STATE_DICT"
    shards_in_place = True
    takes_any_mesh = True
    is_spmd_on_xla = True
    has_local_states = False
    takes_state_dict_options = True
    offloads_activations = True

    def policy_of_dtype(self, dtype: torch.dtype, buffer_dtype: torch.dtype) -> Any:
        return torch_class(self.policy_name)(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)

    def _offload(self, offloads: bool) -> Any:
        return torch_class("CPUOffloadPolicy" if offloads else self.offload_name)()

    def read_fields(self, plugin: FullyShardedDataParallelPlugin, variables: Mapping[str, Any]) -> None:
        """Fills `reshard_after_forward`, and sets the fields of version 1 to None."""
        if plugin.sharding_strategy is not None:
            fix = (
                "Use reshard_after_forward=True (FULL_SHARD) or False (SHARD_GRAD_OP); a mesh with "
                "dp_replicate_size for HYBRID_SHARD"
            )
            reason = "FSDP 2 has no sharding strategies"
            raise wrong_value("sharding_strategy", plugin.sharding_strategy, reason, fix)
        if flag_of(plugin, "forward_prefetch", variables):
            reason = "FSDP 2 always prefetches and has no such option"
            raise wrong_value("forward_prefetch", True, reason, "Leave it out, or set fsdp_version=1")
        for name in ("backward_prefetch", *_FLAGS_OF_FSDP1):
            setattr(plugin, name, None)
        fill(plugin, {"reshard_after_forward": True, **variables}, ("reshard_after_forward",))
        plugin.reshard_after_forward = read_flag("reshard_after_forward", plugin.reshard_after_forward)


VERSIONS: dict[int, FsdpVersion] = {1: VersionOne(), 2: VersionTwo()}


def version_of(plugin: FullyShardedDataParallelPlugin) -> FsdpVersion:
    """Returns the version of FSDP that a plugin selects."""
    return VERSIONS[plugin.fsdp_version]
