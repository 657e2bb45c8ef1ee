"""How many processes run, and where."""

from __future__ import annotations

import pytest

from accelerate.launch.layout import _number_of_others


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, " (rank 1 of WORLD_SIZE=4)"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ""),
        ({"WORLD_SIZE": "4"}, ""),
        ({"RANK": "1"}, ""),
        ({}, ""),
    ],
)
def test_one_process_of_a_larger_run_is_named_as_such(variables: dict[str, str], said: str) -> None:
    assert _number_of_others(variables) == said
