"""A question answered on a terminal that is not there."""

from __future__ import annotations

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from accelerate.commands.config.config_utils import BulletMenu

DOWN, ENTER = "\x1b[B", "\r"


@pytest.mark.parametrize(
    ("keys", "default", "answer"), [(ENTER, 0, 0), (ENTER, 2, 2), (DOWN + ENTER, 0, 1), (DOWN + ENTER, 1, 2)]
)
def test_the_menu_returns_the_index_of_the_answer(keys: str, default: int, answer: int) -> None:
    menu = BulletMenu("Which?", ["same", "same", "other"])
    with create_pipe_input() as terminal, create_app_session(input=terminal, output=DummyOutput()):
        terminal.send_text(keys)
        assert menu.run(default) == answer
    assert menu.position == answer
