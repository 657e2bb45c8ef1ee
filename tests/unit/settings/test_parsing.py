"""Text of YAML and JSON within limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelerate.base.errors import ConfigurationError
from accelerate.settings import parsing


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_a_file_may_have_the_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"a" * parsing.LARGEST_FILE)
    assert len(parsing.read_text(path)) == parsing.LARGEST_FILE
    path.write_bytes(b"a" * (parsing.LARGEST_FILE + 1))
    with pytest.raises(ConfigurationError, match=f"more than {parsing.LARGEST_FILE // 1024} KiB"):
        parsing.read_text(path)


def test_values_may_have_the_largest_depth() -> None:
    parsing.check_values(nested(parsing.DEEPEST))
    with pytest.raises(ConfigurationError, match=f"more than {parsing.DEEPEST} levels"):
        parsing.check_values(nested(parsing.DEEPEST + 1))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({1: 2}, "it has the key 1, which is not text: write it in quotes"),
        ({"a": {"b": [{True: 2}]}}, "a.b has the key True, which is not text: write it in quotes"),
    ],
)
def test_a_key_that_is_no_text_is_named_with_its_place(content: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parsing.check_values(content)
    assert str(caught.value) == said


def test_yaml_errors_are_one_line_with_line_and_column() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parsing.parse_yaml("a: 1\nb: [1\nc: 2")
    assert "at line 3, column 2" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parsing.parse_yaml, "a: 1\nb: 2\na: 3\n"),
        (parsing.parse_yaml, "outer:\n  a: 1\n  'a': 1\n"),
        (parsing.parse_json, '{"a": 1, "a": 2}'),
        (parsing.parse_json, '{"outer": {"a": 1, "a": 1}}'),
    ],
)
def test_a_key_that_occurs_twice_is_refused(parse: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match="the key 'a' occurs twice: remove one of them"):
        parse(text)


def test_a_key_may_override_one_of_a_merged_mapping() -> None:
    text = "base: &base {a: 1, b: 2}\nown:\n  <<: *base\n  a: 3\n"
    assert parsing.parse_yaml(text)["own"] == {"a": 3, "b": 2}
