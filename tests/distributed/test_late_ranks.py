"""Ranks that build no Accelerator, and workers that give no batch, are named by those that wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.diagnostics.digest import format_screen
from accelerate.launch import FOLDER_VARIABLE, KEY_VARIABLE, collect
from accelerate.state import PartialState
from accelerate.utils import gather, patch_environment

Run = Callable[..., Any]
SOURCE = Path(__file__).read_text().splitlines()
LONG = 50.0  # seconds; no rank may be held for so long


def pattern(said: str) -> re.Pattern[str]:
    """A text with `<TAG>` for the lines that have the comment `TAG`, as reports and stacks name them."""
    lines = {text.rpartition("# ")[2]: number for number, text in enumerate(SOURCE, 1)}
    filled = re.sub(
        r"<([A-Z]+)>", lambda found: rf'{re.escape(__file__)}(:|", line ){lines[found[1]]}\b', said
    )
    return re.compile(filled, re.DOTALL)


def outputs_of(ended: Any) -> str:
    return "\n".join(ended.outputs)


def come_to_the_group(late: int, seconds: float) -> None:
    """One rank, or with -1 all of them, builds its Accelerator late."""
    if late in (-1, int(os.environ["RANK"])):
        time.sleep(seconds)
    accelerator = Accelerator()  # GROUP
    accelerator.end_training()


@pytest.mark.slow
def test_waiting_ranks_name_the_rank_that_joins_late(end: Run) -> None:
    ended = end(come_to_the_group, 1, 3.0, processes=3, env={"ACCELERATE_HANG_TIMEOUT": "1"})
    assert ended.codes == [0, 0, 0]
    said = r"ranks 0, 2 wait in init_process_group, <GROUP>, since \d+ s; rank 1 did not come, "
    assert pattern(said).search(outputs_of(ended)), outputs_of(ended)
    assert outputs_of(ended).count("accelerate: hang:") == 1, outputs_of(ended)
    assert "accelerate: the hang is over: rank 0 continues." in outputs_of(ended)


def test_waiting_ranks_name_a_late_rank_0_with_its_address(end: Run) -> None:
    ended = end(come_to_the_group, 0, 3.0, env={"ACCELERATE_HANG_TIMEOUT": "1"})
    assert ended.codes == [0, 0]
    said = r"rank 1 waits in init_process_group, <GROUP>, .*; rank 0 did not come.*not answer at 127.0.0.1"
    assert pattern(said).search(outputs_of(ended)), outputs_of(ended)
    assert "accelerate: the hang is over: rank 1 continues." in outputs_of(ended)


def test_ranks_that_all_join_late_are_no_hang(end: Run) -> None:
    ended = end(come_to_the_group, -1, 2.0, env={"ACCELERATE_HANG_TIMEOUT": "1"})
    assert ended.codes == [0, 0]
    assert "accelerate:" not in outputs_of(ended)


BEFORE = """
import glob, os, signal, sys, time
from accelerate import Accelerator
open(f"{os.environ['RANK']}.imported", "w").close()
while len(glob.glob("*.imported")) < 3: time.sleep(0.05)
acts = {
    "sleeps": lambda: time.sleep(100),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "ends": lambda: os._exit(0),
}
if os.environ["RANK"] == sys.argv[1]:
    acts[sys.argv[2]]()
Accelerator()
"""
BY_US = ("accelerate.commands.launch", "--cpu", "--num_processes")
BY_TORCH = ("torch.distributed.run", "--nproc_per_node")
STACK = r'rank \d \(process \d+ on .*\) is at:\n  File "\S*before.py", line 12, in <module>.*line 7, in '
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("launcher", "rank", "act", "said"),
    [
        pytest.param(
            BY_US, 0, "sleeps", rf"; rank 0 did not come: its process \d+ on \S+ sleeps.*{STACK}", marks=slow
        ),
        pytest.param(BY_US, 1, "sleeps", rf"; rank 1 did not come: .*{STACK}", marks=slow),
        pytest.param(BY_US, 1, "stops", r"; rank 1 did not come: .* is stopped by a signal", marks=slow),
        pytest.param(BY_US, 1, "ends", r"; rank 1 has ended before it came \(process \d+ on", marks=slow),
        pytest.param(BY_TORCH, 0, "sleeps", r"; rank 0 did not come: .* sleeps.*py-spy dump", marks=slow),
        pytest.param(BY_TORCH, 1, "ends", r"; rank 1 has ended before it came", marks=slow),
    ],
)
def test_a_rank_that_builds_no_accelerator_ends_the_run(
    tmp_path: Path, launcher: tuple[str, ...], rank: int, act: str, said: str
) -> None:
    (tmp_path / "before.py").write_text(BEFORE)
    grace = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    limits = {"ACCELERATE_HANG_TIMEOUT": "1", "ACCELERATE_HANG_ACTION": "abort", "ACCELERATE_USE_CPU": "true"}
    ended = subprocess.run(
        [sys.executable, "-m", *launcher, "3", "before.py", str(rank), act],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, **limits, **grace},
        check=False,
    )
    assert ended.returncode == 1
    others = "-".join(str(other) for other in range(3) if other != rank).replace("0-2", "0, 2")
    found = rf"accelerate: hang: ranks {others} wait in init_process_group, before.py:13, since \d+ s{said}"
    assert re.search(found, ended.stderr, re.DOTALL), ended.stderr
    by_us = launcher is BY_US
    assert ended.stderr.count("accelerate: hang: ") == 1 + by_us, ended.stderr  # on the last screen again
    assert ("the run failed" in ended.stderr) == by_us


class Gone(torch.utils.data.Dataset[torch.Tensor]):
    """A worker of rank 0 is lost in its last sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 6:
            time.sleep(LONG)  # WORKER
        return torch.tensor(index)


def wait_for_data() -> None:
    with patch_environment(ACCELERATE_HANG_TIMEOUT="0"):  # on a busy machine ranks come at times far apart
        PartialState()
    accelerator = Accelerator()
    loader = torch.utils.data.DataLoader(Gone(), batch_size=1, num_workers=2)
    for batch in accelerator.prepare(loader):  # READS
        gather(batch)  # GATHERS


def test_a_worker_that_gives_no_batch_is_named_with_its_line(end: Run, tmp_path: Path) -> None:
    env = {
        "ACCELERATE_HANG_TIMEOUT": "2",
        "ACCELERATE_HANG_ACTION": "abort",
        FOLDER_VARIABLE: str(tmp_path),
        KEY_VARIABLE: "as a launcher hands it down",
    }
    ended = end(wait_for_data, env=env)
    assert ended.codes == [1, 1]
    said = (
        r"accelerate: hang: rank 1 waits in gather #\d+, <GATHERS>, .*; rank 0 waits for a batch, <READS>, .*"
        r"worker \d \(process \d+\), which owes the next batch, sleeps.*<WORKER>"
    )
    digest = format_screen(collect(tmp_path, 1), tmp_path)
    assert pattern(said).search(digest), f"{digest}\n{outputs_of(ended)}"


SLOW_DATA = """
import os, time
from torch.utils.data import DataLoader, Dataset
from accelerate import Accelerator

class Slow(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        while index == 3 and not os.path.exists("go"):
            time.sleep(1)
        return index

if __name__ == "__main__":
    loader = DataLoader(Slow(), num_workers=1, multiprocessing_context="{method}")
    for batch in Accelerator().prepare(loader):
        pass
    time.sleep(2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_one_process_reports_the_line_of_its_worker(tmp_path: Path, method: str) -> None:
    (tmp_path / "slow.py").write_text(SLOW_DATA.format(method=method))
    env = {**os.environ, "ACCELERATE_HANG_TIMEOUT": "1"}
    words = [sys.executable, "slow.py"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=env) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "slow.py" in line and "in __getitem__" in line:
                (tmp_path / "go").touch()
    text = "".join(lines)
    said = (
        r"accelerate: waiting for data: rank 0 waits for a batch, slow.py:16, since \d+ s.*"
        r'worker 0 \(process \d+\), which owes the next batch, sleeps.*slow.py", line 11, in __getitem__'
    )
    assert process.returncode == 0
    assert re.search(said, text, re.DOTALL), text
    assert text.endswith("accelerate: the batch has come.\n")
