"""Start the process of a part, stop it when its time is over, and find processes that it left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MARK = "GPU_ACCEPTANCE_PART"
"""Variable that all processes of a part inherit, also those that open a session of their own."""
SECONDS_TO_END = 5.0  # for processes that a part has started, after its own end
SECONDS_FOR_STACKS = 1.0
TAIL = 8000  # characters of the output that are kept of a part that failed
STATUSES = ("passed", "failed", "not available")


@dataclass
class Ended:
    """How a part ended: exit code, None when it was stopped; and the processes and files it left."""

    code: int | None
    seconds: float
    left: list[str]


def environment(root: Path, folder: Path, temporary: str, mark: str, is_host: bool) -> dict[str, str]:
    """Return the variables of a part: our source first on the path, and every cache in its folder."""
    ours = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PARALLELISM_CONFIG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    paths = [root / "src", root / "tests", root, *filter(None, [kept.get("PYTHONPATH")])]
    caches = {name: str(folder / "cache" / name.lower()) for name in CACHES}
    return {
        **kept,
        **caches,
        "TMPDIR": temporary,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        MARK: mark,
        **({"ACCELERATE_USE_CPU": "true"} if is_host else {}),
    }


CACHES = ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class Children:
    """The processes of all parts that run now."""

    def __init__(self, root: Path, out: Path) -> None:
        self.root, self.out = root, out
        self.marks: set[str] = set()
        self.is_stopped = False

    def run(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """Run one part in a folder of its own, which is removed; return its row of `results.json`."""
        name = request["name"]
        folder = self.out / "work" / name
        shutil.rmtree(folder, ignore_errors=True)
        for cache in ("", *CACHES):
            (folder / "cache" / cache.lower()).mkdir(parents=True, exist_ok=True)
        (folder / "files").mkdir()
        result, output = folder / "result.json", self.out / f"{name}.txt"
        request = {**request, "folder": str(folder / "files"), "result": str(result)}
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        # A short path: sockets of loaders' workers are in this folder, and their names are limited.
        with tempfile.TemporaryDirectory(prefix="part-", ignore_cleanup_errors=True) as temporary:
            ended = self._wait(folder, temporary, output, request, limit)
            ended.left += [f"file {path}" for path in Path(temporary).iterdir() if not is_of_torch(path)]
        row = {"name": name, "limit_seconds": round(limit), **read_result(result, ended, limit)}
        if row["status"] in ("failed", "timeout"):
            row["output_tail"] = output.read_text(encoding="utf-8", errors="replace")[-TAIL:]
        else:
            output.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        return row

    def _wait(
        self, folder: Path, temporary: str, output: Path, request: dict[str, Any], limit: float
    ) -> Ended:
        mark = f"{os.getpid()}:{request['name']}"
        command = [sys.executable, "-m", "gpu_acceptance.part", str(folder / "request.json")]
        variables = environment(self.root, folder, temporary, mark, request["device"] == "cpu")
        start, code = time.monotonic(), None
        self.marks.add(mark)
        if self.is_stopped:
            return Ended(None, 0.0, [])
        with output.open("wb") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd=folder / "files",
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGUSR1)  # it writes its stack
                time.sleep(SECONDS_FOR_STACKS)
            finally:
                seconds = time.monotonic() - start
                if code is None:
                    os.killpg(process.pid, signal.SIGKILL)
                left = stop(mark, 0 if code is None else SECONDS_TO_END)
                process.wait()
                self.marks.discard(mark)
        return Ended(code, seconds, left)

    def stop_all(self) -> None:
        """Kill what runs, and start nothing from here on."""
        self.is_stopped = True
        for mark in list(self.marks):
            stop(mark, 0)


def stop(mark: str, patience: float) -> list[str]:
    """Kill all processes of a part after some patience; return the command lines of those killed."""
    deadline = time.monotonic() + patience
    while (found := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    lines = []
    while found:  # one that starts another while it is killed leaves it for the next look
        for process in found:
            try:
                lines.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.1)
        found = marked(mark)
    return lines


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that have a part's mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):  # it has ended, or belongs to another user
            continue
    return found


def read_result(path: Path, ended: Ended, limit: float) -> dict[str, Any]:
    """Return what a part wrote, or why it wrote nothing that can be read."""
    row: dict[str, Any] = {"status": "failed", "reason": "", "figures": [], "facts": {}}
    if ended.code is None:
        row |= {"status": "timeout", "reason": f"stopped after {limit:.0f} s"}
    elif not path.exists():
        row["reason"] = f"ended with exit code {ended.code} and no result"
    else:
        row = check_result(path) or {**row, "reason": "wrote a result that cannot be read"}
        if row["status"] == "passed" and ended.code:
            row |= {"status": "failed", "reason": f"ended with exit code {ended.code} after its last check"}
    if row["status"] == "passed" and ended.left:
        row |= {"status": "failed", "reason": f"left behind: {'; '.join(ended.left)}"}
    return {**row, "seconds": round(ended.seconds, 2)}


def is_of_torch(path: Path) -> bool:
    """Whether this is the empty folder of logs that torch's elastic agent leaves."""
    return path.name.startswith("torchelastic_") and not any(path.glob("**/*.log"))


def check_result(path: Path) -> dict[str, Any] | None:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return row if isinstance(row, dict) and row.get("status") in STATUSES else None
