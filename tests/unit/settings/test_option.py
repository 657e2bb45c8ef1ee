from __future__ import annotations

from dataclasses import dataclass

import pytest

from accelerate.base import ConfigurationError
from accelerate.settings import Section, refuse_all
from accelerate.settings.option import (
    as_bit,
    as_text,
    lower,
    lower_bool,
    only_true,
    option,
    unless_empty,
    unless_empty_lower,
    upper,
)


@dataclass(frozen=True, kw_only=True)
class Sample(Section):
    title = "Sample"

    flag: bool = option(False, "A switch.")
    count: int | None = option(None, "A number.")
    share: float = option(0.5, "A fraction.")
    room: int = option(1, "A number within limits.", limits=(0, 1))
    name: str | None = option(None, "A text.", env="NAME")
    kind: str = option("A", "A choice.", choices=("A", "B"))
    parts: tuple[str, ...] | None = option(None, "A list.", flags=(), key=None)


ROWS = {row.name: row for row in Sample.options()}


def test_the_row_follows_from_the_declaration() -> None:
    assert ROWS["flag"].action == "store_true"
    assert ROWS["count"].kind is int
    assert ROWS["count"].flags == ("--count",)
    assert ROWS["name"].variables == ("NAME",)
    assert ROWS["name"].key == "name"
    assert ROWS["parts"].key is None
    assert ROWS["parts"].flags == ()
    assert ROWS["kind"].group == "Sample"


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("flag", "yes", True),
        ("flag", "NO", False),
        ("flag", True, True),
        ("count", "3", 3),
        ("count", 3.0, 3),
        ("share", "1e-2", 0.01),
        ("share", 1, 1.0),
        ("name", 3, "3"),
        ("name", True, "true"),
        ("name", False, "false"),
        ("kind", "b", "B"),
        ("parts", "a, b", ("a", "b")),
        ("parts", " a ,, b,", ("a", "b")),
        ("parts", " , ", ()),
        ("room", 0, 0),
        ("room", "1", 1),
        ("parts", ["a"], ("a",)),
    ],
)
def test_text_and_values_of_a_file_become_the_type(name: str, written: object, value: object) -> None:
    assert ROWS[name].read(written, name) == value


@pytest.mark.parametrize(
    ("name", "written", "reason"),
    [
        ("flag", "perhaps", "yes or no"),
        ("count", "many", "whole number"),
        ("count", 1.5, "whole number"),
        ("count", True, "whole number"),
        ("count", {"a": 1}, "whole number"),
        ("share", [0.5], "a number"),
        ("room", -1, "out of range.*Use one from 0 to 1"),
        ("room", 2, "out of range"),
        ("share", "half", "a number"),
        ("share", False, "a number"),
        ("name", ["a"], "one text"),
        ("kind", "C", "Use one of A, B"),
        ("parts", 3, "a list"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(name: str, written: object, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        ROWS[name].read(written, "the place")
    assert str(caught.value).startswith(f"the place={written!r}")


def test_undeclared_attributes_follow_from_the_type() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Declared(Section):
        title = "Declared"

        on: bool = option(False, "A switch.")
        read: bool = option(False, "A flag that is read.", flag_type=str)
        other: int = option(3, "With its own.", key="its_key", flag_default=7, action="append", limits=(1, 9))
        text: str = option(
            "a", "Spelled.", env=("A", "B"), encode=str.upper, group="Group", choices=("a", "b")
        )

    rows = {row.name: row for row in Declared.options()}
    assert [row.action for row in rows.values()] == ["store_true", "store", "append", "store"]
    assert [row.flag_type for row in rows.values()] == [str, str, int, str]
    assert [row.flag_default for row in rows.values()] == [False, False, 7, "a"]
    assert [row.key for row in rows.values()] == ["on", "read", "its_key", "text"]
    assert [row.limits for row in rows.values()] == [None, None, (1, 9), None]
    assert [row.group for row in rows.values()] == [*["Declared"] * 3, "Group"]
    assert (rows["text"].variables, rows["text"].offers) == (("A", "B"), ("a", "b"))
    assert rows["text"].encode is str.upper
    assert rows["other"].default == 3


@dataclass(frozen=True, kw_only=True)
class Words(Section):
    title = "Words"
    takes_words = True
    encode = lower_bool
    encode_optional = unless_empty
    env_prefix = ""

    on: bool = option(True, "library: use it (true or false).", ask=True)
    optional: bool | None = option(None, "A word.")
    read: bool = option(False, "A word that is read.", flag_type=str)
    kind: str | None = option(None, "A text.", encode=upper)


def test_a_section_decides_for_options_that_declare_nothing() -> None:
    rows = {row.name: row for row in Words.options()}
    assert [row.action for row in rows.values()] == ["store"] * 4
    assert [row.flag_default for row in rows.values()] == ["true", None, False, None]
    assert [row.flag_type for row in rows.values()] == [str, str, str, str]
    assert [row.encode for row in rows.values()] == [lower_bool, unless_empty, lower_bool, upper]
    assert rows["on"].ask == "Use it?"
    assert rows["optional"].ask is None


def test_a_section_without_flags_has_those_that_are_declared() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Silent(Section):
        title = "Silent"
        makes_flags = False

        name: str = option("", "A text.")
        shown: str = option("", "A text with a flag.", flags=("--shown",))

    assert [row.flags for row in Silent.options()] == [(), ("--shown",)]


def test_an_unknown_attribute_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Section):
        title = "Wrong"

        name: str = option("", "A text.", choises=("a",))

    with pytest.raises(TypeError, match="choises"):
        Wrong.options()


def test_several_problems_are_one_error() -> None:
    refuse_all([])
    with pytest.raises(ConfigurationError, match="^only this$"):
        refuse_all(["only this"])
    with pytest.raises(ConfigurationError, match="2 settings are wrong:\n  - one\n  - two"):
        refuse_all(["one", "two"])


def test_each_spelling_writes_its_form() -> None:
    assert as_text(True) == "True"
    assert as_text(None) is None
    assert lower(True) == "true"
    assert lower(None) is None
    assert lower_bool(True) == "true"
    assert lower_bool("A") == "A"
    assert lower_bool(None) is None
    assert upper("no") == "NO"
    assert upper(None) is None
    assert as_bit(True) == "1"
    assert as_bit(False) == "0"
    assert as_bit(None) is None
    assert only_true("yes")(True) == "yes"
    assert only_true("yes")(False) is None
    assert unless_empty("") is None
    assert unless_empty(2) == "2"
    assert unless_empty_lower("CPU") == "cpu"
    assert unless_empty_lower(False) == "false"
    assert unless_empty_lower(None) is None


@dataclass(frozen=True, kw_only=True)
class Prefixed(Section):
    title = "Prefixed"
    switch = "--use_it"
    env_prefix = "SAMPLE_"

    named: int = option(1, "A number.")
    other: int = option(1, "A number with a variable of its own.", env="OTHER")
    silent: int = option(1, "A number without a variable.", env=())


def test_variables_follow_from_the_prefix_of_the_section() -> None:
    assert [row.variables for row in Prefixed.options()] == [("SAMPLE_NAMED",), ("OTHER",), ()]
    assert ROWS["count"].variables == ()


def test_a_section_is_active_by_its_switch() -> None:
    assert Sample.active({})
    assert Prefixed.active({"use_it": True})
    assert not Prefixed.active({"use_it": None})
