"""The versions of FSDP: what each takes from torch, and how it reads the fields of the plugin."""

from __future__ import annotations

import dataclasses
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from accelerate.base import wrong_value
from accelerate.plugins import fsdp_choices as choices
from accelerate.plugins.checks import read_flag
from accelerate.settings import ARGUMENT_KEY_MAPPING, ARGUMENT_VALUE_MAPPING, STRATEGY_NOTES

if TYPE_CHECKING:
    import torch

    from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin

_FLAGS_OF_ONE = ("use_orig_params", "sync_module_states", "forward_prefetch")


class FsdpVersion(ABC):
    """One version of FSDP."""

    number: ClassVar[Literal[1, 2]]
    policy_name: ClassVar[str]
    offload_name: ClassVar[str]

    state_dict_type: ClassVar[str]
    """The form in which states are saved unless the user says otherwise."""

    takes_any_mesh: ClassVar[bool]
    """Whether parameters are sharded over meshes of several axes, and not in hybrid strategies only."""

    is_spmd_on_xla: ClassVar[bool]
    """Whether one process drives all XLA devices of its machine."""

    has_local_states: ClassVar[bool]
    """Whether states can be saved as LOCAL_STATE_DICT."""

    takes_state_dict_options: ClassVar[bool]
    """Whether states are read and set with torch's `StateDictOptions`."""

    offloads_activations: ClassVar[bool]
    """Whether activations that are kept can wait on the CPU."""

    @property
    def policy_class(self) -> type[Any]:
        """Torch's class of mixed precision policies."""
        return _class_of_torch(self.policy_name)

    @abstractmethod
    def policy_of_dtype(self, dtype: torch.dtype, buffer_dtype: torch.dtype) -> Any:
        """Return the policy that computes, reduces and returns in one dtype.

        Args:
            dtype: of parameters, gradients when they are reduced and (version 2) outputs of units.
            buffer_dtype: of buffers (version 1; version 2 leaves them alone).
        """

    def policy_of_mapping(self, value: dict[str, Any]) -> Any:
        """Return the policy with these fields.

        Args:
            value: field name -> dtype, as torch's object or its name.

        Raises:
            ConfigurationError: the policy of this version has no such field, or that is no dtype.
        """
        kind = self.policy_class
        known = [entry.name for entry in dataclasses.fields(kind)]
        strange = [name for name in value if name not in known]
        if strange:
            raise wrong_value(
                "mixed_precision_policy",
                value,
                f"{self.policy_name} of fsdp_version={self.number} has no {', '.join(strange)}",
                f"Use some of {', '.join(known)}",
            )
        return kind(**{name: choices.dtype_of_field(name, entry) for name, entry in value.items()})

    def check_policy(self, policy: Any) -> None:
        """Refuse a mixed precision policy of the other version.

        Raises:
            ConfigurationError: the policy is not of the class that this version takes.
        """
        if policy is not None and not isinstance(policy, self.policy_class):
            raise wrong_value(
                "mixed_precision_policy",
                policy,
                f"fsdp_version={self.number} takes torch.distributed.fsdp.{self.policy_name}",
                "Give that, a dictionary of its fields, or the name of a number format",
            )

    def offload_of(self, value: Any) -> Any:
        """Return torch's object for where parameters are kept between uses.

        Args:
            value: whether they are on the CPU, or torch's own object.

        Raises:
            ConfigurationError: it is the object of the other version, or none.
        """
        if not isinstance(
            value, tuple(_class_of_torch(version.offload_name) for version in VERSIONS.values())
        ):
            return self._offload(read_flag("cpu_offload", value))
        if not isinstance(value, _class_of_torch(self.offload_name)):
            raise wrong_value(
                "cpu_offload",
                value,
                f"fsdp_version={self.number} takes torch.distributed.fsdp.{self.offload_name}",
                "Give True or False, which fit both versions",
            )
        return value

    @abstractmethod
    def _offload(self, offloads: bool) -> Any: ...

    @abstractmethod
    def read_fields(self, plugin: FullyShardedDataParallelPlugin, found: Mapping[str, Any]) -> None:
        """Fill the fields that the versions read differently.

        Args:
            plugin: changed in place.
            found: values of the environment by field.

        Raises:
            ConfigurationError: a value that this version does not take.
        """

    def to_fsdp2(
        self, plugin: FullyShardedDataParallelPlugin, options: Mapping[str, str]
    ) -> FullyShardedDataParallelPlugin:
        """Return the plugin with which version 2 trains in the same way.

        Args:
            plugin: not changed.
            options: its fields -> the options that they stand for.
        """
        return plugin


class VersionOne(FsdpVersion):
    """FSDP 1: `FullyShardedDataParallel`."""

    number = 1
    policy_name = "MixedPrecision"
    offload_name = "CPUOffload"
    state_dict_type = "FULL_STATE_DICT"
    takes_any_mesh = False
    is_spmd_on_xla = False
    has_local_states = True
    takes_state_dict_options = False
    offloads_activations = False

    def policy_of_dtype(self, dtype: torch.dtype, buffer_dtype: torch.dtype) -> Any:
        """Return the policy that computes and reduces in one dtype."""
        return self.policy_class(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=buffer_dtype)

    def _offload(self, offloads: bool) -> Any:
        return _class_of_torch(self.offload_name)(offload_params=offloads)

    def read_fields(self, plugin: FullyShardedDataParallelPlugin, found: Mapping[str, Any]) -> None:
        """Read the sharding strategy, prefetching, and what the wrappers do."""
        self._read_strategy(plugin, found)
        prefetch = plugin.backward_prefetch
        plugin.backward_prefetch = choices.read_prefetch(
            found.get("backward_prefetch") if prefetch is None else prefetch
        )
        asked = plugin.sync_module_states
        for name in _FLAGS_OF_ONE:
            setattr(plugin, name, choices.flag_of(plugin, name, found))
        if plugin.cpu_ram_efficient_loading and not plugin.sync_module_states:
            if asked is not None or "sync_module_states" in found:
                raise choices.refuse(
                    "with cpu_ram_efficient_loading only rank 0 has weights, and sync_module_states=False "
                    "keeps them from the others",
                    "Set sync_module_states=True",
                )
            plugin.sync_module_states = True

    @staticmethod
    def _read_strategy(plugin: FullyShardedDataParallelPlugin, found: Mapping[str, Any]) -> None:
        given, same = plugin.sharding_strategy, plugin.reshard_after_forward
        if isinstance(same, bool):
            raise wrong_value(
                "reshard_after_forward",
                same,
                "FSDP 1 takes a sharding strategy there",
                "Give FULL_SHARD (for True), SHARD_GRAD_OP (for False) or another, or fsdp_version=2",
            )
        if same is None and str(found.get("reshard_after_forward", "true")).lower() not in ("true", "false"):
            same = found["reshard_after_forward"]
        if same is not None:
            plugin.reshard_after_forward = choices.read_strategy("reshard_after_forward", same)
        chosen = given or plugin.reshard_after_forward or found.get("sharding_strategy", "FULL_SHARD")
        plugin.sharding_strategy = choices.read_strategy("sharding_strategy", chosen)
        if plugin.reshard_after_forward not in (None, plugin.sharding_strategy):
            raise choices.refuse(
                f"sharding_strategy={plugin.sharding_strategy.name} and reshard_after_forward="
                f"{plugin.reshard_after_forward.name} say two different things",
                "Give one of them",
            )

    def to_fsdp2(
        self, plugin: FullyShardedDataParallelPlugin, options: Mapping[str, str]
    ) -> FullyShardedDataParallelPlugin:
        """Return a plugin of version 2, by the tables that convert files; warn of what has no counterpart."""
        strategy, policy = plugin.sharding_strategy.name, plugin.mixed_precision_policy
        for part, note in STRATEGY_NOTES.items():
            if part in strategy:
                warnings.warn(f"FSDP 2 instead of {strategy}: {note}.", stacklevel=3)
        kept = [field for field, option in options.items() if isinstance(ARGUMENT_KEY_MAPPING[option], str)]
        fields: dict[str, Any] = {field: getattr(plugin, field) for field in kept}
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
    """FSDP 2: `fully_shard`."""

    number = 2
    policy_name = "MixedPrecisionPolicy"
    offload_name = "OffloadPolicy"
    state_dict_type = "SHARDED_STATE_DICT"
    takes_any_mesh = True
    is_spmd_on_xla = True
    has_local_states = False
    takes_state_dict_options = True
    offloads_activations = True

    def policy_of_dtype(self, dtype: torch.dtype, buffer_dtype: torch.dtype) -> Any:
        """Return the policy that computes, reduces and returns in one dtype; buffers stay as they are."""
        return self.policy_class(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)

    def _offload(self, offloads: bool) -> Any:
        return _class_of_torch("CPUOffloadPolicy" if offloads else self.offload_name)()

    def read_fields(self, plugin: FullyShardedDataParallelPlugin, found: Mapping[str, Any]) -> None:
        """Read whether parameters are freed after forward; what only version 1 has becomes None."""
        if plugin.sharding_strategy is not None:
            raise wrong_value(
                "sharding_strategy",
                plugin.sharding_strategy,
                "FSDP 2 has no sharding strategies",
                "Use reshard_after_forward=True (FULL_SHARD) or False (SHARD_GRAD_OP); a mesh with "
                "dp_replicate_size for HYBRID_SHARD",
            )
        if choices.flag_of(plugin, "forward_prefetch", found):
            raise wrong_value(
                "forward_prefetch",
                True,
                "FSDP 2 fetches ahead by itself and has no such switch",
                "Leave it out, or set fsdp_version=1",
            )
        for name in ("backward_prefetch", *_FLAGS_OF_ONE):
            setattr(plugin, name, None)
        reshard = plugin.reshard_after_forward
        if reshard is None:
            reshard = found.get("reshard_after_forward", True)
        plugin.reshard_after_forward = read_flag("reshard_after_forward", reshard)


VERSIONS: dict[int, FsdpVersion] = {1: VersionOne(), 2: VersionTwo()}


def version_of(plugin: Any) -> FsdpVersion:
    """Return the version of FSDP that a plugin asks for."""
    return VERSIONS[plugin.fsdp_version]


def read_version(asked: Any) -> Literal[1, 2]:
    """Return the number of a version, which may be given as text.

    Raises:
        ConfigurationError: there is no such version.
    """
    for version in VERSIONS.values():
        if str(asked) == str(version.number):
            return version.number
    raise wrong_value("fsdp_version", asked, "there is no such version of FSDP", "Choose 1 or 2")


def _class_of_torch(name: str) -> type[Any]:
    """Return a class of torch.distributed.fsdp, which takes a second to import."""
    return getattr(import_module("torch.distributed.fsdp"), name)  # type: ignore[no-any-return]
