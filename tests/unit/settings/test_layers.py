from __future__ import annotations

from accelerate.settings import BUILT_IN, FLAG, Layer, merge_layers
from accelerate.settings.sections import LaunchSection, PrecisionSection


def test_without_layers_everything_is_built_in() -> None:
    settings = merge_layers()
    assert settings[PrecisionSection].mixed_precision == "no"
    assert settings.source("mixed_precision") == BUILT_IN
    assert not settings.given("mixed_precision")


def test_a_flag_for_a_training_method_overrides_that_of_the_file() -> None:
    settings = merge_layers(Layer("file", {"use_fsdp": True}), Layer(FLAG, {"use_deepspeed": True}))
    assert not settings.values["use_fsdp"]
    assert settings.values["use_deepspeed"]


def test_a_flag_for_a_training_method_keeps_the_mesh_of_the_file() -> None:
    settings = merge_layers(Layer("file", {"use_parallelism_config": True}), Layer(FLAG, {"use_fsdp": True}))
    assert settings.values["use_parallelism_config"]


def test_replaced_values_name_their_source() -> None:
    settings = merge_layers().replaced("chosen", num_processes=2)
    assert settings[LaunchSection].num_processes == 2
    assert settings.source("num_processes") == "chosen"
    assert settings.given("num_processes")
    assert merge_layers().values["num_processes"] is None


def test_all_values_can_be_listed_with_their_sources() -> None:
    rows = {row.name: (value, source) for row, value, source in merge_layers(Layer(FLAG, {"debug": True}))}
    assert rows["debug"] == (True, FLAG)
    assert rows["num_machines"] == (1, BUILT_IN)


def test_values_that_are_not_replaced_stay() -> None:
    before = merge_layers(Layer(FLAG, {"debug": True, "num_machines": 2}, ("read twice",)))
    after = before.replaced("chosen", num_machines=3).noted("and again")
    assert (after.values["debug"], after.source("debug")) == (True, FLAG)
    assert (after.values["num_machines"], after.source("num_machines")) == (3, "chosen")
    assert after.notes == ("read twice", "and again")
    assert (before.values["num_machines"], before.source("num_machines")) == (2, FLAG)
    assert before.notes == ("read twice",)
