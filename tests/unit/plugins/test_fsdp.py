"""The plugin holds torch's objects, from arguments, text and the environment, and refuses invalid values."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from accelerate import FullyShardedDataParallelPlugin
from accelerate.base import ConfigurationError, constants
from accelerate.plugins import (
    bind_policy,
    find_units,
    fsdp_versions as choices,
    get_module_class_from_name,
    read_policy,
)

LAUNCHED = {
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "A, B",
    "FSDP_USE_ORIG_PARAMS": "true",
}


class Layer(torch.nn.Linear):
    """A layer that becomes a unit."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(2, 2), Layer(2, 2)])


def test_version_one_by_default() -> None:
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 1
    assert plugin.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert plugin.reshard_after_forward is None
    assert plugin.backward_prefetch is None
    assert plugin.cpu_offload == CPUOffload(offload_params=False)
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    assert plugin.state_dict_config == FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert (plugin.use_orig_params, plugin.sync_module_states, plugin.forward_prefetch) == (False,) * 3
    assert (plugin.auto_wrap_policy, plugin.mixed_precision_policy, plugin.min_num_params) == (None,) * 3


def test_version_two_has_none_of_the_fields_of_one() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, use_orig_params=True, backward_prefetch="BACKWARD_PRE"
    )
    assert plugin.reshard_after_forward is True
    assert type(plugin.cpu_offload) is OffloadPolicy
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert isinstance(plugin.state_dict_config, ShardedStateDictConfig)
    fields = (
        "sharding_strategy",
        "backward_prefetch",
        "use_orig_params",
        "sync_module_states",
        "forward_prefetch",
    )
    assert [getattr(plugin, name) for name in fields] == [None] * 5


@pytest.mark.parametrize(
    ("given", "field", "expected"),
    [
        (
            {"sharding_strategy": "hybrid_shard_zero2"},
            "sharding_strategy",
            ShardingStrategy._HYBRID_SHARD_ZERO2,
        ),
        ({"sharding_strategy": 3}, "sharding_strategy", ShardingStrategy.NO_SHARD),
        ({"sharding_strategy": "2"}, "sharding_strategy", ShardingStrategy.SHARD_GRAD_OP),
        ({"sharding_strategy": ShardingStrategy.NO_SHARD}, "sharding_strategy", ShardingStrategy.NO_SHARD),
        ({"reshard_after_forward": "shard_grad_op"}, "sharding_strategy", ShardingStrategy.SHARD_GRAD_OP),
        (
            {"sharding_strategy": "no_shard", "reshard_after_forward": "FULL_SHARD"},  # as transformers 5.0
            "sharding_strategy",
            ShardingStrategy.NO_SHARD,
        ),
        ({"backward_prefetch": "backward_post"}, "backward_prefetch", BackwardPrefetch.BACKWARD_POST),
        ({"backward_prefetch": "NO_PREFETCH"}, "backward_prefetch", None),
        ({"cpu_offload": True}, "cpu_offload", CPUOffload(offload_params=True)),
        ({"cpu_offload": True, "fsdp_version": 2}, "cpu_offload", CPUOffloadPolicy()),
        ({"reshard_after_forward": "false", "fsdp_version": "2"}, "reshard_after_forward", False),
        ({"state_dict_type": "local_state_dict"}, "state_dict_type", StateDictType.LOCAL_STATE_DICT),
        (
            {"state_dict_type": StateDictType.LOCAL_STATE_DICT},
            "state_dict_type",
            StateDictType.LOCAL_STATE_DICT,
        ),
        ({"auto_wrap_policy": "size_based_wrap"}, "auto_wrap_policy", size_based_auto_wrap_policy),
        ({"auto_wrap_policy": "no_wrap"}, "auto_wrap_policy", None),
        ({"transformer_cls_names_to_wrap": "A,B"}, "transformer_cls_names_to_wrap", ["A", "B"]),
        (
            {"mixed_precision_policy": {"param_dtype": "bfloat16"}},
            "mixed_precision_policy",
            MixedPrecision(param_dtype=torch.bfloat16),
        ),
        (
            {"mixed_precision_policy": "fp16", "fsdp_version": 2},
            "mixed_precision_policy",
            MixedPrecisionPolicy(torch.float16, torch.float16, torch.float16),
        ),
        (
            {"mixed_precision_policy": "fp8"},
            "mixed_precision_policy",
            MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ),
        (
            {
                "mixed_precision_policy": {
                    "param_dtype": torch.float16,
                    "reduce_dtype": "FP32",
                    "cast_forward_inputs": False,
                },
                "fsdp_version": 2,
            },
            "mixed_precision_policy",
            MixedPrecisionPolicy(torch.float16, torch.float32, None, cast_forward_inputs=False),
        ),
        ({"cpu_ram_efficient_loading": "no"}, "cpu_ram_efficient_loading", False),
    ],
)
def test_text_becomes_objects_of_torch(given: dict[str, Any], field: str, expected: Any) -> None:
    assert getattr(FullyShardedDataParallelPlugin(**given), field) == expected


def test_the_launcher_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    one = FullyShardedDataParallelPlugin()
    assert one.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert one.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    assert one.auto_wrap_policy is transformer_auto_wrap_policy
    assert one.transformer_cls_names_to_wrap == ["A", "B"]
    assert (one.use_orig_params, one.sync_module_states, one.min_num_params) == (True, True, None)
    assert one.state_dict_type is StateDictType.SHARDED_STATE_DICT
    monkeypatch.setenv("FSDP_VERSION", "2")
    two = FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap")
    assert (two.fsdp_version, two.reshard_after_forward, two.sharding_strategy) == (2, True, None)
    assert (two.min_num_params, two.transformer_cls_names_to_wrap) == (100_000_000, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fsdp_version": 3}, "fsdp_version=3: .* Choose one of 1, 2"),
        ({"sharding_strategy": "X"}, "sharding_strategy='X': .* Choose one of FULL_SHARD"),
        *(({"sharding_strategy": number}, f"sharding_strategy={number!r}") for number in ("0", "6", 6)),
        ({"backward_prefetch": "X"}, "backward_prefetch='X'"),
        ({"state_dict_type": "X"}, "state_dict_type='X'"),
        ({"auto_wrap_policy": "X"}, "auto_wrap_policy='X'"),
        ({"mixed_precision_policy": "X"}, "mixed_precision='X'"),
        (
            {"mixed_precision_policy": {"output_dtype": "float16"}},
            "MixedPrecision of fsdp_version=1 has no output_d",
        ),
        ({"mixed_precision_policy": MixedPrecisionPolicy()}, "fsdp_version=1 takes .*MixedPrecision"),
        ({"mixed_precision_policy": MixedPrecision(), "fsdp_version": 2}, "fsdp_version=2 takes"),
        ({"cpu_offload": CPUOffloadPolicy()}, "fsdp_version=1 takes"),
        ({"cpu_offload": CPUOffload(True), "fsdp_version": 2}, "fsdp_version=2 takes"),
        ({"reshard_after_forward": True}, "FSDP 1 takes a sharding strategy"),
        (
            {"reshard_after_forward": "SHARD_GRAD_OP", "sharding_strategy": "NO_SHARD"},
            "reshard_after_forward=SHARD_GRAD_OP differ",
        ),
        ({"reshard_after_forward": "FULL_SHARD", "fsdp_version": 2}, "neither a yes nor a no"),
        ({"sharding_strategy": "FULL_SHARD", "fsdp_version": 2}, "has no sharding strategies. Use reshard"),
        ({"forward_prefetch": True, "fsdp_version": 2}, "always prefetches"),
        ({"state_dict_type": "LOCAL_STATE_DICT", "fsdp_version": 2}, "has no LOCAL_STATE_DICT"),
        ({"activation_checkpointing_offload": True}, "Set activation_checkpointing=True"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_offload": True},
            "works with FSDP 2 only",
        ),
        ({"cpu_ram_efficient_loading": True, "sync_module_states": False}, "Set sync_module_states=True"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FullyShardedDataParallelPlugin(**given)


def test_efficient_loading_sets_the_variable_of_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)
    assert plugin.sync_module_states
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"


def test_set_state_dict_type_sets_the_config() -> None:
    plugin = FullyShardedDataParallelPlugin(state_dict_config=FullStateDictConfig())
    assert plugin.state_dict_config == FullStateDictConfig()
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    assert isinstance(plugin.state_dict_config, ShardedStateDictConfig)
    assert "SHARDED_STATE_DICT" in str(plugin.state_dict_type)


def test_set_mixed_precision_keeps_what_was_chosen() -> None:
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision("bf16", buffer_autocast=True)
    assert plugin.mixed_precision_policy == MixedPrecision(torch.bfloat16, torch.bfloat16, torch.float32)
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16
    plugin.set_mixed_precision(torch.float16, override=True)
    assert plugin.mixed_precision_policy.param_dtype is torch.float16
    plugin.mixed_precision_policy = "text"
    with pytest.raises(ConfigurationError, match="takes torch.distributed.fsdp.MixedPrecision"):
        plugin.validate_mixed_precision_policy()


def test_set_auto_wrap_policy_binds_it_to_a_model() -> None:
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Layer"]
    )
    plugin.set_auto_wrap_policy(Model())
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {Layer}}
    plugin.auto_wrap_policy = "size_based_wrap"  # fields may be changed until a model is prepared
    plugin.min_num_params = 5
    plugin.set_auto_wrap_policy(Model())
    assert plugin.auto_wrap_policy.keywords == {"min_num_params": 5}


def test_offload_may_be_set_later() -> None:
    plugin = FullyShardedDataParallelPlugin()
    plugin.cpu_offload = True
    plugin.set_cpu_offload()
    plugin.validate_cpu_offload()
    assert plugin.cpu_offload == CPUOffload(offload_params=True)
    plugin.cpu_offload = OffloadPolicy()
    with pytest.raises(ConfigurationError, match="fsdp_version=1 takes"):
        plugin.validate_cpu_offload()


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


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Outer(nn.Module):
    _no_split_modules = ("Inner", "Absent")

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Inner(), Inner()])
        self.head = nn.Linear(4, 2)


def names(model: nn.Module, units: list[nn.Module]) -> list[str]:
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(unit)] for unit in units]


def test_classes_by_name() -> None:
    assert get_module_class_from_name(Outer(), "Inner") is Inner
    assert get_module_class_from_name(Outer(), "Outer") is Outer
    assert get_module_class_from_name(Outer(), "Absent") is None


@pytest.mark.parametrize("layers", [["Inner"], None])
def test_layers_to_wrap_are_those_of_the_user_or_the_model(layers: list[str] | None) -> None:
    model = Outer()
    policy = bind_policy(read_policy("TRANSFORMER_BASED_WRAP"), model, layers, None)
    assert names(model, find_units(model, policy)) == ["inner.0", "inner.1"]


def test_a_missing_layer_is_named() -> None:
    with pytest.raises(ConfigurationError, match="names Absent, and Outer has no .* Name some of Inner"):
        bind_policy(read_policy("transformer_based_wrap"), Outer(), ["Absent"], None)


def test_sizes() -> None:
    model = Outer()
    policy = bind_policy(read_policy("size_based_wrap"), model, None, 15)
    assert names(model, find_units(model, policy)) == ["inner.0.linear", "inner.1.linear"]
    assert bind_policy(size_based_auto_wrap_policy, model, None, 0) is None


def test_no_policy_makes_no_units() -> None:
    assert read_policy(None) is None
    assert read_policy("NO_WRAP") is None
    assert find_units(Outer(), None) == []


def test_policies_of_users() -> None:
    def only_heads(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or isinstance(module, nn.Linear) and nonwrapped_numel == 10

    model = Outer()
    assert names(model, find_units(model, only_heads)) == ["head"]
    assert names(model, find_units(model, ModuleWrapPolicy({Inner}))) == ["inner.1", "inner.0"]
    bound = partial(only_heads)
    assert bind_policy(bound, model, ["Inner"], 3) is bound


def test_a_module_in_two_places_is_one_unit() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model.append(model[0])
    policy = bind_policy(read_policy("size_based_wrap"), model, None, 5)
    assert find_units(model, policy) == [model[0]]
    assert all(isinstance(unit, torch.nn.Linear) for unit in find_units(model, policy))
