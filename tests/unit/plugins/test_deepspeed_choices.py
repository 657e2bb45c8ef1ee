"""Tests of what arguments and variables say of DeepSpeed."""

from __future__ import annotations

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


def test_misspelt_keys_are_named():
    with pytest.warns(UserWarning, match="'gradient_cliping', which may mean 'gradient_clipping'"):
        choices.warn_of_typos({"gradient_cliping": 1.0, "zero_optimization": {}})
    choices.warn_of_typos({"steps_per_print": 1, "zero_allow_untested_optimizer": True, "amp": {}})
