"""Text of users and the objects of torch."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)

from accelerate.base import ConfigurationError, constants
from accelerate.plugins import fsdp_versions as choices
from accelerate.plugins.checks import read_flag
from accelerate.plugins.fsdp_versions import VERSIONS


@pytest.mark.parametrize(("value", "expected"), [("Yes", True), (True, True), ("0", False), (False, False)])
def test_flags_are_read_from_text_and_booleans(value: Any, expected: bool) -> None:
    assert read_flag("name", value) is expected


def test_an_invalid_flag_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="name='maybe'"):
        read_flag("name", "maybe")


def test_objects_of_torch_are_returned_unchanged() -> None:
    assert choices.read_strategy("name", ShardingStrategy.NO_SHARD) is ShardingStrategy.NO_SHARD
    kind = StateDictType.FULL_STATE_DICT
    assert choices.read_member("name", kind, "StateDictType", []) is kind
    assert choices.read_dtype(torch.float16) is torch.float16
    assert choices.read_prefetch(None) is None
    assert choices.read_prefetch("no_prefetch") is None
    assert choices.read_prefetch("backward_post") is BackwardPrefetch.BACKWARD_POST


@pytest.mark.parametrize("number", ["0", "6", 6])
def test_numbers_of_strategies_end(number: Any) -> None:
    with pytest.raises(ConfigurationError, match="sharding_strategy"):
        choices.read_strategy("sharding_strategy", number)


def test_dtype_names_are_read_and_fp8_is_bfloat16() -> None:
    assert choices.read_dtype("fp8") is torch.bfloat16
    assert choices.read_dtype("FP32") is torch.float32
    with pytest.raises(ConfigurationError, match="mixed_precision='int4'"):
        choices.read_dtype("int4")


def test_fields_of_policies() -> None:
    fields = {"param_dtype": "bf16", "reduce_dtype": torch.float32, "cast_forward_inputs": False}
    assert VERSIONS[2].policy_of_mapping(fields) == MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, None, cast_forward_inputs=False
    )
    assert VERSIONS[1].policy_of_mapping({"param_dtype": "bf16"}) == MixedPrecision(torch.bfloat16)
    assert VERSIONS[1].policy_of_dtype(torch.float16, torch.float32) == MixedPrecision(
        torch.float16, torch.float16, torch.float32
    )


def test_local_states_have_no_details() -> None:
    assert choices.state_dict_configs("LOCAL_STATE_DICT") == (None, None)


@pytest.mark.parametrize(
    ("names", "known"),
    [
        (choices.StrategyName, constants.FSDP_SHARDING_STRATEGY),
        (choices.PrefetchName, constants.FSDP_BACKWARD_PREFETCH),
        (choices.WrapPolicyName, constants.FSDP_AUTO_WRAP_POLICY),
        (choices.StateDictName, constants.FSDP_STATE_DICT_TYPE),
    ],
)
def test_type_checkers_accept_names_in_any_case(names: Any, known: list[str]) -> None:
    assert set(get_args(names)) == {*known, *map(str.lower, known)}
