"""What processes write down about their end, and which failure is the cause."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from accelerate.base import patch_environment
from accelerate.data_loader import ReaderFailure as Sent
from accelerate.launch import Failure, Kind, Outcome, collect, count_of, find_first, record_digest, shortened
from accelerate.launch.failures import Exits, find_suspects
from accelerate.monitoring import End, RecordWriter, find_records


def describe(message: str, **variables: str) -> Failure:
    try:
        raise ValueError(message)
    except ValueError as error:
        return Failure.of(error, variables)


def test_a_failure_names_its_machine_and_counts_from_rank_0() -> None:
    failure = describe("no")
    assert (failure.rank, failure.world_size, failure.attempt) == (0, 1, 0)
    assert failure.host == socket.gethostname()


def test_a_failure_is_written_and_read_unchanged(tmp_path: Path) -> None:
    failure = describe("no\nway", RANK="3", WORLD_SIZE="4", TORCHELASTIC_RESTART_COUNT="1")
    assert failure.headline == "ValueError: no way"
    assert (failure.rank, failure.world_size, failure.attempt) == (3, 4, 1)
    assert failure.kind[:2] == ("ValueError", "Exception")
    assert failure.place.startswith(__file__)
    assert failure.write(tmp_path)
    outcome = collect(tmp_path, 1)
    assert outcome.failures == (failure,)
    assert outcome.seen == Exits({})


def test_failures_of_the_last_attempt_are_ordered_by_time(tmp_path: Path) -> None:
    late = replace(describe("late", RANK="0", TORCHELASTIC_RESTART_COUNT="2"), moment=9.0)
    early = replace(describe("early", RANK="1", TORCHELASTIC_RESTART_COUNT="2"), moment=5.0)
    before = describe("before", RANK="2", TORCHELASTIC_RESTART_COUNT="1")
    for failure in (late, early, before):
        failure.write(tmp_path)
    assert collect(tmp_path, 1).failures == (early, late)


def test_a_digest_is_appended_to_the_first_rank_of_this_machine(tmp_path: Path) -> None:
    with patch_environment(ACCELERATE_FAILURE_DIR=str(tmp_path)):
        for rank in (9, 8):
            RecordWriter(tmp_path / "run" / "run_records", rank).close()
    record_digest(tmp_path, f"rank 9 on {socket.gethostname()} failed")
    (eighth, ninth) = find_records(tmp_path / "run")
    (end,) = eighth
    assert isinstance(end, End)
    assert (end.how, end.digest) == ("failed", "rank 9 failed")
    assert list(ninth) == []
    assert collect(tmp_path, 1).failures == ()


def test_a_file_system_that_does_not_respond_delays_a_digest_by_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    with patch_environment(ACCELERATE_FAILURE_DIR=str(tmp_path)):
        RecordWriter(tmp_path / "run" / "run_records", 0).close()
    monkeypatch.setattr("accelerate.launch.failures.SECONDS_TO_RECORD", 0.1)
    monkeypatch.setattr(RecordWriter, "write", lambda *_: released.wait(60))
    with pytest.raises(TimeoutError, match="has not responded for 0.1 seconds"):
        record_digest(tmp_path, "rank 0 failed")
    released.set()


def test_a_digest_without_records_is_written_nowhere(tmp_path: Path) -> None:
    record_digest(tmp_path, "rank 0 failed")
    assert list(tmp_path.iterdir()) == []


def test_records_of_a_launcher_that_has_ended_are_no_error(tmp_path: Path) -> None:
    with patch_environment(ACCELERATE_FAILURE_DIR=str(tmp_path / "gone")):
        RecordWriter(tmp_path, 0).close()
    assert not (tmp_path / "gone").exists()


def test_a_deleted_folder_of_failures_is_no_second_error(tmp_path: Path) -> None:
    assert not describe("x").write(tmp_path / "gone")


def test_exits_are_written_and_read_unchanged(tmp_path: Path) -> None:
    seen = Exits({0: -15, 1: 7, 2: 0}, attempt=2, asked=(0,), asked_by=2, asked_at=1.5, killed=(0,))
    seen.write(tmp_path)
    outcome = collect(tmp_path, 7)
    assert outcome.seen == seen
    assert outcome.finished == [2]


def test_errors_of_an_attempt_before_the_one_that_was_seen_do_not_count(tmp_path: Path) -> None:
    describe("before", RANK="0").write(tmp_path)
    Exits({0: -9}, attempt=1).write(tmp_path)
    assert collect(tmp_path, 137).failures == ()


def test_a_long_line_is_cut() -> None:
    assert shortened("x" * 300) == "x" * 300
    assert shortened("x" * 1000, 10) == "xxxxxxxxxx ... (990 more characters)"


def test_invalid_rank_variables_do_not_hide_the_failure() -> None:
    assert count_of({"RANK": "3"}, "RANK", 0) == 3
    assert [count_of({"RANK": text}, "RANK", 7) for text in ("", "x", "-1", "9" * 5000, "\u00b2")] == [7] * 5
    assert Failure.of(RuntimeError("gone"), {"RANK": "x"}).headline == "RuntimeError: gone"


OWN = Failure(
    rank=1,
    world_size=4,
    attempt=0,
    host="node",
    pid=1,
    moment=9.0,
    kind=("ValueError", "Exception"),
    headline="ValueError: bad value",
    trace='Traceback (most recent call last):\n  File "t.py", line 3, in f\nValueError: bad value\n',
    place="t.py:3",
)
TORCH_TRACE = 'Traceback\n  File "/x/torch/distributed/distributed_c10d.py", line 1, in f\nX\n'


def lost(headline: str, kind: str = "RuntimeError", trace: str = "") -> Failure:
    """Of rank 0, and written before `OWN`."""
    return replace(
        OWN, rank=0, moment=1.0, kind=(kind, "Exception"), headline=f"{kind}: {headline}", trace=trace
    )


CONSEQUENCES = [
    lost(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    ),
    lost("Connection closed by peer [1]"),
    lost("NCCL error in: x", "DistBackendError"),
    lost("wait timeout after 300000ms, keys: /x", "DistStoreError"),
    lost("failed to recv, got 0 bytes", "DistNetworkError"),
    lost("Broken pipe", trace=TORCH_TRACE),
    lost("Connection reset by peer", "ConnectionResetError", TORCH_TRACE),
    lost("Timed out waiting 1800000ms for recv operation to complete", trace=TORCH_TRACE),
]


@pytest.mark.parametrize("consequence", CONSEQUENCES, ids=lambda failure: failure.headline[:30])
def test_an_error_of_the_script_is_the_cause_of_lost_connections_written_before(consequence: Failure) -> None:
    first = find_first(Outcome(1, (consequence, OWN), Exits({0: 1, 1: 1})))
    assert first is not None
    assert (first.kind, first.failure) == (Kind.OWN, OWN)


@pytest.mark.parametrize("consequence", CONSEQUENCES[:2], ids=("gloo", "peer"))
@pytest.mark.parametrize("code", [-9, -11, -15, 3])
def test_a_rank_that_ended_silently_is_the_cause_of_lost_connections(consequence: Failure, code: int) -> None:
    first = find_first(Outcome(1, (consequence,), Exits({0: 1, 1: code, 2: -15}, asked=(2,))))
    assert first is not None
    assert (first.kind, first.rank) == (Kind.SILENT, 1)


@pytest.mark.parametrize(
    "headline",
    [
        "KeyError: 'store'",
        "ReadTimeout: HTTPSConnectionPool(host='x', port=443): Read timed out.",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "KeyError: Caught KeyError in DataLoader worker process 0.",
        "RuntimeError: DataLoader worker (pid(s) 3592) exited unexpectedly",
    ],
)
def test_errors_of_the_script_with_similar_messages_are_no_lost_connections(headline: str) -> None:
    own = replace(OWN, headline=headline, kind=(headline.partition(":")[0], "Exception"))
    first = find_first(Outcome(1, (CONSEQUENCES[0], own)))
    assert first is not None
    assert (first.kind, first.rank) == (Kind.OWN, 1)


def test_of_errors_of_the_script_the_earliest_is_the_cause() -> None:
    early = replace(OWN, rank=3, moment=2.0)
    assert [each.rank for each in find_suspects(Outcome(1, (OWN, early)))] == [3, 1]


def test_ranks_ended_by_the_launcher_are_never_the_cause() -> None:
    seen = Exits({0: 1, 1: -15, 2: -9}, asked=(1, 2), killed=(2,))
    assert [each.rank for each in find_suspects(Outcome(1, (CONSEQUENCES[0],), seen))] == [0]
    assert find_first(Outcome(143, (), Exits({0: -15, 1: -2}, asked=(0,), asked_by=15))) is not None
    assert find_first(Outcome(130, (), Exits({0: -2}, asked=(0,), asked_by=2))) is None


def test_an_error_after_the_signal_of_the_launcher_is_ordered_last() -> None:
    late = replace(OWN, moment=11.0)
    seen = Exits({0: 1, 1: 1}, asked=(1,), asked_at=10.0)
    assert [each.kind for each in find_suspects(Outcome(1, (CONSEQUENCES[0], late), seen))] == [
        Kind.LOST,
        Kind.AFTER,
    ]
    soon = replace(OWN, moment=9.9)
    assert find_suspects(Outcome(1, (CONSEQUENCES[0], soon), seen))[0].failure == soon


def test_a_rank_that_finished_is_the_cause_only_where_others_waited_for_it() -> None:
    seen = Exits({0: 1, 1: 0})
    first = find_first(Outcome(1, (CONSEQUENCES[0],), seen))
    assert first is not None
    assert (first.kind, first.rank) == (Kind.LEFT, 1)
    assert [each.kind for each in find_suspects(Outcome(1, (replace(OWN, rank=0),), seen))] == [Kind.OWN]
    assert find_suspects(Outcome(3, (), Exits({0: 3, 1: 0})))[0].rank == 0


def test_an_error_about_another_rank_is_ordered_after_that_rank() -> None:
    said = replace(
        OWN,
        rank=0,
        moment=1.0,
        kind=("StateError", "AccelerateError", "Exception"),
        headline="StateError: Rank 1 did not arrive within 60 s: its node may be down.",
    )
    hang = replace(OWN, rank=2, moment=2.0, kind=("Hang",), headline="hang: rank 2 waits")
    found = find_suspects(Outcome(1, (said, hang, OWN), Exits({0: 1, 1: 1, 2: 1, 3: -9})))
    assert [(each.kind, each.rank) for each in found] == [
        (Kind.OWN, 1),
        (Kind.SILENT, 3),
        (Kind.HANG, 2),
        (Kind.OF_OTHERS, 0),
    ]


def test_a_signal_is_preferred_to_an_exit_code_as_the_cause() -> None:
    assert [each.rank for each in find_suspects(Outcome(1, (), Exits({0: 1, 1: -11})))] == [1, 0]


def test_the_dispatching_rank_is_ordered_before_the_ranks_that_received_its_error() -> None:
    try:
        Sent.of(KeyError("sample 21")).raise_here()
    except KeyError as error:
        received = replace(Failure.of(error, {"RANK": "2"}), moment=1.0)
    read = replace(received, rank=0, moment=9.0, trace=OWN.trace)
    found = find_suspects(Outcome(1, (received, read)))
    assert [(each.kind, each.rank) for each in found] == [(Kind.OWN, 0), (Kind.OF_OTHERS, 2)]


def test_processes_without_a_rank_write_different_files(tmp_path: Path) -> None:
    first = replace(describe("first"), pid=1, moment=1.0)
    second = replace(describe("second"), pid=2, moment=2.0)
    for failure in (second, first):
        failure.write(tmp_path)
    assert collect(tmp_path, 1).failures == (first, second)
