from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from accelerate.settings import FLAG, SECTIONS, Layer, Option, Section, all_options, env, merge_layers
from accelerate.settings.sections import DynamoSection, Fp8Section, PrecisionSection

SWITCHED_ON = {
    "use_fsdp": True,
    "use_deepspeed": True,
    "use_megatron_lm": True,
    "use_parallelism_config": True,
    "mixed_precision": "fp8",
    "mpirun_hostfile": "hosts",
    "parallelism_config_pp_size": 2,
    "parallelism_config_cp_size": 2,
    "parallelism_config_sp_size": 2,
}


def other_value(row: Option) -> Any:
    """A value that differs from the built-in one."""
    if row.name in SWITCHED_ON:
        return SWITCHED_ON[row.name]
    if choices := row.choices or row.words:
        read = [row.read(choice, "") for choice in choices]
        return next((value for value in read if value != row.default), row.default)
    if row.kind is tuple:
        return (True, False, True)
    return {bool: not row.default, int: row.limits[1] if row.limits else 7, float: 0.5, str: "other"}[
        row.kind
    ]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_settings_written_by_the_launcher_are_read_by_the_worker(section: type[Section]) -> None:
    """Flag -> settings -> environment -> worker is the identity, for every option with a variable."""
    rows = [row for row in section.options() if row.variables]
    values = {**SWITCHED_ON, **{row.name: other_value(row) for row in rows}}
    written = env.encode(merge_layers(Layer(FLAG, values)), (section,))
    decoded = env.decode(section, written)
    for row in rows:
        encoded = row.encode(values[row.name]) if len(row.variables) == 1 else True
        expected = values[row.name] if encoded is not None else row.default
        assert getattr(decoded, row.name) == expected, row.name


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_false_and_zero_are_written_where_nothing_is_the_default(section: type[Section]) -> None:
    rows = [row for row in section.options() if row.variables and row.default is None]
    rows = [row for row in rows if row.kind in (bool, int, float) and (row.limits or (0,))[0] == 0]
    values = {**SWITCHED_ON, **{row.name: row.kind(0) for row in rows if row.name not in SWITCHED_ON}}
    written = env.encode(merge_layers(Layer(FLAG, values)), (section,))
    for row in rows:
        assert getattr(env.decode(section, written), row.name) == values[row.name], row.name


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_an_empty_environment_gives_the_built_in_values(section: type[Section]) -> None:
    decoded = env.decode(section, {})
    assert decoded == section()
    assert [field.name for field in fields(decoded)] == [row.name for row in section.options()]  # type: ignore[arg-type]


def test_a_section_that_is_not_active_sets_no_variables() -> None:
    assert not env.encode(merge_layers(), (Fp8Section,))
    assert env.encode(merge_layers(Layer(FLAG, {"mixed_precision": "fp8"})), (Fp8Section,))


def test_read_gives_only_what_is_set() -> None:
    assert env.read({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, (DynamoSection,)) == {
        "dynamo_backend": "inductor"
    }


def test_the_bare_name_counts_where_the_long_one_is_absent() -> None:
    assert env.decode(PrecisionSection, {"MIXED_PRECISION": "bf16"}).mixed_precision == "bf16"
    both = {"MIXED_PRECISION": "bf16", "ACCELERATE_MIXED_PRECISION": "fp16"}
    assert env.decode(PrecisionSection, both).mixed_precision == "fp16"


def test_one_of_three_variables_is_enough() -> None:
    decoded = env.decode(Fp8Section, {"ACCELERATE_FP8_OVERRIDE_DGRAD": "true"})
    assert decoded.fp8_override_linear_precision == (False, True, False)


def test_no_two_options_share_a_variable() -> None:
    names = [name for row in all_options().values() for name in (*row.variables, *row.aliases)]
    assert len(names) == len(set(names))


def test_unreadable_values_of_omp_num_threads_are_ignored() -> None:
    assert env.read({"OMP_NUM_THREADS": "4"}, SECTIONS) == {"num_cpu_threads_per_process": 4}
    assert env.read({"OMP_NUM_THREADS": "4,2"}, SECTIONS) == {}
