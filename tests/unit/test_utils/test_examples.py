"""What one script adds to another."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.test_utils import clean_lines, compare_against_test, get_function_contents_by_name

BASE = "import x\n\ndef training_function(config):\n    # a comment\n    train()\n\n\ndef main():\n    go()\n"
BASE += '\n\nif __name__ == "__main__":\n    main()\n'


def test_the_lines_of_a_function() -> None:
    lines = BASE.splitlines(keepends=True)
    assert clean_lines(get_function_contents_by_name(lines, "main")) == ["def main():\n", "    go()\n"]
    assert clean_lines(get_function_contents_by_name(lines, "training_function")) == [
        "def training_function(config):\n",
        "    train()\n",
    ]
    with pytest.raises(ValueError, match="name='other'"):
        get_function_contents_by_name(lines, "other")


def test_compare_against_test_finds_missing_lines(tmp_path: Path) -> None:
    base, feature, whole = (tmp_path / name for name in ("base.py", "feature.py", "whole.py"))
    base.write_text(BASE)
    feature.write_text(BASE.replace("    train()\n", "    train()\n    save()\n    log()\n"))
    whole.write_text(BASE.replace("    train()\n", "    log()\n    train()\n"))
    assert compare_against_test(str(base), str(feature), False, str(whole)) == ["    save()\n"]
    assert compare_against_test(str(base), str(feature), True, str(whole)) == []
    assert compare_against_test(str(base), str(feature), False) == ["    save()\n", "    log()\n"]
