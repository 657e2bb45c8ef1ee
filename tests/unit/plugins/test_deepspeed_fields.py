"""Tests of DeepSpeed settings from arguments and variables."""

from __future__ import annotations

import pytest

from accelerate.plugins import deepspeed_config as configs


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
