"""The live view of a launch: lines of streams, what may reach the terminal, and when there is no view."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelerate.base import MissingPackageError, Package
from accelerate.launch import LaunchPlan, LineBuffer, Target, find_obstacle, live_view, remove_cursor_moves

PLAN = LaunchPlan("local", Target("script", "train.py"))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard error is a terminal."""
    ours, other = os.openpty()
    monkeypatch.setattr("accelerate.launch.terminal.ERR", other)
    yield ours
    os.close(ours)
    os.close(other)


def test_a_stream_gives_complete_lines_and_loses_none() -> None:
    stream = LineBuffer()
    given = [stream.feed(data) for data in (b"a", b"b\nc", b"", b"\n\nd\xff", b"\ne")]
    assert given == [b"", b"ab\n", b"", b"c\n\n", b"d\xff\n"]
    assert stream.shown == "e"


def test_a_progress_bar_shows_its_last_text() -> None:
    stream = LineBuffer()
    assert stream.feed(b" 10%\r 20%\r 30%\r") == b""
    assert stream.shown == " 30%"
    assert stream.feed(b"100%\nnext") == b" 10%\r 20%\r 30%\r100%\n"
    assert stream.shown == "next"


def test_a_progress_bar_takes_a_bounded_amount_of_memory() -> None:
    stream = LineBuffer()
    for number in range(20_000):
        stream.feed(b"\r%6d of 20000" % number)
    assert stream.shown == " 19999 of 20000"
    assert len(stream.unfinished) < 100_000
    line = b"x" * 200_000  # without \r nothing is overwritten
    assert LineBuffer(bytearray(line)).feed(b"y\n") == line + b"y\n"


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (b"plain \xff\n", b"plain \xff\n"),
        (b"\x1b[31mred\x1b[0m\x1b[K\n", b"\x1b[31mred\x1b[0m\x1b[K\n"),
        (b"a\x1b[2A\x1b[Hb\x1b[2Jc\x1b[?1049h\n", b"abc\n"),
        (b"\x1bM\x1bcx\n", b"x\n"),
        (b"\x1b]0;title\x07y\x1b]8;;http://a\x1b\\z\n", b"yz\n"),
    ],
)
def test_output_does_not_move_the_cursor_up(data: bytes, kept: bytes) -> None:
    assert remove_cursor_moves(data) == kept


def test_a_terminal_gets_a_view(terminal: int) -> None:
    assert find_obstacle({"TERM": "xterm"}) is None


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {}])
def test_a_terminal_without_a_cursor_gets_none(terminal: int, variables: dict[str, str]) -> None:
    assert "cannot move its cursor" in str(find_obstacle(variables))


@pytest.mark.parametrize("is_quiet", [False, True])
def test_without_a_terminal_one_line_says_so(
    is_quiet: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with live_view(PLAN, tmp_path, "train.py", is_quiet=is_quiet) as plan:
        assert plan is PLAN
    line = "accelerate launch: --monitor shows nothing: standard error is not a terminal.\n"
    assert capfd.readouterr().err == ("" if is_quiet else line)
    assert list(tmp_path.iterdir()) == []


def test_without_rich_one_error_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Package, "version", lambda row: None)
    with (
        pytest.raises(MissingPackageError, match="pip install 'rich'"),
        live_view(PLAN, tmp_path, "train.py"),
    ):
        pass
