"""Comparison of example scripts, for tests that check which lines an example adds to another one."""

from __future__ import annotations

from pathlib import Path

from accelerate.base import wrong_value

FUNCTIONS = ("training_function", "main")


def get_function_contents_by_name(lines: list[str], name: str) -> list[str]:
    """Returns the lines of a function of an example, up to the next function or the `__main__` guard.

    Args:
        lines: Lines of the script.
        name: "training_function" or "main".

    Raises:
        ConfigurationError: The name is another one.
    """
    if name not in FUNCTIONS:
        known = ", ".join(FUNCTIONS)
        raise wrong_value("name", name, "examples have no such function", f"Choose one of {known}")
    start = next((index for index, line in enumerate(lines) if line.startswith(f"def {name}(")), len(lines))
    ends = (
        index for index in range(start + 1, len(lines)) if lines[index].startswith(("def ", "if __name__"))
    )
    return lines[start : next(ends, len(lines))]


def clean_lines(lines: list[str]) -> list[str]:
    """Returns the lines that are not empty and not only a comment."""
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def compare_against_test(
    base_filename: str, feature_filename: str, parser_only: bool, secondary_filename: str | None = None
) -> list[str]:
    """Returns lines that a feature adds to the base example and that the example with all features lacks.

    Args:
        base_filename: Path of the base example.
        feature_filename: Path of the example of the feature.
        parser_only: Whether to compare `main` instead of `training_function`.
        secondary_filename: Path of the example with all features. None uses the base example.
    """
    name = "main" if parser_only else "training_function"
    feature, base = _body(feature_filename, name), _body(base_filename, name)
    added = [line for line in feature if line not in base and "TESTING_MOCKED_DATALOADERS" not in line]
    complete = base if secondary_filename is None else _body(secondary_filename, name)
    return [line for line in added if line not in complete]


def _body(filename: str, name: str) -> list[str]:
    lines = Path(filename).read_text(encoding="utf-8").splitlines(keepends=True)
    return clean_lines(get_function_contents_by_name(lines, name))
