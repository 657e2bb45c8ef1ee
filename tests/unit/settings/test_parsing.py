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
