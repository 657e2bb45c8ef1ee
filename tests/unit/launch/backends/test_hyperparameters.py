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
    ],
)
def test_arguments_become_names_and_values(words: list[str], values: dict[str, Any]) -> None:
    found = _convert_nargs_to_dict(words)
    assert found == values
    assert [type(value) for value in found.values()] == [type(value) for value in values.values()]


@pytest.mark.parametrize("words", [["3"], ["-2"], ["name", "--lr", "1"]])
def test_a_value_without_a_name_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=f"argument='{words[0]}': it belongs to no option"):
        _convert_nargs_to_dict(words)
