"""Reading, writing and patching environment variables."""

import asyncio
import os
import subprocess
import sys

import pytest

from accelerate.base import ConfigurationError, environ


@pytest.fixture
def variable(monkeypatch):
    """Set a variable for one test, undone by pytest."""
    return monkeypatch.setenv


def test_current_is_live_and_read_only(variable):
    view = environ.current()
    variable("A_VARIABLE", "1")
    assert view["A_VARIABLE"] == "1"
    with pytest.raises(TypeError):
        view["A_VARIABLE"] = "2"


def test_assign_and_unset():
    environ.assign({"A_VARIABLE": "1"})
    assert os.environ["A_VARIABLE"] == "1"
    environ.unset("A_VARIABLE", "NEVER_SET")
    assert "A_VARIABLE" not in os.environ


@pytest.mark.parametrize("word", ["y", "Yes", "t", "TRUE", "on", "1", " true "])
def test_true_values_of_a_flag(word, variable):
    variable("A_FLAG", word)
    assert type(environ.str_to_bool(word)) is int
    assert environ.str_to_bool(word) == 1
    assert environ.str_to_bool(word, to_bool=True) is True
    assert environ.parse_flag_from_env("A_FLAG") is True


@pytest.mark.parametrize("word", ["n", "No", "f", "FALSE", "off", "0"])
def test_false_values_of_a_flag(word, variable):
    variable("A_FLAG", word)
    assert environ.str_to_bool(word) == 0
    assert environ.str_to_bool(word, to_bool=True) is False
    assert environ.parse_flag_from_env("A_FLAG", default=True) is False


def test_other_values_of_a_flag_are_refused_with_its_name(variable):
    variable("A_FLAG", "maybe")
    with pytest.raises(ConfigurationError, match="A_FLAG='maybe'"):
        environ.parse_flag_from_env("A_FLAG")
    with pytest.raises(ValueError, match=r"value='maybe'.*\. Write true or false\."):
        environ.str_to_bool("maybe")


def test_unset_and_empty_flags_have_the_default(variable):
    assert environ.parse_flag_from_env("NEVER_SET") is False
    variable("A_FLAG", "")
    assert environ.parse_flag_from_env("A_FLAG", default=True) is True


def test_the_first_number_that_is_not_negative_is_used(variable):
    variable("FIRST", "-1")
    variable("SECOND", "3")
    variable("THIRD", "4")
    assert environ.get_int_from_env(["NEVER_SET", "FIRST", "SECOND", "THIRD"], 7) == 3
    assert environ.get_int_from_env(["NEVER_SET"], 7) == 7
    assert environ.get_int_from_env("THIRD", 7) == 4
    variable("FOURTH", "0")
    assert environ.get_int_from_env(["FIRST", "FOURTH", "SECOND"], 7) == 0


def test_an_invalid_number_is_refused_by_name(variable):
    variable("FIRST", "three")
    with pytest.raises(ConfigurationError, match="FIRST='three'"):
        environ.get_int_from_env(["FIRST"], 1)


def test_choice(variable):
    variable("A_CHOICE", "bf16")
    assert environ.parse_choice_from_env("A_CHOICE") == "bf16"
    assert environ.parse_choice_from_env("NEVER_SET") == "no"


def test_unsafe_pairs_are_left_out_of_environment_files(caplog):
    lines = environ.convert_dict_to_env_variables({"GOOD": "1", "BAD": "<x", "ALSO BAD": "1", "EMPTY": ""})
    assert lines == ["GOOD=1\n"]
    assert [record.args[0] for record in caplog.records] == ["BAD", "ALSO BAD", "EMPTY"]


def test_clear_environment_restores_everything(variable):
    variable("A_VARIABLE", "1")
    before = dict(os.environ)

    def change_and_fail():
        with environ.clear_environment():
            assert not os.environ
            os.environ["NEW"] = "1"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        change_and_fail()
    assert dict(os.environ) == before


def test_patch_environment_restores_old_values_and_removes_new_ones(variable):
    variable("A_VARIABLE", "old")

    def read_and_fail():
        with environ.patch_environment(a_variable="new", another=2):
            assert os.environ["A_VARIABLE"] == "new"
            assert os.environ["ANOTHER"] == "2"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        read_and_fail()
    assert os.environ["A_VARIABLE"] == "old"
    assert "ANOTHER" not in os.environ


def test_patch_environment_can_be_nested():
    with environ.patch_environment(A_VARIABLE=1):
        with environ.patch_environment(A_VARIABLE=2):
            assert os.environ["A_VARIABLE"] == "2"
        assert os.environ["A_VARIABLE"] == "1"
    assert "A_VARIABLE" not in os.environ


def write_own_variables():
    os.environ["ACCELERATE_NEW"] = "1"
    os.environ["ACCELERATE_OLD"] = "changed"
    return "result"


def test_purged_function_leaves_own_variables_as_they_were(variable):
    variable("ACCELERATE_OLD", "old")
    assert environ.purge_accelerate_environment(write_own_variables)() == "result"
    assert os.environ["ACCELERATE_OLD"] == "old"
    assert "ACCELERATE_NEW" not in os.environ


def test_purged_function_keeps_its_name_and_other_variables(variable):
    variable("OTHER", "old")

    @environ.purge_accelerate_environment
    def write_other():
        os.environ["OTHER"] = "new"

    write_other()
    assert write_other.__name__ == "write_other"
    assert os.environ["OTHER"] == "new"


def test_purged_coroutine():
    @environ.purge_accelerate_environment
    async def write():
        return write_own_variables()

    assert asyncio.run(write()) == "result"
    assert "ACCELERATE_NEW" not in os.environ


def test_purged_class_covers_its_tests_and_those_of_subclasses():
    seen = []

    class Root:
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append(cls.__name__)

    @environ.purge_accelerate_environment
    class Parent(Root):
        def test_parent(self):
            return write_own_variables()

        def write(self):
            os.environ["ACCELERATE_KEPT"] = "1"

    class Child(Parent):
        def test_child(self):
            return write_own_variables()

    assert seen == ["Parent", "Child"]
    assert Child().test_parent() == Child().test_child() == "result"
    assert "ACCELERATE_NEW" not in os.environ
    Parent().write()
    assert os.environ.pop("ACCELERATE_KEPT") == "1"


def test_importing_environ_loads_no_large_module():
    heavy = ("torch", "logging", "inspect")
    code = f"import accelerate.base.environ, sys; print([m for m in {heavy} if m in sys.modules])"
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(
        [sys.executable, "-S", "-c", code], env=path, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


def test_a_detached_environment_has_no_variables_of_a_launch(variable):
    variable("RANK", "1")
    variable("ACCELERATE_RUN_KEY", "secret")
    variable("ACCELERATE_USE_CPU", "true")
    variable("A_VARIABLE", "kept")
    before = dict(os.environ)

    def change_and_fail():
        with environ.detached_environment() as detached:
            assert detached == dict(os.environ)
            assert {"RANK", "ACCELERATE_RUN_KEY"}.isdisjoint(detached)
            assert (detached["A_VARIABLE"], detached["ACCELERATE_USE_CPU"]) == ("kept", "true")
            os.environ.update(RANK="0", WORLD_SIZE="3", ACCELERATE_NEW="1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        change_and_fail()
    assert dict(os.environ) == before
