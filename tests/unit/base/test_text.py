"""Sizes, names and dictionaries as text."""

import os
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from accelerate.base import ConfigurationError, text


@pytest.mark.parametrize(
    ("size", "written"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KB"),
        (1024**2, "1.0 MB"),
        (433_000_000, "412.94 MB"),
        (1024**5 * 3, "3.0 PB"),
        (1024**6, "1024.0 PB"),
        (1024**5 * 1234.5678, "1234.57 PB"),
        (-1536, "-1.5 KB"),
    ],
)
def test_convert_bytes(size, written):
    assert text.convert_bytes(size) == written


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (7, 7),
        ("5GB", 5 * 10**9),
        ("5gb", 5 * 10**9 // 8),
        ("5Gb", 5 * 10**9 // 8),
        ("5GiB", 5 * 2**30),
        ("2 MiB", 2 * 2**20),
        ("1.5KB", 1500),
        ("3TB", 3 * 10**12),
        ("10", 10),
        ("10B", 10),
    ],
)
def test_convert_file_size_to_int(written, size):
    assert text.convert_file_size_to_int(written) == size


@pytest.mark.parametrize("written", ["", "GB", "5XB", "5G", "-5GB", "5iB", -1, None, "five"])
def test_invalid_sizes_are_refused(written):
    with pytest.raises(ConfigurationError, match="size="):
        text.convert_file_size_to_int(written)


def test_a_size_that_is_no_text_also_raises_an_attribute_error():
    with pytest.raises(AttributeError):
        text.convert_file_size_to_int(None)
    with pytest.raises(ConfigurationError) as refused:
        text.convert_file_size_to_int("five")
    assert not isinstance(refused.value, AttributeError)


class Named:
    class Inner:
        pass


def test_get_pretty_name():
    assert text.get_pretty_name(Named.Inner) == "Named.Inner"
    assert text.get_pretty_name(Named.Inner()) == "Named.Inner"
    assert text.get_pretty_name(test_get_pretty_name) == "test_get_pretty_name"


def test_merge_dicts_merges_nested_dicts():
    destination = {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}
    merged = text.merge_dicts({"a": 5, "b": {"c": 6}, "e": {"f": 7}}, destination)
    assert merged is destination
    assert merged == {"a": 5, "b": {"c": 6, "d": 3}, "e": {"f": 7}}


@given(st.dictionaries(st.text(), st.integers()), st.dictionaries(st.text(), st.integers()))
def test_merge_dicts_is_update_without_nesting(source, destination):
    wanted = {**destination, **source}
    assert text.merge_dicts(source, destination) == wanted


def test_recursive_getattr():
    tree = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=1)))
    assert text.recursive_getattr(tree, "a.b.c") == 1
    with pytest.raises(AttributeError):
        text.recursive_getattr(tree, "a.x")


def test_listed_names_the_first_and_counts_the_rest():
    assert text.listed(["a", "b"]) == "a, b"
    assert text.listed(list("abc"), shown=3) == "a, b, c"
    assert text.listed(list("abcdefg"), shown=3) == "a, b, c and 4 more"


def test_ranks_are_written_as_ranges() -> None:
    assert text.spell_ranks([3]) == "rank 3"
    assert text.spell_ranks([0, 2, 3, 4, 7]) == "ranks 0, 2-4, 7"
    assert text.spell_ranks([4, 5, 6, 8, 9]) == "ranks 4-6, 8-9"


def test_positions_in_a_mesh():
    sizes = {"pp": 2, "dp_shard": 3, "cp": 1, "tp": 2}
    assert text.describe_position(sizes, 0) == "pp 0, dp_shard 0, tp 0"
    assert text.describe_position(sizes, 9) == "pp 1, dp_shard 1, tp 1"
    assert text.describe_mesh(sizes) == "pp 2 x dp_shard 3 x tp 2"


@pytest.mark.parametrize(
    ("written", "number"), [("0", 0), (" 12 ", 12), ("-3", -3), (str(2**63 - 1), 2**63 - 1)]
)
def test_whole_numbers_of_64_bits_are_read(written, number):
    assert text.whole_number(written) == number


@pytest.mark.parametrize(
    "written",
    ["", "1.5", "1e3", "\u00b2", str(2**63), "9" * 5000],
    ids=lambda written: written[:9] if written.isascii() else "superscript",
)
def test_other_texts_are_no_whole_numbers(written):
    with pytest.raises(ValueError, match=r"invalid literal|64 bits|Exceeds the limit"):
        text.whole_number(written)


def test_a_size_that_no_number_holds_is_refused():
    with pytest.raises(ConfigurationError, match="too large"):
        text.convert_file_size_to_int("9" * 400 + "GB")


@pytest.mark.parametrize("name", ["a.bin", "folder/a-1.bin", "a..b", "..a", "./a", "-", "a\udcff"])
def test_names_inside_a_folder_are_accepted(name: str) -> None:
    assert text.refuse_outside(name) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (None, "is not text but of type NoneType"),
        (["a"], "is not text but of type list"),
        (True, "is not text but of type bool"),
        (b"a", "is not text but of type bytes"),
        ("", "names no file"),
        (".", "names no file"),
        ("/etc/passwd", "is an absolute path"),
        ("//a", "is an absolute path"),
        ("..", "has a component '..'"),
        ("a/../b", "has a component '..'"),
        ("../a", "has a component '..'"),
        ("a/..", "has a component '..'"),
        ("a\0b", "contains a NUL character"),
        ("\ud800", "cannot be written as the name of a file"),
    ],
)
def test_names_outside_a_folder_are_refused(name: object, reason: str) -> None:
    refused = text.refuse_outside(name)

    assert refused is not None
    assert refused.startswith(reason)


@given(st.text())
def test_a_name_that_is_accepted_joins_to_a_path_below_the_folder(name: str) -> None:
    if text.refuse_outside(name) is None:
        assert os.path.normpath(os.path.join("/folder", name)).startswith("/folder/")


@pytest.mark.parametrize(
    ("span", "seconds"),
    [
        ("0", 0.0),
        ("90", 90.0),
        (" 90.5 ", 90.5),
        ("01:30", 90.0),
        ("01:30:00", 5400.0),
        ("100:00:00", 360000.0),
        ("1-12:00:00", 129600.0),
    ],
)
def test_forms_of_a_time_span(span, seconds):
    assert text.read_seconds(span) == seconds


@pytest.mark.parametrize(
    "span",
    ["", "soon", "-1", "1:2:3:4", "1h", "nan", "inf", "12:", "1-", "9" * 400, "9" * 5000, "1e999", "\u00b2"],
    ids=lambda span: span[:9],
)
def test_other_time_spans_are_refused(span):
    with pytest.raises(ValueError, match="could not convert|^" + re.escape(span)):
        text.read_seconds(span)


def test_one_problem_is_unchanged_and_several_are_a_list():
    assert text.itemized(["one"], "flags are wrong") == "one"
    assert text.itemized(["one", "two"], "flags are wrong") == "2 flags are wrong:\n  - one\n  - two"
