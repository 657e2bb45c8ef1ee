"""Tests of DeepSpeedPlugin: its sources, its configuration, selection among several."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from accelerate.base import ConfigurationError, DistributedType, StateError, packages, patch_environment
from accelerate.plugins import (
    DeepSpeedPlugin,
    HfDeepSpeedConfig,
    deepspeed_config as configs,
    get_active_deepspeed_plugin,
)
from accelerate.plugins.deepspeed_config import config_to_build, register_with_transformers

USUAL = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_stage": 2,
    "is_train_batch_min": True,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "offload_optimizer_nvme_path": "none",
    "offload_param_nvme_path": "none",
    "zero3_init_flag": False,
    "zero3_save_16bit_model": False,
    "transformer_moe_cls_names": None,
    "enable_msamp": False,
    "msamp_opt_level": "O1",
}


def fields_of(plugin):
    return {name: getattr(plugin, name) for name in USUAL}


def test_without_anything_it_is_stage_two_and_the_rest_is_open():
    plugin = DeepSpeedPlugin()
    assert fields_of(plugin) == USUAL
    assert plugin.deepspeed_config == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": "auto",
        "steps_per_print": math.inf,
    }
    assert plugin.deepspeed_config is plugin.hf_ds_config.config
    assert not plugin.selected


def test_arguments_make_the_configuration():
    plugin = DeepSpeedPlugin(
        zero_stage=3,
        offload_optimizer_device="cpu",
        offload_param_device="nvme",
        offload_param_nvme_path="/disk",
        zero3_save_16bit_model=True,
        gradient_clipping=1.0,
        gradient_accumulation_steps=4,
    )
    assert plugin.zero3_init_flag is True
    assert plugin.hf_ds_config.is_zero3()
    assert plugin.hf_ds_config.is_offload()
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 4
    assert plugin.deepspeed_config["gradient_clipping"] == 1.0
    assert plugin.deepspeed_config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "nvme_path": None},
        "offload_param": {"device": "nvme", "nvme_path": "/disk"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }


VARIABLES = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8",
    "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/disk",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "/other",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "A,B",
    "ACCELERATE_FP8_BACKEND": "MSAMP",
    "ACCELERATE_FP8_OPT_LEVEL": "O2",
}


def test_the_environment_fills_what_is_not_given():
    with patch_environment(**VARIABLES):
        plugin = DeepSpeedPlugin(gradient_clipping=2.0)
    assert fields_of(plugin) == {
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 2.0,
        "zero_stage": 3,
        "is_train_batch_min": True,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "nvme",
        "offload_optimizer_nvme_path": "/other",
        "offload_param_nvme_path": "/disk",
        "zero3_init_flag": False,
        "zero3_save_16bit_model": True,
        "transformer_moe_cls_names": "A,B",
        "enable_msamp": True,
        "msamp_opt_level": "O2",
    }
    assert plugin.deepspeed_config["msamp"] == {"enabled": True, "opt_level": "O2"}


def test_the_environment_names_the_file_of_the_configuration(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    with patch_environment(ACCELERATE_DEEPSPEED_CONFIG_FILE=str(path)):
        plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 1


AUTO_TABLE = [
    ({"stage": "auto"}, {}, {}, "zero_stage", 2),
    ({"stage": "auto"}, {"zero_stage": 3}, {}, "zero_stage", 3),
    ({"stage": "auto"}, {}, {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "zero_stage", 1),
    ({}, {}, {}, "zero_stage", 0),
    ({"stage": "3"}, {"zero_stage": 3}, {}, "zero_stage", 3),
    (
        {"stage": 2, "offload_optimizer": {"device": "auto"}},
        {"offload_optimizer_device": "cpu"},
        {},
        "offload_optimizer_device",
        "cpu",
    ),
    ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {}, {}, "offload_optimizer_device", "cpu"),
    ({"stage": 2}, {"gradient_clipping": 0.5}, {}, "gradient_clipping", 0.5),
    ({"stage": 2}, {}, {"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, "gradient_clipping", 0.5),
    ({"stage": 2}, {}, {"ACCELERATE_GRADIENT_CLIPPING": "auto"}, "gradient_clipping", "auto"),
    ({"stage": 2}, {}, {}, "gradient_accumulation_steps", "auto"),
    (
        {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto"},
        {},
        {},
        "zero3_save_16bit_model",
        False,
    ),
    ({"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}, {}, {}, "zero3_save_16bit_model", True),
]


@pytest.mark.parametrize(("zero", "arguments", "variables", "field", "value"), AUTO_TABLE)
def test_fields_are_read_from_the_configuration(zero, arguments, variables, field, value):
    with patch_environment(**variables):
        plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero}, **arguments)
    assert getattr(plugin, field) == value


def test_keys_that_are_not_known_here_are_passed_on():
    config = {"zero_optimization": {"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 2}}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    assert plugin.deepspeed_config["zero_optimization"] == config["zero_optimization"]


def test_the_object_of_a_client_is_kept_and_changed_in_place():
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": "auto"}})
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    assert plugin.hf_ds_config is config
    assert plugin.deepspeed_config is config.config
    assert config.is_zero2()


def test_all_contradicting_arguments_are_named_with_both_sources():
    config = {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2, "gradient_clipping": "1"}
    with pytest.raises(ConfigurationError) as caught:
        DeepSpeedPlugin(
            hf_ds_config=config, zero_stage=2, gradient_accumulation_steps=4, gradient_clipping=1.0
        )
    said = str(caught.value)
    assert (
        "zero_optimization.stage is 3 in the DeepSpeed configuration, and 2 by the argument zero_stage"
        in said
    )
    assert "is 2 in the DeepSpeed configuration, and 4 by the argument gradient_accumulation_steps" in said
    assert "gradient_clipping" not in said


def test_a_configuration_overrides_variables_with_a_warning():
    with (
        patch_environment(ACCELERATE_DEEPSPEED_ZERO_STAGE="1"),
        pytest.warns(
            UserWarning, match=r"stage is 3 .* and 1 by the variable ACCELERATE_DEEPSPEED_ZERO_STAGE"
        ),
    ):
        plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3}})
    assert plugin.zero_stage == 3


def test_fields_of_the_users_file_must_fit():
    variables = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1", "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,other"}
    with patch_environment(**variables), pytest.raises(ConfigurationError, match="ZERO_STAGE"):
        DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3}})


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        ({"zero_stage": 7}, ["zero_stage=7"]),
        ({"zero_stage": 3, "offload_param_device": "nvme"}, ["needs offload_param_nvme_path"]),
        ({"zero_stage": 1, "offload_param_device": "cpu"}, ["stage 3 only"]),
        ({"offload_optimizer_device": "disk"}, ["it is none of none, cpu, nvme"]),
        (
            {"zero_stage": 2, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/disk"},
            ["stage 3 only, and zero_stage is 2"],
        ),
        (
            {"zero_stage": 9, "gradient_clipping": -1, "gradient_accumulation_steps": 0},
            ["zero_stage=9", "gradient_clipping=-1", "gradient_accumulation_steps=0"],
        ),
        ({"hf_ds_config": {}}, ["zero_optimization is missing"]),
        ({"gradient_clipping": "much"}, ["gradient_clipping='much'"]),
    ],
)
def test_wrong_values_are_refused_together(arguments, reasons):
    with pytest.raises(ConfigurationError) as caught:
        DeepSpeedPlugin(**arguments)
    for reason in reasons:
        assert reason in str(caught.value)


def test_models_are_built_in_shards_with_stage_three_only():
    assert DeepSpeedPlugin(zero_stage=3).is_zero3_init_enabled()
    assert not DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False).is_zero3_init_enabled()
    with pytest.warns(UserWarning, match="zero3_init_flag=True has no effect"):
        plugin = DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True)
    assert not plugin.is_zero3_init_enabled()
    with (
        pytest.raises(ConfigurationError, match="not sharded by ZeRO stage 2"),
        plugin.zero3_init_context_manager(enable=True),
    ):
        pass
    with pytest.raises(ConfigurationError, match="neither a yes nor a no"):
        DeepSpeedPlugin(zero_stage=3, zero3_init_flag="perhaps")


def test_inside_the_block_models_are_left_whole():
    plugin = DeepSpeedPlugin(zero_stage=3)
    with plugin.zero3_init_context_manager(enable=False):
        assert not plugin.is_zero3_init_enabled()
    assert plugin.is_zero3_init_enabled()


def test_one_value_is_filled_or_compared():
    plugin = DeepSpeedPlugin(
        hf_ds_config={"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 3, "x": {"y": "auto"}}
    )
    lines: list[str] = []
    plugin.fill_match("x.y", lines, **{"x.y": 8})
    plugin.fill_match("k.y", lines, **{"k.y": 8})
    assert plugin.get_value("x.y") == 8
    plugin.fill_match("gradient_accumulation_steps", lines, must_match=False, gradient_accumulation_steps=8)
    assert lines == []
    plugin.fill_match("gradient_accumulation_steps", lines, gradient_accumulation_steps=8)
    assert len(lines) == 1
    assert "is 3 in the DeepSpeed configuration, and 8" in lines[0]
    with pytest.raises(ConfigurationError, match="and 8"):
        plugin.fill_match("gradient_accumulation_steps", gradient_accumulation_steps=8)
    plugin.deepspeed_config["z"] = "auto"
    assert plugin.is_auto("z")
    with pytest.raises(ConfigurationError, match="z is 'auto'"):
        plugin.fill_match("z")


def test_the_whole_configuration_is_filled_and_compared():
    config = {"zero_optimization": {"stage": "auto"}, "a": "auto", "b": {"c": 1}, "d": "auto"}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    with pytest.raises(ConfigurationError) as caught:
        plugin.deepspeed_config_process(**{"a": 5, "b.c": 2, "zero_optimization.stage": 3})
    for part in ("b.c is 1", "stage is 2", "d is 'auto'"):
        assert part in str(caught.value)
    plugin.deepspeed_config_process(must_match=False, d=None, gradient_accumulation_steps=1, **{"b.c": 2})
    assert plugin.deepspeed_config["a"] == 5
    assert "d" not in plugin.deepspeed_config


FORMAT_TABLE = [
    ("fp16", {}, {"fp16": {"enabled": True, "auto_cast": True}, "bf16": {"enabled": False}}),
    ("bf16", {}, {"fp16": {"enabled": False}, "bf16": {"enabled": True}}),
    ("fp8", {}, {"fp16": {"enabled": False}, "bf16": {"enabled": True}}),
    ("no", {}, {"fp16": {"enabled": False}, "bf16": {"enabled": False}}),
    ("bf16", {"bf16": {"enabled": "auto"}}, {"fp16": {"enabled": False}, "bf16": {"enabled": True}}),
    ("no", {"bf16": {"enabled": True}}, {"fp16": {"enabled": False}, "bf16": {"enabled": True}}),
    (
        "fp16",
        {"fp16": {"enabled": True, "loss_scale": 8}},
        {"fp16": {"enabled": True, "loss_scale": 8}, "bf16": {"enabled": False}},
    ),
]


@pytest.mark.parametrize(("wanted", "config", "sections"), FORMAT_TABLE)
def test_the_number_format_is_set_where_it_is_open(wanted, config, sections):
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, **config})
    plugin.set_mixed_precision(wanted)
    assert {name: plugin.deepspeed_config[name] for name in sections} == sections


@pytest.mark.parametrize(("wanted", "said"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_the_other_number_format_is_refused(wanted, said):
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, said: {"enabled": True}})
    with pytest.raises(ConfigurationError, match=f"{said}.enabled=True"):
        plugin.set_mixed_precision(wanted)


def test_an_unknown_number_format_is_refused():
    with pytest.raises(ConfigurationError, match="it is not supported"):
        DeepSpeedPlugin().set_mixed_precision("fp7")


def test_only_the_state_selects():
    plugin = DeepSpeedPlugin()
    with pytest.raises(NotImplementedError, match="select_deepspeed_plugin"):
        plugin.selected = True
    with pytest.raises(StateError, match="cannot be assigned"):
        plugin.selected = True
    with pytest.raises(ConfigurationError, match="cannot select itself"):
        plugin.select()
    plugin.select(_from_accelerator_state=True)
    assert plugin.selected
    plugin._unselect()
    assert not plugin.selected


def test_the_active_plugin_is_that_of_the_state():
    plugin = DeepSpeedPlugin()
    running = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, deepspeed_plugin=plugin)
    assert get_active_deepspeed_plugin(running) is plugin
    with pytest.raises(ConfigurationError, match="does not use DeepSpeed"):
        get_active_deepspeed_plugin(
            SimpleNamespace(distributed_type=DistributedType.NO, deepspeed_plugin=None)
        )


def test_layers_that_a_model_does_not_have_are_refused():
    torch = pytest.importorskip("torch")
    plugin = DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="Linear, Experts")
    with pytest.raises(ConfigurationError, match=r"names Experts.*Sequential"):
        plugin.set_moe_leaf_modules(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    DeepSpeedPlugin(zero_stage=3).set_moe_leaf_modules(torch.nn.Linear(2, 2))


def test_variables_that_are_auto_count_as_not_set():
    said = configs.read_variables({"ACCELERATE_GRADIENT_CLIPPING": "auto"})
    assert said == {configs.FIELDS_OF_FILE: set()}


def test_fields_of_the_users_file_are_a_set_of_names():
    said = configs.read_variables({configs.FIELDS_OF_FILE: "zero_stage, gradient_clipping,"})
    assert said[configs.FIELDS_OF_FILE] == {"zero_stage", "gradient_clipping"}


def test_only_what_is_not_usual_is_added():
    config = {"zero_optimization": {"stage": 3}}
    configs.add_missing(config, {"gradient_clipping": 0.5, "zero_optimization.offload_param.device": "cpu"})
    assert config == {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "gradient_clipping": 0.5,
    }
    configs.add_missing(config, {"gradient_clipping": "auto", "zero_optimization.stage": 1})
    assert config["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize(
    ("names", "found"), [("A, B,", ["A", "B"]), (["A ", "B"], ["A", "B"]), (None, []), ("", [])]
)
def test_names_are_split(names, found):
    assert configs.split_names(names) == found


def test_misspelt_keys_are_named():
    with pytest.warns(UserWarning, match="'gradient_cliping', which may mean 'gradient_clipping'"):
        configs.warn_of_typos({"gradient_cliping": 1.0, "zero_optimization": {}})
    configs.warn_of_typos({"steps_per_print": 1, "zero_allow_untested_optimizer": True, "amp": {}})


def test_a_configuration_is_made_complete_enough_to_build_a_model():
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    assert config_to_build(config) == {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    given = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8}
    assert config_to_build(given) == {"train_micro_batch_size_per_gpu": 8}


def test_without_deepspeed_transformers_gets_no_configuration(monkeypatch):
    monkeypatch.setattr(packages, "is_deepspeed_available", lambda: False)
    assert register_with_transformers({}, True, None) is None
