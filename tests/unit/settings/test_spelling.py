from __future__ import annotations

from accelerate.settings import spelling


def test_each_spelling_writes_its_form() -> None:
    assert spelling.as_text(True) == "True"
    assert spelling.as_text(None) is None
    assert spelling.as_text_or_none(None) == "None"
    assert spelling.lower(True) == "true"
    assert spelling.lower(None) is None
    assert spelling.upper("no") == "NO"
    assert spelling.upper(None) is None
    assert spelling.as_bit(True) == "1"
    assert spelling.as_bit(False) == "0"
    assert spelling.as_bit(None) is None
    assert spelling.only_true("yes")(True) == "yes"
    assert spelling.only_true("yes")(False) is None
    assert spelling.unless_empty("") is None
    assert spelling.unless_empty(2) == "2"
    assert spelling.unless_empty_lower("CPU") == "cpu"
    assert spelling.unless_empty_lower(False) is None
