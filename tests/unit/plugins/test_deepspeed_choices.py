"""Tests of what arguments and variables say of DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from accelerate.plugins import deepspeed_choices as choices


def test_variables_that_are_auto_count_as_not_set():
    said = choices.read_variables({"ACCELERATE_GRADIENT_CLIPPING": "auto"})
    assert said == {choices.FIELDS_OF_FILE: set()}


def test_fields_of_the_users_file_are_a_set_of_names():
    said = choices.read_variables({choices.FIELDS_OF_FILE: "zero_stage, gradient_clipping,"})
    assert said[choices.FIELDS_OF_FILE] == {"zero_stage", "gradient_clipping"}


def test_only_what_is_not_usual_is_added():
    config = {"zero_optimization": {"stage": 3}}
    choices.add_missing(config, {"gradient_clipping": 0.5, "zero_optimization.offload_param.device": "cpu"})
    assert config == {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "gradient_clipping": 0.5,
    }
    choices.add_missing(config, {"gradient_clipping": "auto", "zero_optimization.stage": 1})
    assert config["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize(
    ("names", "found"), [("A, B,", ["A", "B"]), (["A ", "B"], ["A", "B"]), (None, []), ("", [])]
)
def test_names_are_split(names, found):
    assert choices.split_names(names) == found


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
    assert choices.problems_of(fields) == []
