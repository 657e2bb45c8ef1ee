"""A script's own arguments as names and values."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.base.errors import ConfigurationError
from accelerate.launch.backends import _convert_nargs_to_dict


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], {}),
        (["--epochs", "3", "--lr", "1e-3", "--name", "run"], {"epochs": 3, "lr": 0.001, "name": "run"}),
        (["--fast", "-v", "--shift", "-2"], {"fast": True, "v": True, "shift": -2}),
        (["--epochs=3", "--url=a=b", "--none="], {"epochs": 3, "url": "a=b", "none": ""}),
        (["--yes", "True", "--no", "false", "--on=TRUE"], {"yes": True, "no": False, "on": True}),
        (["--scale", "-.5"], {"scale": -0.5}),
        (["--X_axis", "1"], {"X_axis": 1}),
        (["--seed", "007", "--run", "2024_01"], {"seed": "007", "run": "2024_01"}),
        (
            ["--version", "1.10", "--name=nan", "--n", "-1e-3"],
            {"version": "1.10", "name": "nan", "n": -0.001},
        ),
    ],
)
def test_arguments_become_names_and_values(words: list[str], values: dict[str, Any]) -> None:
    found = _convert_nargs_to_dict(words)
    assert found == values
    assert [type(value) for value in found.values()] == [type(value) for value in values.values()]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--files", "a", "b"],
            "argument='b': SageMaker passes one value of an option, and 'files' has several",
        ),
        (
            ["--files=a", "b"],
            "argument='b': SageMaker passes one value of an option, and 'files' has several",
        ),
        (["--tag", "a", "--tag", "b"], "argument='--tag': SageMaker passes each option once, and 'tag' is"),
        (["--lr", "1", "--"], "argument='--': it belongs to no option"),
    ],
)
def test_arguments_that_a_job_would_lose_are_refused(words: list[str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        _convert_nargs_to_dict(words)


@pytest.mark.parametrize("words", [["3"], ["-2"], ["name", "--lr", "1"]])
def test_a_value_without_a_name_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=f"argument='{words[0]}': it belongs to no option"):
        _convert_nargs_to_dict(words)
