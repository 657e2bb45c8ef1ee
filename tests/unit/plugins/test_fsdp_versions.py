"""A plugin for FSDP 1 becomes one for FSDP 2 that trains in the same way."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, StateDictType

from accelerate import FullyShardedDataParallelPlugin


def converted(**fields: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(**fields).to_fsdp2()


def test_settings_of_both_versions_are_kept() -> None:
    new = converted(
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_offload=True,
        mixed_precision_policy="bf16",
        ignored_modules="head.*",
        activation_checkpointing=True,
        state_dict_type="FULL_STATE_DICT",
        use_orig_params=True,
        forward_prefetch=True,
        backward_prefetch="BACKWARD_PRE",
    )
    assert new.fsdp_version == 2
    assert new.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert new.transformer_cls_names_to_wrap == ["Block"]
    assert isinstance(new.cpu_offload, CPUOffloadPolicy)
    assert new.mixed_precision_policy == MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
    )
    assert new.ignored_modules == "head.*"
    assert new.activation_checkpointing
    assert new.state_dict_type is StateDictType.FULL_STATE_DICT
    assert (new.sharding_strategy, new.backward_prefetch, new.forward_prefetch) == (None, None, None)


@pytest.mark.parametrize(
    ("strategy", "reshards", "note"),
    [
        ("FULL_SHARD", True, None),
        ("SHARD_GRAD_OP", False, None),
        ("HYBRID_SHARD", True, "dp_replicate_size"),
        ("HYBRID_SHARD_ZERO2", False, "dp_replicate_size"),
        ("NO_SHARD", False, "always shards"),
    ],
)
def test_the_sharding_strategy_becomes_reshard_after_forward(
    strategy: str, reshards: bool, note: str | None
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert converted(sharding_strategy=strategy).reshard_after_forward is reshards
    assert [note in str(each.message) for each in caught] == [True] * bool(note)


def test_variables_of_fsdp_1_do_not_contradict_the_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")
    monkeypatch.setenv("FSDP_FORWARD_PREFETCH", "true")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "LOCAL_STATE_DICT")
    new = converted()
    assert new.reshard_after_forward is False
    assert new.state_dict_type is StateDictType.SHARDED_STATE_DICT


def test_one_for_fsdp_2_stays_the_same_object() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert plugin.to_fsdp2() is plugin
