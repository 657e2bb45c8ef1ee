"""Tests of what is checked of DeepSpeed's settings before anything runs."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace

import pytest

from accelerate.base import ConfigurationError
from accelerate.settings import deepspeed_checks as checks

ZERO = {"zero_optimization": {"stage": 2}}


def test_values_that_are_auto_are_no_problem():
    fields = SimpleNamespace(
        zero_stage="3",
        offload_optimizer_device="auto",
        offload_param_device=None,
        offload_optimizer_nvme_path=None,
        offload_param_nvme_path=None,
        gradient_accumulation_steps="auto",
        gradient_clipping="1.0",
    )
    assert checks.problems_of_fields(fields) == []


def test_a_configuration_is_a_dictionary_a_path_or_base64(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ZERO))
    packed = base64.urlsafe_b64encode(json.dumps(ZERO).encode()).decode()
    for source in (ZERO, path, str(path), packed):
        assert checks.read_config(source) == ZERO
    assert checks.read_config(ZERO) is not ZERO


@pytest.mark.parametrize(
    ("text", "said"),
    [("{bad", "it is not JSON"), ("[1]", "it is JSON, but not an object"), (None, "there is no such file")],
)
def test_a_file_that_is_no_configuration_is_refused_by_its_name(tmp_path, text, said):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=said) as caught:
        checks.read_config(str(path), "--deepspeed_config_file")
    assert str(caught.value).startswith(f"--deepspeed_config_file='{path}'")


def test_other_things_are_no_configuration():
    with pytest.raises(ConfigurationError, match="it is a list"):
        checks.read_config([1])


def test_numbers_in_text_are_converted_and_null_is_removed():
    config = {
        "zero_optimization": {"stage": "3", "offload_param": None},
        "train_micro_batch_size_per_gpu": "8",
        "train_batch_size": None,
        "gradient_accumulation_steps": 2.0,
        "gradient_clipping": "1.0",
        "fp16": None,
        "optimizer": None,
    }
    checks.straighten(config)
    assert config == {
        "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": 8,
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
    }
    assert isinstance(config["gradient_clipping"], float)


def test_values_that_cannot_be_converted_are_unchanged():
    config = {"zero_optimization": True, "train_batch_size": "many"}
    checks.straighten(config)
    assert config == {"zero_optimization": True, "train_batch_size": "many"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ZERO, []),
        ({**ZERO, "scheduler": {"type": "WarmupLR", "params": {}}}, []),
        ({}, ["zero_optimization is missing: write"]),
        ({"zero_optimisation": {}}, ["zero_optimisation may be meant"]),
        ({"zero_optimization": True}, ['zero_optimization is True, and it is an object: write {"stage": 2}']),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, ["offload_optimizer is 'cpu'"]),
        ({**ZERO, "fp16": True, "optimizer": "AdamW"}, ["optimizer is 'AdamW'", "fp16 is True"]),
        ({**ZERO, "optimizer": {"params": {}}}, ["optimizer has no type"]),
        ({**ZERO, "scheduler": {"params": {}}}, ["scheduler has no type"]),
        ({**ZERO, "train_batch_size": "x", "gradient_accumulation_steps": 0}, ["is 'x'", "is 0"]),
        ({**ZERO, "train_batch_size": True, "train_micro_batch_size_per_gpu": 1.5}, ["True", "1.5"]),
        ({**ZERO, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["are both true"]),
        ({**ZERO, "fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}, []),
    ],
)
def test_parts_of_the_wrong_form_are_all_named(config, said):
    problems = checks.problems_of_config(config)
    assert len(problems) == len(said)
    for problem, part in zip(problems, said, strict=True):
        assert part in problem


def test_values_are_looked_up_by_dotted_names():
    assert checks.look_up(ZERO, checks.STAGE) == 2
    assert checks.look_up(ZERO, "zero_optimization.stage.deeper", 7) == 7


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"offload_param_device": "gpu"}, "offload_param_device='gpu': it is none of none, cpu, nvme"),
        (
            {"offload_optimizer_device": "NVME", "zero_stage": 3},
            "offload_optimizer_device='nvme' needs offload_optimizer",
        ),
        (
            {"gradient_accumulation_steps": 0},
            "gradient_accumulation_steps=0: it is not a number of at least 1",
        ),
        ({"gradient_clipping": "x"}, "gradient_clipping='x': it is not a number of at least 0"),
        ({"gradient_clipping": True}, "gradient_clipping=True: it is not a number of at least 0"),
    ],
)
def test_a_field_that_deepspeed_cannot_take_is_named(changed, problem):
    fields = SimpleNamespace(**{**checks.USUAL, **changed})
    (said,) = checks.problems_of_fields(fields)
    assert said.startswith(problem)
