"""One screen for a run that failed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from accelerate.diagnostics.digest import (
    CAUSES,
    MAX_LINES,
    find_cause,
    format_screen,
    is_informative,
    write_report,
)
from accelerate.launch import Failure, Outcome
from accelerate.launch.failures import Exits

BASE = Failure(
    rank=1,
    world_size=8,
    attempt=0,
    host="node",
    pid=1,
    moment=1.0,
    kind=("ValueError", "Exception"),
    headline="ValueError: bad value 1",
    trace='Traceback (most recent call last):\n  File "t.py", line 3, in f\nValueError: bad value 1\n',
    place="t.py:3",
)
LOST = replace(
    BASE, rank=0, moment=2.0, place="t.py:9", headline="RuntimeError: Connection closed by peer [1]"
)
HERE = Path("here")


def same(rank: int) -> Failure:
    return replace(BASE, rank=rank, moment=1.0 + rank, headline=f"ValueError: bad value {rank}")


def test_the_first_traceback_is_shown_once_and_equal_ranks_are_folded() -> None:
    seen = Exits({4: -15, 6: -9, 7: -15, 8: 0}, asked=(4, 7))
    another = replace(LOST, rank=9, headline="RuntimeError: Connection closed by peer [2]")
    outcome = Outcome(1, (BASE, same(2), same(3), same(5), LOST, another), seen)
    lines = format_screen(outcome, HERE).splitlines()
    assert sum("Traceback" in line for line in lines) == 1
    assert "rank 1 on node failed first:" in lines
    assert "ranks 2-3, 5: the same error" in lines
    assert "ranks 4, 7: ended by the launcher" in lines
    assert "rank 6: killed by signal 9 (SIGKILL) (out of memory?)" in lines
    assert "rank 8: finished (exit code 0)" in lines
    assert "ranks 0, 9: afterwards: RuntimeError: Connection closed by peer [1]" in lines
    assert "Exit code: 1. For machines: here/failure.json" in lines


@pytest.mark.parametrize(
    ("number", "words"),
    [(-9, "killed by signal 9 (SIGKILL)"), (7, "exit code 7"), (-11, "killed by signal 11 (SIGSEGV)")],
)
def test_a_rank_that_left_silently_failed_before_those_that_lost_it(number: int, words: str) -> None:
    text = format_screen(Outcome(7, (LOST,), Exits({0: 1, 1: number})), HERE)
    assert f"rank 1 failed first: {words}" in text
    assert "left no Python error" in text
    assert "Traceback" not in text


def test_the_traceback_of_one_process_is_not_printed_twice() -> None:
    text = format_screen(Outcome(1, (replace(BASE, world_size=1, rank=0),)), HERE)
    assert "Traceback" not in text
    assert "ValueError: bad value 1" in text


@pytest.mark.parametrize(
    ("headline", "kind", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", "OutOfMemoryError", "out of memory"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "RuntimeError", "memory"),
        ("OSError: [Errno 98] Address already in use", "OSError", "uses the port"),
        ("ModuleNotFoundError: No module named 'x'", "ModuleNotFoundError", "not installed"),
        (
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)",
            "RuntimeError",
            "do not fit",
        ),
        (
            "RuntimeError: Expected to have finished reduction in the prior iteration before starting",
            "RuntimeError",
            "no part in the loss",
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: x",
            "DistBackendError",
            "lost their connections",
        ),
        (
            "torch.distributed.DistBackendError: [Rank 1] Watchdog caught collective operation timeout: x",
            "DistBackendError",
            "within the timeout",
        ),
        ("OSError: [Errno 24] Too many open files", "OSError", "limit of open files"),
        ("RuntimeError: received 0 items of ancdata", "RuntimeError", "limit of open files"),
        (
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.",
            "RuntimeError",
            "shared memory",
        ),
        (
            "RuntimeError: Expected all tensors to be on the same device, but found two",
            "RuntimeError",
            "another device",
        ),
        ("RuntimeError: CUDA error: device-side assert triggered", "RuntimeError", "out of range"),
        ("RuntimeError: Cannot re-initialize CUDA in forked subprocess.", "RuntimeError", "before it forked"),
        ("Hang: rank 0 waits; rank 1 is in Connection refused", "Hang", "Ranks wait"),
    ],
)
def test_common_causes_are_named_with_their_fix(headline: str, kind: str, cause: str) -> None:
    failure = replace(BASE, headline=headline, kind=(kind, "Exception"))
    found = find_cause(Outcome(1, (failure,)))
    assert found is not None
    assert cause in found.cause
    assert f"What to do:   {found.fix}" in format_screen(Outcome(1, (failure,)), HERE)


def test_an_ended_hang_is_the_failure() -> None:
    report = "accelerate: hang: rank 0 waits."
    hang = replace(BASE, kind=("Hang",), headline="hang: rank 0 waits", trace=report)
    outcome = Outcome(1, (hang, replace(hang, rank=0)), Exits({0: 1, 1: 1}), report)
    text = format_screen(outcome, HERE)
    assert text.count("accelerate: hang: rank 0 waits.") == 1
    assert "rank 0: ended for it as well" in text
    assert "failed first" not in text


def test_a_hang_that_was_reported_before_is_in_the_digest(tmp_path: Path) -> None:
    outcome = Outcome(1, (LOST,), hang="accelerate: hang: rank 0 waits.")
    assert "accelerate: hang: rank 0 waits." in format_screen(outcome, HERE).splitlines()
    write_report(outcome, tmp_path)
    assert json.loads((tmp_path / "failure.json").read_text())["hang"] == "accelerate: hang: rank 0 waits."


def test_every_cause_has_a_row_above() -> None:
    assert len(CAUSES) == 12


@pytest.mark.parametrize("message", ["rank 1 did not come: timed out", "shapes differ: size mismatch"])
def test_an_error_of_this_package_gets_no_likely_cause(message: str) -> None:
    ours = replace(
        BASE, headline=f"StateError: {message}", kind=("StateError", "AccelerateError", "Exception")
    )
    assert find_cause(Outcome(1, (ours,))) is None


def test_an_unknown_error_has_no_likely_cause() -> None:
    assert find_cause(Outcome(1, (BASE,))) is None
    assert "Likely cause" not in format_screen(Outcome(1, (BASE,)), HERE)


def test_wrong_arguments_of_the_script_are_named() -> None:
    text = format_screen(Outcome(1, (), Exits({0: 2, 1: 2})), HERE)
    assert "Likely cause: The script rejected its arguments" in text


def test_a_killed_single_process_ran_out_of_memory() -> None:
    text = format_screen(Outcome(137, ()), HERE)
    assert "killed by signal 9 (SIGKILL)" in text
    assert "ran out of memory" in text


def test_a_code_that_a_script_chose_needs_no_screen() -> None:
    assert not is_informative(Outcome(3, ()))
    assert is_informative(Outcome(137, ()))
    assert is_informative(Outcome(1, (BASE,)))
    assert is_informative(Outcome(7, (), Exits({1: 7})))


def test_the_report_for_machines(tmp_path: Path) -> None:
    write_report(Outcome(1, (BASE,), Exits({0: -15}, asked=(0,))), tmp_path)
    report = json.loads((tmp_path / "failure.json").read_text())
    assert report["exit_code"] == 1
    assert report["first_rank"] == report["first"]["rank"] == 1
    assert report["exits"] == {"0": -15}
    assert report["killed_by_launcher"] == []
    assert report["cause"] is None


@pytest.mark.parametrize("asked_by", [15, 2])
def test_a_rank_killed_by_the_launcher_did_not_run_out_of_memory(asked_by: int) -> None:
    seen = Exits({0: -9, 1: 1, 2: -asked_by}, asked=(0, 2), asked_by=asked_by, killed=(0,))
    text = format_screen(Outcome(1, (BASE,), seen), HERE)
    name = {15: "SIGTERM", 2: "SIGINT"}[asked_by]
    assert f"rank 0: killed by the launcher: did not end within 15 s after {name}" in text.splitlines()
    assert "rank 2: ended by the launcher" in text.splitlines()
    assert "memory" not in text


def test_a_single_process_that_the_launcher_killed_did_not_run_out_of_memory() -> None:
    outcome = Outcome(137, (), Exits({0: -9}, asked=(0,), killed=(0,)))
    text = format_screen(outcome, HERE)
    assert "The script was killed by the launcher: did not end within 15 s after SIGTERM." in text
    assert "memory" not in text
    assert "rank" not in text


WAITED = """Traceback (most recent call last):
  File "/home/me/train.py", line 12, in <module>
    accelerator.gather(loss)
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3000, in all_gather
    work.wait()
RuntimeError: Connection closed by peer [1]
"""


def test_a_rank_that_exited_while_others_waited_is_named() -> None:
    outcome = Outcome(1, (replace(LOST, trace=WAITED),), Exits({0: 1, 1: 0, 2: 0}))
    text = format_screen(outcome, HERE)
    assert (
        "ranks 1-2 finished and left (exit code 0); "
        "rank 0 waited for them in /home/me/train.py:12: accelerator.gather(loss)."
    ) in text.splitlines()
    assert "firewalls" not in text
    assert "Traceback" not in text


def test_the_network_is_suspected_only_where_nothing_else_failed() -> None:
    both = (LOST, replace(LOST, rank=1))
    assert "firewalls" in format_screen(Outcome(1, both, Exits({0: 1, 1: 1})), HERE)
    for codes in ({0: 1, 1: 0}, {0: 1, 1: 3}, {0: 1, 1: -11}):
        assert "firewalls" not in format_screen(Outcome(1, (LOST,), Exits(codes)), HERE)
    assert "firewalls" not in format_screen(Outcome(1, (LOST, BASE), Exits({0: 1, 1: 1})), HERE)


LONG = "Traceback (most recent call last):\n" + "".join(f"line {number}\n" for number in range(10_000))


@pytest.mark.parametrize("log_dir", [None, "logs"])
@pytest.mark.parametrize("hang", ["", "accelerate: hang: a\n" + "stack\n" * 500])
@pytest.mark.parametrize("kind", [("ValueError", "Exception"), ("Hang",), ("OutOfMemoryError",)])
@pytest.mark.parametrize("size", [2, 100])
def test_the_screen_has_at_most_sixty_lines(
    log_dir: str | None, hang: str, kind: tuple[str, ...], size: int
) -> None:
    first = replace(BASE, rank=0, kind=kind, trace=LONG, headline="x" * 100_000)
    others = tuple(
        replace(LOST, rank=rank, headline=f"RuntimeError: gloo {'y' * rank}") for rank in range(1, size)
    )
    lines = format_screen(Outcome(1, (first, *others), hang=hang), HERE, log_dir).splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) < 500
    assert sum("Traceback" in line for line in lines) == 1
    assert "line 0" in lines
    assert "line 9999" in lines
    cut = [
        line for line in lines if "lines are left out here; the whole text is in here/failure.json" in line
    ]
    assert cut
