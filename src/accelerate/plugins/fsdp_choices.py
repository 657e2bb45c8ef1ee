"""What users write for FSDP as text, numbers or flags -> the objects that torch takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

from accelerate.base import (
    FALSE_WORDS,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
    TRUE_WORDS,
    ConfigurationError,
    wrong_value,
)

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


def read_flag(name: str, value: Any) -> bool:
    """Return a truth value that may be written as a word.

    Args:
        name: what the value is called where the user gave it.
        value: a bool, or a word such as "true".

    Raises:
        ConfigurationError: it is neither a yes nor a no.
    """
    word = str(value).strip().lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise wrong_value(name, value, "it is neither a yes nor a no", "Give True or False")
    return word in TRUE_WORDS


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
    _known(name, value, text, FSDP_SHARDING_STRATEGY)
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
    _known("backward_prefetch", value, text, FSDP_BACKWARD_PREFETCH)
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
    _known("state_dict_type", value, text, FSDP_STATE_DICT_TYPE)
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


def offload_of(version: int, value: Any) -> Any:
    """Return where FSDP keeps parameters between uses.

    Args:
        version: of FSDP.
        value: whether they are on the CPU, or torch's own object.

    Raises:
        ConfigurationError: it is the object of the other version, or none.
    """
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    kind = CPUOffload if version == 1 else OffloadPolicy
    if isinstance(value, (CPUOffload, OffloadPolicy)):
        if not isinstance(value, kind):
            raise wrong_value(
                "cpu_offload",
                value,
                f"fsdp_version={version} takes torch.distributed.fsdp.{kind.__name__}",
                "Give True or False, which fit both versions",
            )
        return value
    offloads = read_flag("cpu_offload", value)
    if version == 1:
        return CPUOffload(offload_params=offloads)
    return CPUOffloadPolicy() if offloads else OffloadPolicy()


def policy_class(version: int) -> type[Any]:
    """Return torch's class of mixed precision policies for a version of FSDP."""
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    return MixedPrecision if version == 1 else MixedPrecisionPolicy


def policy_of_dtype(version: int, dtype: torch.dtype, buffer_dtype: torch.dtype) -> Any:
    """Return the policy that computes, reduces and returns in one dtype.

    Args:
        version: of FSDP.
        dtype: of parameters, gradients on the wire and (version 2) outputs of units.
        buffer_dtype: of buffers (version 1; version 2 leaves them alone).
    """
    last = {"buffer_dtype": buffer_dtype} if version == 1 else {"output_dtype": dtype}
    return policy_class(version)(param_dtype=dtype, reduce_dtype=dtype, **last)


def policy_of_mapping(version: int, value: dict[str, Any]) -> Any:
    """Return the policy with these fields.

    Args:
        version: of FSDP.
        value: field name -> dtype, as torch's object or its name.

    Raises:
        ConfigurationError: the policy of this version has no such field, or that is no dtype.
    """
    kind = policy_class(version)
    known = [entry.name for entry in dataclasses.fields(kind)]
    strange = [name for name in value if name not in known]
    if strange:
        raise wrong_value(
            "mixed_precision_policy",
            value,
            f"{kind.__name__} of fsdp_version={version} has no {', '.join(strange)}",
            f"Use some of {', '.join(known)}",
        )
    return kind(**{name: _dtype(name, entry) for name, entry in value.items()})


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
    _known("mixed_precision", value, text, LOW_PRECISIONS)
    return getattr(torch, LOW_PRECISIONS[text])  # type: ignore[no-any-return]


def _dtype(name: str, value: Any) -> Any:
    import torch

    if not name.endswith("_dtype") or value is None or isinstance(value, torch.dtype):
        return value
    found = getattr(torch, str(value).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else read_dtype(value)


def _known(name: str, value: Any, text: str, choices: Iterable[str]) -> None:
    if text not in choices:
        listed = ", ".join(choices)
        raise wrong_value(name, value, "it is not a known choice", f"Choose one of {listed}", KeyError)


def refuse(problem: str, fix: str) -> ConfigurationError:
    """Return the error for values that do not go together; the caller raises it.

    Args:
        problem: which values, and why.
        fix: what to do instead.
    """
    return ConfigurationError(f"FullyShardedDataParallelPlugin: {problem}. {fix}.")
