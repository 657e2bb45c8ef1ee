"""Models built in shards: DeepSpeed's `zero.Init`, and how transformers learns of it.

Source: https://deepspeed.readthedocs.io/en/latest/zero3.html#constructing-massive-models
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate.base import packages
from accelerate.plugins.deepspeed_config import without_auto
from accelerate.settings import AUTO


def config_to_build(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that is complete enough to build a model in shards.

    Args:
        config: may hold "auto"; batch sizes have no effect on how a model is built.
    """
    complete = without_auto(config)
    batch = complete.pop("train_micro_batch_size_per_gpu", None)
    for name in ("train_batch_size", "gradient_accumulation_steps"):
        complete.pop(name, None)
    return {**complete, "train_micro_batch_size_per_gpu": 1 if batch in (None, AUTO) else batch}


def build_sharded(config: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Return a context in which modules are built in shards; entered on all ranks.

    Args:
        config: of ZeRO stage 3.
    """
    packages.require("deepspeed", "Building models in shards")
    import deepspeed

    sharded: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=config_to_build(config))
    return sharded


def leave_whole() -> AbstractContextManager[None]:
    """Return a context that leaves models as they are built."""
    return nullcontext()


def show_to_transformers(config: Mapping[str, Any], sharded: bool, shown: Any) -> Any:
    """Let transformers know whether models are built in shards.

    Args:
        config: of DeepSpeed.
        sharded: whether they are.
        shown: what an earlier call returned.

    Returns:
        What transformers looks at for as long as it lives; None where models are whole, or without
        transformers.
    """
    if not sharded and shown is None:
        return None
    if not packages.is_transformers_available() or not packages.is_deepspeed_available():
        return None
    from transformers.integrations import deepspeed as glue

    if sharded:
        return glue.HfDeepSpeedConfig(config_to_build(config))
    glue.unset_hf_deepspeed_config()
    return None
