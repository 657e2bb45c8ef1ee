"""What users write for FSDP as text, numbers or flags -> the objects that torch takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

from accelerate.base import (
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
    ConfigurationError,
)
from accelerate.plugins.checks import one_of, read_flag

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType

T = TypeVar("T", contravariant=True)


class Given(Protocol[T]):
    """For type checkers: a field that takes `T`, and holds torch's object after construction."""

    def __get__(self, plugin: object, kind: Any = None) -> Any: ...
    def __set__(self, plugin: object, value: T) -> None: ...


# For type checkers: the names in `base/constants.py`, in capital and in small letters.
StrategyName: TypeAlias = Literal[
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2",
    "full_shard",
    "shard_grad_op",
    "no_shard",
    "hybrid_shard",
    "hybrid_shard_zero2",
]
PrefetchName: TypeAlias = Literal[
    "BACKWARD_PRE",
    "BACKWARD_POST",
    "NO_PREFETCH",
    "backward_pre",
    "backward_post",
    "no_prefetch",
]
WrapPolicyName: TypeAlias = Literal[
    "TRANSFORMER_BASED_WRAP",
    "SIZE_BASED_WRAP",
    "NO_WRAP",
    "transformer_based_wrap",
    "size_based_wrap",
    "no_wrap",
]
StateDictName: TypeAlias = Literal[
    "FULL_STATE_DICT",
    "LOCAL_STATE_DICT",
    "SHARDED_STATE_DICT",
    "full_state_dict",
    "local_state_dict",
    "sharded_state_dict",
]

LOW_PRECISIONS = {"fp8": "bfloat16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Names of number formats, and the dtype that sharded parameters are computed in; FP8 layers cast by
themselves."""


def flag_of(plugin: Any, name: str, found: Mapping[str, Any]) -> bool:
    """Return the truth value of a field: as given, else as the environment says, else no."""
    given = getattr(plugin, name)
    return read_flag(name, found.get(name, False) if given is None else given)


def read_strategy(name: str, value: Any) -> ShardingStrategy:
    """Return the sharding strategy of FSDP 1 that a name in any case, or a number from 1, stands for.

    Raises:
        ConfigurationError: there is no such strategy.
    """
    from torch.distributed.fsdp import ShardingStrategy

    if isinstance(value, ShardingStrategy):
        return value
    text = str(value).upper()
    if text.isdecimal() and 1 <= int(text) <= len(FSDP_SHARDING_STRATEGY):
        text = FSDP_SHARDING_STRATEGY[int(text) - 1]
    one_of(name, text, FSDP_SHARDING_STRATEGY, value, KeyError)
    return ShardingStrategy["_HYBRID_SHARD_ZERO2" if text == "HYBRID_SHARD_ZERO2" else text]


def read_prefetch(value: Any) -> BackwardPrefetch | None:
    """Return when FSDP 1 fetches the next unit in backward; None for never.

    Raises:
        ConfigurationError: there is no such choice.
    """
    from torch.distributed.fsdp import BackwardPrefetch

    if value is None or isinstance(value, BackwardPrefetch):
        return value
    text = str(value).upper()
    one_of("backward_prefetch", text, FSDP_BACKWARD_PREFETCH, value, KeyError)
    return None if text == "NO_PREFETCH" else BackwardPrefetch[text]


def read_state_dict_type(value: Any) -> StateDictType:
    """Return in which form states are saved, from a name in any case.

    Raises:
        ConfigurationError: there is no such form.
    """
    from torch.distributed.fsdp import StateDictType

    if isinstance(value, StateDictType):
        return value
    text = str(value).upper()
    one_of("state_dict_type", text, FSDP_STATE_DICT_TYPE, value, KeyError)
    return StateDictType[text]


def state_dict_configs(kind: StateDictType) -> tuple[Any, Any]:
    """Return the details of saving models and optimizers in one form; None where there are none."""
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
    )

    if kind.name == "FULL_STATE_DICT":
        whole = {"offload_to_cpu": True, "rank0_only": True}
        return FullStateDictConfig(**whole), FullOptimStateDictConfig(**whole)
    if kind.name == "SHARDED_STATE_DICT":
        return ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
    return None, None


def read_dtype(value: Any) -> torch.dtype:
    """Return the dtype of a number format.

    Args:
        value: a dtype, or "fp8", "fp16", "bf16" or "fp32".

    Raises:
        ConfigurationError: it is neither.
    """
    import torch

    if isinstance(value, torch.dtype):
        return value
    text = str(getattr(value, "value", value)).lower()
    one_of("mixed_precision", text, LOW_PRECISIONS, value, KeyError)
    return getattr(torch, LOW_PRECISIONS[text])  # type: ignore[no-any-return]


def dtype_of_field(name: str, value: Any) -> Any:
    """Return the value of a policy's field: a dtype where its name says so, anything else as it is.

    Args:
        name: of the field.
        value: a dtype, or the name of one or of a number format.

    Raises:
        ConfigurationError: there is no such dtype.
    """
    import torch

    if not name.endswith("_dtype") or value is None or isinstance(value, torch.dtype):
        return value
    found = getattr(torch, str(value).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else read_dtype(value)


def refuse(problem: str, fix: str) -> ConfigurationError:
    """Return the error for values that do not go together; the caller raises it."""
    return ConfigurationError(f"FullyShardedDataParallelPlugin: {problem}. {fix}.")
