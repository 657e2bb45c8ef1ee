"""Ranks of one machine find each other by the process that started them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.diagnostics import processes

RANK = """
import json, sys
from accelerate.diagnostics import processes
if sys.argv[1] == "look":
    found = processes.find_siblings(int(sys.argv[2]))
    print(json.dumps(None if found is None else [found.launcher, found.pids, found.is_complete]), flush=True)
else:
    print("ready", flush=True)
    input()
"""
STARTER = """
import os, subprocess, sys
def start(rank, *words, before=()):
    env = {**os.environ, "RANK": str(rank), "TORCHELASTIC_RUN_ID": "x"}
    command = [*before, sys.executable, sys.argv[1], *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
waiting = [start(1, "wait"), start(2, "wait", before=("sh", "-c", '"$@"; true', "sh"))]
for each in waiting:
    each.stdout.readline()
print(os.getpid(), waiting[0].pid, waiting[1].pid)
print(start(0, "look", "0", before=("sh", "-c", '"$@"; true', "sh")).communicate()[0])
for each in waiting:
    each.communicate("\\n")
"""


@pytest.mark.slow
def test_the_ranks_of_one_launcher_are_found_also_inside_of_other_programs(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    words = [sys.executable, "-c", STARTER, str(tmp_path / "rank.py")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    known, found = done.stdout.splitlines()[:2]
    launcher, first, shell = map(int, known.split())
    seen, pids, is_complete = json.loads(found)
    assert (seen, is_complete) == (launcher, True)
    assert sorted(pids) == ["0", "1", "2"]
    assert pids["1"] == first
    assert pids["2"] != shell  # but the script that it runs


def test_siblings_without_rank_variables_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "RANK" not in os.environ
    monkeypatch.setenv("RANK", "0")  # as a forked rank does: others cannot see it
    assert processes.find_siblings(0) is None
