"""Settings of the plugin become those of torch_xla."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from accelerate import FullyShardedDataParallelPlugin
from accelerate.base import ConfigurationError
from accelerate.strategies.xla import policy_of, refuse_unsupported, units_on_xla


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def test_layers_are_units() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    whole: Any = model()
    policy = policy_of(plugin, whole)
    assert units_on_xla(whole, policy) == [whole[1][0], whole[0], whole]


def test_large_modules_are_units() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=50
    )
    whole: Any = model()
    assert whole[1][0] in units_on_xla(whole, policy_of(plugin, whole))
    assert whole[0] not in units_on_xla(whole, policy_of(plugin, whole))


def test_without_a_policy_the_model_is_one_unit() -> None:
    whole = model()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert policy_of(plugin, whole) is None
    assert units_on_xla(whole, None) == [whole]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", ["cpu_offload", "ignored_modules"])
def test_settings_for_gpus_only_are_refused(version: int, name: str) -> None:
    value: Any = [nn.Linear(1, 1)] if name == "ignored_modules" else True
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **{name: value})
    with pytest.raises(ConfigurationError, match=f"fsdp_plugin has {name}, .*XLA"):
        refuse_unsupported(plugin)
    refuse_unsupported(FullyShardedDataParallelPlugin(fsdp_version=version))
