"""Tests of DeepSpeed configurations: look-up, "auto" and disagreements."""

from __future__ import annotations

import pytest

from accelerate.base import ConfigurationError
from accelerate.plugins import AutoValues, HfDeepSpeedConfig
from accelerate.plugins.deepspeed_config import leaves, same_value, without_auto
from accelerate.settings import refuse_config

CONFIG = {
    "a": {"b": {"c": 1, "yes": True, "no": False}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
}


def test_a_configuration_copies_the_given_dictionary():
    given = {"zero_optimization": {"stage": 2}}
    config = HfDeepSpeedConfig(given)
    config.config["zero_optimization"]["stage"] = 1
    assert given == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("name", "node", "value", "or_five"),
    [
        ("a.b.c", CONFIG["a"]["b"], 1, 1),
        ("a.b.x", CONFIG["a"]["b"], None, 5),
        ("a.x.c", None, None, 5),
        ("a.b.c.d", None, None, 5),
        ("z", CONFIG, None, 5),
    ],
)
def test_values_are_found_by_dotted_names(name, node, value, or_five):
    config = HfDeepSpeedConfig(CONFIG)
    assert config.find_config_node(name) == (node, name.split(".")[-1])
    assert config.get_value(name) == value
    assert config.get_value(name, 5) == or_five


def test_truth_values_that_are_missing_are_neither():
    config = HfDeepSpeedConfig(CONFIG)
    assert [config.is_true(f"a.b.{name}") for name in ("yes", "no", "x")] == [True, False, False]
    assert [config.is_false(f"a.b.{name}") for name in ("yes", "no", "x")] == [False, True, False]


@pytest.mark.parametrize(
    ("zero", "answers"),
    [
        ({"stage": 2}, (True, False, False)),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, (False, True, True)),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, (False, True, True)),
        ({"stage": 1, "offload_optimizer": {"device": "none"}}, (False, False, False)),
        ({}, (False, False, False)),
    ],
)
def test_stage_and_offloading_are_read_from_the_configuration(zero, answers):
    config = HfDeepSpeedConfig({"zero_optimization": zero})
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == answers


def test_a_sub_tree_is_removed():
    config = HfDeepSpeedConfig(CONFIG)
    config.del_config_sub_tree("a.b")
    config.del_config_sub_tree("a.b")
    assert config.config["a"] == {}
    with pytest.raises(ConfigurationError, match="no such value"):
        config.del_config_sub_tree("a.b", must_exist=True)


def test_auto_is_filled_and_all_mismatches_are_in_one_error():
    config = {"x": "auto", "y": {"z": "auto", "w": 3, "v": "8"}, "left": "auto", "free": "auto", "u": 1}
    auto_values = AutoValues(
        {"x": 1, "y.w": 4, "y.v": 8, "u": 2, "free": None}, {"y.w": "the argument w"}, {"y.z": 7}
    )
    auto_values.fill(config)
    assert config == {"x": 1, "y": {"z": 7, "w": 3, "v": "8"}, "left": "auto", "u": 1}
    with pytest.raises(ConfigurationError) as caught:
        auto_values.check_filled()
    said = str(caught.value)
    assert "y.w is 3 in the DeepSpeed configuration, and 4 by the argument w" in said
    assert "u is 1 in the DeepSpeed configuration, and 2 by an argument" in said
    assert "left is 'auto', and its value is not given" in said
    assert "y.v" not in said


def test_overridable_values_are_overridden_and_not_mismatches():
    auto_values = AutoValues({"x": 2, "y": 2}, overridable=("x",))
    auto_values.fill({"x": 1, "y": 1})
    assert len(auto_values.overridden) == len(auto_values.mismatches) == 1
    assert auto_values.overridden[0].startswith("x is 1")


def test_nothing_is_refused_without_problems():
    refuse_config([], "fix")
    with pytest.raises(ConfigurationError, match=r"\n- one\n- two\nFix it\."):
        refuse_config(["one", "two"], "Fix it")


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (8, "8", True),
        (1.0, 1, True),
        ("1e-3", 0.001, True),
        (8, 4, False),
        (True, "true", True),
        (True, 1, True),
        (False, "true", False),
        ([0.9, 0.999], (0.9, 0.999), True),
        ([0.9], [0.9, 0.999], False),
        ("AdamW", "AdamW", True),
        ("AdamW", "Adam", False),
        (3, None, True),
    ],
)
def test_values_are_compared_by_what_they_mean(first, second, same):
    assert same_value(first, second) is same


def test_leaves_and_a_copy_without_auto():
    assert dict(leaves({"a": {"b": 1}, "c": 2})) == {"a.b": 1, "c": 2}
    assert without_auto({"a": {"b": "auto", "d": 1}, "c": "auto"}) == {"a": {"d": 1}}
