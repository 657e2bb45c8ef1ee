"""The last screen of a run that failed names the cause: scripts without torch that fail in many ways.

The launcher is a fork that has imported torch; `test_launch.py` starts it as users do.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from accelerate.commands.launch import main
from accelerate.diagnostics.digest import MAX_LINES
from accelerate.report import read_run

LOST = "raise RuntimeError('[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1')"
HEAD = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"


class Screen(NamedTuple):
    """What a failed run showed last, all that it wrote to standard error, and its report for machines."""

    code: int
    text: str
    err: str
    report: dict[str, Any]


Fail = Callable[..., Screen]


NO_RANK: dict[str, str | None] = dict.fromkeys(
    (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "ACCELERATE_USE_CPU",
    )
)


def launch(folder: str, words: list[str]) -> None:
    """Be the launcher; in a folder, since the screen names the script as the command line does."""
    os.chdir(folder)
    sys.argv = ["accelerate-launch", *words]
    main()


@pytest.fixture
def fail(end: Callable[..., Any], tmp_path: Path) -> Iterator[Fail]:
    folders: list[Path] = []

    def fail(script: str, *options: str, grace: int = 15) -> Screen:
        (tmp_path / "train.py").write_text(HEAD + script)
        words = ["--cpu", "--num_processes", "2", "--main_process_port", "0", *options, "train.py"]
        env = {**NO_RANK, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace)}
        ended = end(launch, str(tmp_path), words, processes=1, env=env, timeout=120)
        (code,), (err,) = ended.codes, ended.outputs
        found = re.search(r"^=+ accelerate launch: the run failed =+$.*", err, re.DOTALL | re.MULTILINE)
        assert found is not None, err
        path = re.search(r"For machines: (\S+)", found[0])
        assert path is not None
        folders.append(Path(path[1]).parent)
        assert len(found[0].splitlines()) <= MAX_LINES
        return Screen(code, found[0], err, json.loads(Path(path[1]).read_text()))

    yield fail
    for folder in folders:
        shutil.rmtree(folder)


def test_the_records_of_a_killed_run_have_the_text_of_the_screen(fail: Fail, tmp_path: Path) -> None:
    script = """
from pathlib import Path
from accelerate.monitoring import RecordWriter, Start

writer = RecordWriter(Path("run_records"), rank)
writer.write(Start(time=time.time(), rank=rank, world_size=2, pid=os.getpid()))
if rank == 1:
    Path("run_records/rank-00001.jsonl").open("a").write('{"kind": "steps", "ti')
    os.kill(os.getpid(), 9)
time.sleep(60)
"""
    screen = fail(script)
    run = read_run(tmp_path)
    assert run.outcome()[0] == "failed"
    assert [end.digest for end in run.ends()] == [screen.text.rstrip()]
    assert "killed by signal 9" in screen.text


CAUSES = {
    "an exception": ("raise ValueError('mine')", 1, "ValueError: mine"),
    "an exit": ("os._exit(3)", 3, "rank 1 failed first: exit code 3, and left no Python error."),
    "SIGKILL": (
        "os.kill(os.getpid(), 9)",
        137,
        "rank 1 failed first: killed by signal 9 (SIGKILL) (out of memory?)",
    ),
    "SIGSEGV": ("os.kill(os.getpid(), 11)", 139, "rank 1 failed first: killed by signal 11 (SIGSEGV)"),
    "SIGTERM": ("os.kill(os.getpid(), 15)", 143, "rank 1 failed first: killed by signal 15 (SIGTERM)"),
    "a text": ("sys.exit('no data')", 1, "SystemExit: no data"),
    "an interrupt": ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    "a worker": (
        "raise KeyError('Caught KeyError in DataLoader worker process 0.\\nOriginal ...')",
        1,
        "DataLoader worker process 0",
    ),
}
IN_GATE = ("an exception", "an exit", "SIGKILL", "a worker")


@pytest.mark.parametrize(
    "cause", [pytest.param(cause, marks=[] if cause in IN_GATE else pytest.mark.slow) for cause in CAUSES]
)
def test_the_cause_is_named_when_the_other_rank_reports_a_lost_connection_first(
    fail: Fail, cause: str
) -> None:
    """Rank 0 has ended with its error before rank 1 fails, as seen by the launcher."""
    act, code, said = CAUSES[cause]
    screen = fail(f"if rank == 0: {LOST}\ntime.sleep(0.7)\n{act}\n")
    assert said in screen.text
    assert re.search("rank 1( on .*)? failed first", screen.text)
    assert "rank 0: afterwards: RuntimeError: [gloo" in screen.text
    assert "firewalls" not in screen.text
    assert screen.code == code
    assert screen.report["first_rank"] == 1
    assert screen.err.count("Traceback") == screen.text.count("Traceback") <= 1


def test_a_rank_that_exited_early_is_named(fail: Fail) -> None:
    screen = fail(f"time.sleep(0.3)\nif rank == 0:\n    time.sleep(0.5)\n    {LOST}\n")
    said = r"^rank 1 finished and left \(exit code 0\); rank 0 waited for it in \S+train.py:6: raise Runtime"
    assert re.search(said, screen.text, re.MULTILINE)
    assert "firewalls" not in screen.text
    assert screen.code == 1


def test_when_all_ranks_lost_connections_the_network_is_the_likely_cause(fail: Fail) -> None:
    screen = fail(LOST)
    assert "firewalls" in screen.text
    assert "the same error" in screen.text


def test_a_stopped_rank_ends_with_the_run(fail: Fail) -> None:
    script = (
        "if rank == 0:\n"
        "    open('pid', 'w').write(str(os.getpid()))\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n    time.sleep(100)\n"
        "import psutil\n"
        "def is_stopped():\n"
        "    try: return psutil.Process(int(open('pid').read())).status() == 'stopped'\n"
        "    except (OSError, ValueError): return False\n"
        "while not is_stopped(): time.sleep(0.02)\n"
        "raise ValueError('mine')\n"
    )
    screen = fail(script, grace=90)
    assert "ValueError: mine" in screen.text
    assert "rank 0: ended by the launcher" in screen.text


def test_a_rank_that_the_launcher_killed_did_not_run_out_of_memory(fail: Fail) -> None:
    script = (
        "if rank == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    open('deaf', 'w').close()\n"
        "    time.sleep(100)\n"
        "while not os.path.exists('deaf'): time.sleep(0.02)\nraise ValueError('mine')\n"
    )
    screen = fail(script, grace=1)
    assert "rank 0: killed by the launcher: did not end within 1 s after SIGTERM" in screen.text
    assert "memory" not in screen.text
    assert screen.report["killed_by_launcher"] == [0]
    assert screen.code == 1


def test_a_long_message_is_cut_on_the_screen_and_complete_in_the_report(fail: Fail) -> None:
    both = (
        "open(f'{rank}.here', 'w').close()\nwhile not os.path.exists(f'{1 - rank}.here'): time.sleep(0.01)\n"
    )
    screen = fail(both + "raise ValueError('\\n'.join(f'line {n}' for n in range(10_000)))\n")
    assert "lines are left out here; the whole text is in " in screen.text
    assert len(screen.err.splitlines()) < MAX_LINES + 10
    assert "line 5000\n" in screen.report["first"]["trace"]
    assert "rank 0: the same error" in screen.text or "rank 1: the same error" in screen.text


def test_the_last_attempt_counts(fail: Fail) -> None:
    script = (
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError('before')\n"
        "if rank == 1: os._exit(9)\ntime.sleep(100)\n"
    )
    screen = fail(script, "--max_restarts", "1")
    assert "rank 1 failed first: exit code 9" in screen.text
    assert "before" not in screen.text
    assert screen.code == 9
