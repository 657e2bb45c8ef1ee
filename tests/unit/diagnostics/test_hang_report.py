"""From the states of the ranks to the report."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from accelerate.diagnostics.hang_report import DEVICE, Activity, RankState, format_report, is_hang
from accelerate.state import AcceleratorState


def in_gather(rank: int, sequence: int = 581, seconds: float = 60.4) -> RankState:
    return RankState(
        rank,
        Activity.COLLECTIVE,
        "gather",
        sequence,
        "[2] float32",
        "/job/eval.py",
        44,
        seconds,
        stack="waiting\n",
    )


def in_save(rank: int) -> RankState:
    stack = '  File "/job/train.py", line 120, in main\n'
    return RankState(
        rank, Activity.OTHER_CODE, "save_state", 0, "", "/job/train.py", 120, stack=stack, host="a", pid=7
    )


def test_the_report_has_one_sentence_and_the_stack_of_the_differing_rank() -> None:
    states = [in_gather(0), in_save(1), in_gather(2), in_gather(3, seconds=61.0)]
    states.append(RankState(4, Activity.ENDED, ending="exited with ValueError"))
    assert format_report(states, "/job").splitlines() == [
        "accelerate: hang: ranks 0, 2-3 wait in gather #581, eval.py:44, since 61 s; "
        "rank 1 is in save_state, train.py:120 (not in a collective); rank 4 has exited with ValueError.",
        "rank 1 (process 7 on a) is at:",
        '  File "/job/train.py", line 120, in main',
    ]


def test_the_report_has_the_positions_of_ranks_in_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = SimpleNamespace(ndim=2, mesh_dim_names=("pp", "dp_shard"), shape=(2, 2))
    monkeypatch.setitem(AcceleratorState._shared_state, "device_mesh", mesh)
    text = format_report([in_gather(0), in_save(3)], "/job")
    assert text.splitlines()[-1] == "In the mesh rank 0 = pp 0, dp_shard 0; rank 3 = pp 1, dp_shard 1."


def test_all_operations_are_shown_when_no_group_is_the_largest() -> None:
    other = RankState(1, Activity.COLLECTIVE, "reduce", 581, "", "/job/train.py", 50, 60.0, stack="there\n")
    text = format_report([in_gather(0), other], "/other")
    assert "rank 0 waits in gather #581, /job/eval.py:44, since 60 s; rank 1 waits in reduce #581, " in text
    assert text.count("is at:") == 2


def test_operations_of_torch_and_lines_without_a_function() -> None:
    backward = RankState(0, Activity.TORCH, "backward", file="/job/train.py", line=44, seconds=9)
    script = RankState(1, Activity.OTHER_CODE, "<module>", file="/job/train.py", line=3)
    silent = RankState(2, Activity.SILENT, ending="gives no answer")
    assert format_report([backward, script, silent], "/job").startswith(
        "accelerate: hang: rank 0 waits in backward, train.py:44, since 9 s; "
        "rank 1 is at train.py:3 (not in a collective); rank 2 gives no answer."
    )


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        pytest.param([in_save(0), in_save(1)], False, id="no rank waits"),
        pytest.param([in_gather(0), in_gather(1)], True, id="all wait in the same collective"),
        pytest.param([in_gather(0), in_save(1)], True, id="one runs other code"),
        pytest.param([RankState(n, Activity.TORCH, "backward") for n in (0, 1)], False, id="long step"),
        pytest.param([RankState(0, Activity.TORCH, "backward"), in_save(1)], True, id="one has no backward"),
        pytest.param([RankState(0, Activity.TORCH, "backward"), in_gather(1)], True, id="two operations"),
        pytest.param(
            [RankState(0, Activity.TORCH, "backward"), RankState(1, Activity.ENDED)], True, id="one has ended"
        ),
    ],
)
def test_hangs_are_recognised_from_the_states_of_ranks(states: list[RankState], expected: bool) -> None:
    assert is_hang(states) is expected


def test_collectives_recorded_by_torch_are_reported_where_ranks_differ() -> None:
    states = [
        RankState(
            0, Activity.TORCH, "backward", file="/job/train.py", line=44, recorded="default_pg: 7 of 8"
        ),
        RankState(
            1, Activity.OTHER_CODE, "<module>", file="/job/train.py", line=3, recorded="default_pg: 7 of 7"
        ),
        RankState(
            2, Activity.TORCH, "backward", file="/job/train.py", line=44, recorded="default_pg: 7 of 8"
        ),
    ]
    lines = format_report(states, "/job").splitlines()
    assert lines[-2:] == [
        "torch recorded on ranks 0, 2: default_pg: 7 of 8.",
        "torch recorded on rank 1: default_pg: 7 of 7.",
    ]
    assert "recorded" not in format_report([replace(state, recorded="the same") for state in states], "/job")


def test_a_device_that_takes_long_on_all_ranks_is_no_hang() -> None:
    assert not is_hang([RankState(rank, Activity.TORCH, DEVICE) for rank in range(2)])
    assert is_hang([RankState(0, Activity.TORCH, DEVICE), RankState(1, Activity.TORCH, "backward")])
