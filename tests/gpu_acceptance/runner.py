"""Run all parts, each as a process with a time limit; record what came of them after each one."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

from . import leftovers, report
from .children import Children
from .table import Part

ROOT = Path(__file__).parents[2]
LEAST_SECONDS = 5.0  # no part is started with less time than this


@dataclass
class Run:
    """What was asked for."""

    device: str | None
    tiny: bool
    out: Path
    imports: tuple[str, ...]
    limit: float
    jobs: int
    table: str
    start: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start


class Recorder:
    """The results so far; several threads add to them."""

    def __init__(self, asked: Run, parts: Sequence[Part]) -> None:
        self.asked, self.path = asked, asked.out / "results.json"
        self._lock = threading.Lock()
        self._rows = {part.name: not_run(part, "the run was cut off before it") for part in parts}
        self.results: dict[str, Any] = {
            "complete": False,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": report.commit_of(ROOT),
            "source": report.fingerprint_of(ROOT),
            "tiny": asked.tiny,
            "device": None,
            "versions": None,
            "memory": None,
        }
        self.write()

    def add(self, row: dict[str, Any]) -> None:
        with self._lock:
            facts = row.pop("facts", {})
            self.results.update(facts)
            self._rows[row["name"]] = row
            self.write()
            print(*report.lines_of(row, 24), sep="\n", flush=True)

    def write(self, complete: bool = False) -> None:
        self.results |= {
            "complete": complete,
            "seconds": round(self.asked.seconds, 1),
            "parts": list(self._rows.values()),
        }
        report.write(self.path, self.results)

    @property
    def is_good(self) -> bool:
        return all(map(report.is_good, self._rows.values()))


def not_run(part: Part, reason: str) -> dict[str, Any]:
    return {"name": part.name, "status": "not run", "reason": reason, "seconds": 0.0, "figures": []}


def run(asked: Run, parts: Sequence[Part], first: Part, last: Part) -> int:
    """Run the parts between the first and the last one; return the exit code."""
    asked.out.mkdir(parents=True, exist_ok=True)
    recorder, children = Recorder(asked, [first, *parts, last]), Children(ROOT, asked.out)
    before = leftovers.list_files(ROOT, asked.out)
    signal.signal(signal.SIGTERM, leave)

    def do(part: Part) -> dict[str, Any]:
        rest = asked.limit - asked.seconds
        if rest < LEAST_SECONDS:
            return not_run(part, f"the {asked.limit:.0f} s of the run were over")
        request = {
            "name": part.name,
            "function": part.function,
            "device": asked.device,
            "tiny": asked.tiny,
            "imports": asked.imports,
            "results": str(recorder.path),
        }
        return children.run(request, min(part.seconds, rest))

    try:
        recorder.add(do(first))
        asked.device = asked.device or (recorder.results["device"] or {}).get("type")
        if asked.device is not None:
            together = [part for part in parts if not part.alone]
            run_together(asked.jobs, together, lambda part: recorder.add(do(part)), children)
            for part in parts:
                if part.alone:
                    recorder.add(do(part))
            recorder.add(leftovers.judge(do(last), before, ROOT, asked.out))
        else:
            for part in (*parts, last):
                recorder.add(not_run(part, "there is no device"))
        recorder.write(complete=True)
    finally:
        children.stop_all()
        print("\n" + report.table(recorder.results))
        print(f"Results: {recorder.path}", flush=True)
    return 0 if recorder.is_good else 1


def run_together(jobs: int, parts: Sequence[Part], work: Callable[[Part], None], children: Children) -> None:
    """Run parts in a few threads; where this is interrupted, stop those that run and start no other."""
    pool = ThreadPoolExecutor(jobs)
    try:
        for each in [pool.submit(work, part) for part in parts]:
            each.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        children.stop_all()
        raise
    finally:
        pool.shutdown()


def leave(number: int, frame: FrameType | None) -> None:
    """End as on an interrupt, so that no part runs on."""
    sys.exit(128 + number)
