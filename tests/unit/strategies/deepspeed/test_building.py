"""Tests of how an engine is built."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from accelerate import DeepSpeedPlugin
from accelerate.base import ConfigurationError, PreparationError, patch_environment
from accelerate.state import Topology
from accelerate.strategies.deepspeed import EngineInputs, building


def parameters():
    return [torch.nn.Parameter(torch.ones(1))]


def test_without_training_a_configuration_has_no_optimizer():
    built = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}}
    plugin = DeepSpeedPlugin(hf_ds_config={**built, "zero_optimization": {"stage": 3}})
    config = building.complete(plugin, EngineInputs(None))
    assert config["zero_optimization"]["stage"] == 3
    assert not {"optimizer", "scheduler"} & set(config)
    assert "optimizer" in plugin.deepspeed_config


@pytest.mark.parametrize(
    ("zero", "more", "maps"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, {}, True),
        ({"offload_optimizer": {"device": "none"}}, {}, False),
        ({"offload_optimizer": None}, {}, False),
        ({}, {}, False),
        ({"offload_optimizer": {"device": "nvme"}}, {"zero_force_ds_cpu_optimizer": False}, False),
    ],
)
def test_optimizers_of_states_on_the_cpu_are_deepspeeds(zero, more, maps, monkeypatch):
    optimizer, mapped = torch.optim.AdamW(parameters()), object()
    monkeypatch.setattr(building, "map_pytorch_optim_to_deepspeed", lambda given: mapped)
    config = {"zero_optimization": zero, **more}
    assert (building.choose_optimizer(optimizer, config) is mapped) is maps
    assert config["zero_allow_untested_optimizer"] is True


def test_an_optimizer_without_a_deepspeed_version_may_step_on_the_cpu(states):
    from accelerate import PartialState

    PartialState(cpu=True)
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    config = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert building.choose_optimizer(optimizer, config) is optimizer
    assert config["zero_force_ds_cpu_optimizer"] is False


def test_a_configuration_is_completed_again_from_other_objects():
    plugin = DeepSpeedPlugin()
    optimizer = torch.optim.AdamW(parameters())
    building.complete(plugin, EngineInputs(None, optimizer, batch_sizes=[8], replicas=2))
    assert plugin.deepspeed_config["train_batch_size"] == 16
    building.complete(plugin, EngineInputs(None, optimizer, batch_sizes=[4], replicas=2))
    assert plugin.deepspeed_config["train_batch_size"] == 8


def test_a_configuration_without_batch_sizes_uses_those_of_the_loader():
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}})
    config = building.complete(plugin, EngineInputs(None, object(), batch_sizes=[8]))
    assert config["train_micro_batch_size_per_gpu"] == 8
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = "4"  # by hand, later
    assert (
        building.complete(plugin, EngineInputs(None, object(), batch_sizes=[4]))[
            "train_micro_batch_size_per_gpu"
        ]
        == 4
    )
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = "many"
    with pytest.raises(ConfigurationError, match="train_micro_batch_size_per_gpu is 'many'"):
        building.complete(plugin, EngineInputs(None, object(), batch_sizes=[4]))


def test_an_error_of_deepspeed_is_a_preparation_error(package, monkeypatch):
    def refuse(**arguments):
        raise AssertionError("Foo is not a supported DeepSpeed Optimizer")

    monkeypatch.setattr(package, "initialize", refuse)
    with pytest.raises(PreparationError, match="Foo is not a supported"):
        building.build_engine(torch.nn.Linear(1, 1), None, None, {})


def test_a_model_that_is_not_trained_leaves_the_configuration_open():
    plugin = DeepSpeedPlugin()
    config = building.complete(plugin, EngineInputs(None, batch_sizes=[8]))
    assert config["train_batch_size"] == 8
    assert plugin.deepspeed_config["train_batch_size"] == "auto"


def test_deepspeed_gets_the_variables_of_a_rank():
    variables = building._rank_variables(
        Topology(rank=3, size=4, local_rank=1, local_size=2, address="host", port=1)
    )
    assert variables == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "1",
    }


def test_the_innermost_optimizer_is_torchs():
    inner = torch.optim.SGD(parameters(), lr=0.1)
    assert building.torch_optimizer_of(SimpleNamespace(optimizer=SimpleNamespace(optimizer=inner))) is inner
    assert building.torch_optimizer_of(SimpleNamespace()) is None


def test_a_model_that_is_not_trained_computes_in_the_dtype_of_the_run():
    model = building.cast_without_engine(
        torch.nn.Linear(2, 1), torch.device("cpu"), {"bf16": {"enabled": True}}
    )
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    plain = building.cast_without_engine(torch.nn.Linear(2, 1), None, {})
    assert plain(torch.ones(1, 2)).dtype == torch.float32


@pytest.mark.parametrize(("kind", "variable"), [("cpu", "DS_ACCELERATOR"), ("hpu", "DEEPSPEED_USE_HPU")])
def test_deepspeed_takes_the_group_of_the_run(kind, variable, monkeypatch, package):
    opened = []
    monkeypatch.undo()
    fake = SimpleNamespace(init_distributed=lambda **given: opened.append(given))
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    monkeypatch.setattr(building.packages, "require", lambda *_: None)
    monkeypatch.setattr(building.process_group, "is_open", lambda: True)
    monkeypatch.setattr(building.torch.distributed, "get_backend", lambda: "gloo")
    assigned: dict[str, str] = {}
    monkeypatch.setattr(building.environ, "assign", assigned.update)
    seen = []
    monkeypatch.setattr(building, "check_hardware", lambda configs, device: seen.append(configs))
    first, second = DeepSpeedPlugin(), DeepSpeedPlugin()
    request = SimpleNamespace(deepspeed={"a": first, "b": second})
    with patch_environment(RANK="7"):
        building.begin(
            SimpleNamespace(
                device=SimpleNamespace(type=kind), topology=Topology(), backend=None, request=request
            )
        )
    assert seen == [[first.deepspeed_config, second.deepspeed_config]]
    assert opened == [{"dist_backend": "gloo"}]
    assert variable in assigned
    assert "RANK" not in assigned
    assert assigned["LOCAL_RANK"] == "0"
