"""Injected faults of one rank: one report names it and its line, and no rank is left running."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from accelerate import Accelerator
from accelerate.base import is_torch_version
from accelerate.diagnostics.digest import format_screen
from accelerate.diagnostics.peers import Peers
from accelerate.launch import FOLDER_VARIABLE, KEY_VARIABLE, collect
from accelerate.launch.script import report
from accelerate.state import AcceleratorState, GradientState, PartialState, process_group
from accelerate.utils import gather, gather_object, patch_environment, reduce

Run = Callable[..., Any]
SOURCE = Path(__file__).read_text().splitlines()
ONE = torch.ones(2)
LONG = 50.0  # seconds; no rank may be held for so long
WATCHER = "accelerate-watchdog"


RECORDED = ""
if is_torch_version(">=", "2.11"):  # before, torch records no operations of gloo
    RECORDED = r".*torch recorded on rank 0: .* gloo:all_reduce of \[{}\] Float"


class Fault(NamedTuple):
    """What one rank does wrong, and what is said of it.

    Attributes:
        act: what all ranks call with their accelerator.
        said: pattern of what the digest says; `<TAG>` is the line with the comment `TAG`.
        processes: number of ranks.
        fast: whether the fast tests have it.
    """

    act: Callable[[Accelerator], object]
    said: str
    processes: int = 2
    fast: bool = True


def skip(accelerator: Accelerator) -> None:
    if accelerator.process_index == 0:
        gather(ONE)  # SKIP-0
    time.sleep(LONG)  # SKIP-1


def skip_and_continue(accelerator: Accelerator) -> None:
    if accelerator.process_index == 0:
        gather(ONE)  # LATER-0
    reduce(ONE)  # LATER-1


def call_another(accelerator: Accelerator) -> None:
    gather(ONE) if accelerator.process_index else gather_object([1])


def pass_another_shape(accelerator: Accelerator) -> None:
    gather(torch.ones(2, 2 + accelerator.process_index))


def fail_alone(accelerator: Accelerator) -> None:
    if accelerator.process_index == 1:
        raise ValueError("this rank is broken")
    gather(ONE)  # FAILS-0


def return_early(accelerator: Accelerator) -> None:
    if accelerator.process_index == 0:
        gather(ONE)  # RETURNS-0


def exit_with_a_code(accelerator: Accelerator) -> None:
    if accelerator.process_index == 1:
        os._exit(3)
    gather(ONE)  # EXITS-0


def die(accelerator: Accelerator) -> None:
    if accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gather(ONE)  # DIES-0


def die_beside_two(accelerator: Accelerator) -> None:
    if accelerator.process_index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.wait_for_everyone()  # DIES-1


def block_outside_python(accelerator: Accelerator) -> None:
    if accelerator.process_index == 1:
        ctypes.CDLL(None).sleep(int(LONG))  # BLOCKS-1
    gather(ONE)  # BLOCKS-0


def receive_nothing(accelerator: Accelerator) -> None:
    if accelerator.process_index == 1:
        dist.recv(torch.empty(1), src=0)  # RECEIVES-1
    gather(ONE)  # RECEIVES-0


def skip_raw(accelerator: Accelerator) -> None:
    if accelerator.process_index == 0:
        dist.all_reduce(ONE.clone())  # RAW-0
    time.sleep(LONG)  # RAW-1


def skip_backward(accelerator: Accelerator) -> None:
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    loss = model(ONE).sum()
    if accelerator.process_index == 0:
        accelerator.backward(loss)  # BACKWARD-0
    time.sleep(LONG)  # BACKWARD-1


def skip_barrier(accelerator: Accelerator) -> None:
    if accelerator.process_index != 1:
        accelerator.wait_for_everyone()  # BARRIER-0
    time.sleep(LONG)  # BARRIER-1


def rank_0_sleeps(accelerator: Accelerator) -> None:
    if accelerator.process_index == 0:
        time.sleep(LONG)  # ZERO-0
    gather(ONE)  # ZERO-1


def stop_in_its_tracks(accelerator: Accelerator) -> None:
    if accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    gather(ONE)  # STOPS-0


HANGS = {
    "skips a collective": Fault(skip, r"rank 0 waits in gather #\d+, <SKIP-0>, .*; rank 1 is .*<SKIP-1>"),
    "raises": Fault(
        fail_alone, r"rank 0 waits in gather #\d+, <FAILS-0>, .*; rank 1 has exited with ValueError"
    ),
    "returns early": Fault(return_early, r"rank 0 waits in gather #\d+, <RETURNS-0>, .*; rank 1 has exited"),
    "exits": Fault(
        exit_with_a_code, r"rank 0 waits in gather #\d+, <EXITS-0>, .*; rank 1 has died", fast=False
    ),
    "is killed": Fault(die, r"rank 0 waits in gather #\d+, <DIES-0>, .*; rank 1 has died"),
    "is killed beside two": Fault(die_beside_two, r"<DIES-1>.*rank 2 has died", 3, fast=False),
    "blocks outside Python": Fault(
        block_outside_python,
        r"rank 0 waits in gather #\d+, <BLOCKS-0>, .*; rank 1 is .*<BLOCKS-1>",
        fast=False,
    ),
    "receives nothing": Fault(
        receive_nothing,
        r"rank 0 waits in gather #\d+, <RECEIVES-0>, .*; rank 1 waits in recv .*<RECEIVES-1>",
        fast=False,
    ),
    "skips torch's own": Fault(
        skip_raw, r"rank 0 waits in all_reduce .*, <RAW-0>, .*; rank 1 is .*<RAW-1>" + RECORDED.format(2)
    ),
    "skips a backward": Fault(
        skip_backward,
        r"rank 0 waits in backward, <BACKWARD-0>, .*; rank 1 is .*<BACKWARD-1>" + RECORDED.format(6),
    ),
    "skips a barrier": Fault(
        skip_barrier,
        r"ranks 0, 2 wait in wait_for_everyone #\d+, <BARRIER-0>, .*; rank 1 is .*<BARRIER-1>",
        3,
    ),
    "is rank 0": Fault(
        rank_0_sleeps, r"ranks 1-2 wait in gather #\d+, <ZERO-1>, .*; rank 0 is .*<ZERO-0>", 3, fast=False
    ),
}
MISMATCHES = {
    "skips one and continues": Fault(skip_and_continue, r"<LATER-0>.*<LATER-1>", fast=False),
    "calls another": Fault(call_another, r"Process 0: `.*gather_object`.*Process 1: `.*gather`"),
    "passes another shape": Fault(
        pass_another_shape, r"Process 0: \[2, 2\].*Process 1: \[2, 3\]", fast=False
    ),
}
FAULTS = {
    **HANGS,
    **MISMATCHES,
    "stops": Fault(stop_in_its_tracks, "<STOPS-0>.*rank 1 runs .* gives no answer"),
}


def names_of(faults: dict[str, Fault]) -> list[Any]:
    return [
        pytest.param(name, marks=() if fault.fast else pytest.mark.slow) for name, fault in faults.items()
    ]


def pattern(said: str) -> re.Pattern[str]:
    """A text with `<TAG>` for the lines that have the comment `TAG`, as reports name them."""
    lines = {text.rpartition("# ")[2]: number for number, text in enumerate(SOURCE, 1)}
    filled = re.sub(r"<([A-Z]+-\d)>", lambda found: f"FILE:{lines[found[1]]}\\b", said)
    return re.compile(filled, re.DOTALL)


def meet() -> Accelerator:
    """Build an Accelerator; late ranks on a busy machine are no fault here."""
    with patch_environment(ACCELERATE_HANG_TIMEOUT="0"):
        PartialState()
    return Accelerator()


def run_fault(name: str) -> None:
    """As a script under the launcher: an uncaught error is written down."""
    if name == "skips a backward":  # takes seconds, on one rank more of them than on the other
        importlib.import_module("torch._dynamo")
    try:
        FAULTS[name].act(meet())
    except Exception as error:
        report(error)
        sys.exit(1)


def outputs_of(ended: Any) -> str:
    return "\n".join(ended.outputs).replace(__file__, "FILE")


def run_fault_on_all_ranks(end: Run, folder: Path, name: str, **options: Any) -> tuple[Any, str]:
    """Let all ranks run a fault; return how they ended, and the launcher's digest of it."""
    env = {
        "ACCELERATE_HANG_TIMEOUT": "1",
        "ACCELERATE_HANG_ACTION": "abort",
        FOLDER_VARIABLE: str(folder),
        KEY_VARIABLE: "as a launcher hands it down",
    }
    ended = end(run_fault, name, processes=FAULTS[name].processes, env=env, **options)
    outcome = collect(folder, 1)
    return ended, format_screen(outcome, folder).replace(__file__, "FILE")


@pytest.mark.parametrize("name", names_of(HANGS))
def test_a_hang_is_reported_once_and_ends_the_run(end: Run, tmp_path: Path, name: str) -> None:
    ended, digest = run_fault_on_all_ranks(end, tmp_path, name)
    assert pattern(HANGS[name].said).search(digest), f"{digest}\n{outputs_of(ended)}"
    assert outputs_of(ended).count("accelerate: hang:") == 1, outputs_of(ended)
    assert any(ended.codes)
    assert name in ("raises", "returns early", "exits", "is killed", "is killed beside two") or all(
        ended.codes
    )


@pytest.mark.parametrize("name", names_of(MISMATCHES))
def test_a_mismatch_is_one_error_on_all_ranks(end: Run, tmp_path: Path, name: str) -> None:
    ended, digest = run_fault_on_all_ranks(end, tmp_path, name)
    assert pattern(MISMATCHES[name].said).search(digest), digest
    assert ended.codes == [1, 1]
    assert "accelerate: hang" not in outputs_of(ended)


@pytest.mark.slow
def test_a_rank_stopped_by_a_signal_is_named(end: Run, tmp_path: Path) -> None:
    ended, digest = run_fault_on_all_ranks(end, tmp_path, "stops", grace=3)
    assert pattern(FAULTS["stops"].said).search(digest), digest
    assert ended.codes == [1, -signal.SIGKILL]  # killed by the test, as a launcher does


def come_late() -> None:
    accelerator = meet()
    if accelerator.process_index == 1:
        time.sleep(3)  # LATE-1
    gather(ONE)  # LATE-0
    time.sleep(1)  # the watcher says at its next look that the wait is over
    accelerator.end_training()


def test_a_late_rank_is_reported_and_the_run_continues(end: Run) -> None:
    ended = end(come_late, env={"ACCELERATE_HANG_TIMEOUT": "1"})
    assert ended.codes == [0, 0]
    said = pattern(r"rank 0 waits in gather #\d+, <LATE-0>, .*; rank 1 is .*<LATE-1>")
    assert said.search(outputs_of(ended)), outputs_of(ended)
    assert "accelerate: the hang is over: rank 0 continues." in outputs_of(ended)


class Slow(torch.autograd.Function):
    """A backward that computes for two seconds."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            torch.ones(200, 200) @ torch.ones(200, 200)
        return gradient


def work_apart() -> None:
    """Long work on both ranks, of different kinds: no rank waits."""
    accelerator = meet()
    if accelerator.process_index == 0:
        leaf = torch.ones(1, requires_grad=True)
        Slow.apply(leaf).sum().backward()
    else:
        time.sleep(2)
    PartialState().wait_for_everyone()


@pytest.mark.slow
def test_long_work_is_no_hang(end: Run) -> None:
    ended = end(work_apart, env={"ACCELERATE_HANG_TIMEOUT": "1"})
    assert ended.codes == [0, 0]
    assert "accelerate: hang" not in outputs_of(ended)


def list_watchers() -> list[bool]:
    """Whether there is a watcher: at first, after its state was forgotten, with a new one, after the end."""
    found = [is_watched(Accelerator())]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    found.append(is_watched(None))
    accelerator = Accelerator()
    found.append(is_watched(accelerator))
    accelerator.wait_for_everyone()  # the store to which both connect ends with rank 0
    accelerator.end_training()
    return [*found, is_watched(None)]


def is_watched(accelerator: Accelerator | None) -> bool:
    """Whether a thread watches; one that is to end gets time for it."""
    deadline = time.monotonic() + 10
    while True:
        found = any(thread.name == WATCHER for thread in threading.enumerate())
        if found == (accelerator is not None) or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def test_watchers_end_with_the_state_and_with_training(run: Run) -> None:
    assert run(list_watchers) == [[True, False, True, False]] * 2


def count_watchers() -> int:
    Accelerator()
    return sum(thread.name == WATCHER for thread in threading.enumerate())


def test_no_limit_is_no_watcher(run: Run) -> None:
    assert run(count_watchers, env={"ACCELERATE_HANG_TIMEOUT": "0"}) == [0, 0]
    assert run(count_watchers, processes=1) == [0]


class Squares(torch.utils.data.Dataset[int]):
    """Returns for each worker whether it has a watcher."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return sum(thread.name == WATCHER for thread in threading.enumerate()) + 10 * index


def load_in_forks() -> list[int]:
    accelerator = Accelerator()
    loader = accelerator.prepare(torch.utils.data.DataLoader(Squares(), num_workers=1, batch_size=1))
    values = [int(batch) for batch in loader]
    assert is_watched(accelerator)
    return values


def leave_before_the_other_connects() -> None:
    if os.environ["RANK"] == "1":
        connect = process_group.connect_channel

        def connect_late(purpose: str, timeout: timedelta) -> Any:
            time.sleep(1.0)
            return connect(purpose, timeout)

        process_group.connect_channel = connect_late
    Accelerator()


def test_rank_0_keeps_its_store_until_others_have_connected(run: Run) -> None:
    assert run(leave_before_the_other_connects) == [None, None]


def test_forks_have_no_watcher(run: Run) -> None:
    assert run(load_in_forks) == [[0, 20], [10, 30]]


SCRIPT = """
import time, torch
from accelerate import Accelerator
accelerator = Accelerator()
if accelerator.process_index == 1:
    time.sleep(50)
accelerator.gather(torch.ones(1))
"""


def test_the_launcher_reports_an_aborted_hang(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--cpu", "--num_processes", "2", "--hang_timeout", "1", "--hang_action", "abort", "train.py"]
    ended = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 1
    place = re.compile(r"rank 0 waits in gather #1, train.py:7, since \d+ s; rank 1 is at train.py:6 ")
    assert place.search(ended.stderr), ended.stderr
    assert "Ranks wait for a rank that runs other code" in ended.stderr
    path = re.search(r"For machines: (\S+)", ended.stderr)
    assert path is not None
    assert json.loads(Path(path[1]).read_text())["first"]["kind"] == ["Hang"]


# The end of a process after a reset


def end_after_reset() -> None:
    def leave(peers: Peers, ending: str) -> None:
        with contextlib.suppress(RuntimeError):
            peers._channel._store.wait(["never written"], timedelta(seconds=0.5))

    Accelerator()
    patch = pytest.MonkeyPatch()
    patch.setattr(Peers, "leave", leave)  # until the end of the process
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_process_ends_well_while_the_watchdog_of_its_state_posts_the_end(run: Run) -> None:
    run(end_after_reset)
