"""Records of a run of two ranks: a restart from a checkpoint, NaN, a slow rank, a failure."""

from __future__ import annotations

import json
import math
from pathlib import Path

from accelerate.monitoring import (
    PHASES,
    Attempt,
    Checkpoint,
    Conclusion,
    End,
    Event,
    RankTimes,
    Record,
    RecordWriter,
    Setting,
    Start,
    Values,
    Window,
)

BEGIN = 1_700_000_000.0
STEPS = 300
RESTART_AT, RESTART_FROM = 200, 150
DIGEST = "===== accelerate launch: the run failed =====\nrank 1 failed first:\nValueError: bad batch"


def write_run(folder: Path, *, is_failed: bool = True, text: str = "") -> None:
    """Write the records of both ranks; `text` is added to every name and text that a run can choose."""
    for rank in range(2):
        writer = RecordWriter(folder / "run_records", rank)
        writer.write(start(rank, 0, text))
        if rank == 0:
            config = {f"lr{text}": 0.1, "batch_size": f"8{text}"}
            writer.write(Event(time=BEGIN, name="config", step=0, text=json.dumps(config)))
        writer.write(*steps(rank, 1, RESTART_AT, text))
        if rank == 0:
            writer.write(attempt(text))
        writer.write(start(rank, 1, text), *steps(rank, RESTART_FROM + 1, STEPS, text))
        if rank == 0:
            writer.write(*findings(text))
        if not is_failed:
            writer.write(End(time=BEGIN + STEPS, how="finished"))
        elif rank == 0:
            writer.write(End(time=BEGIN + STEPS, how="failed", digest=DIGEST + text))
        writer.close()


def attempt(text: str) -> Attempt:
    """Return the record of the launcher about the attempt that failed."""
    return Attempt(
        time=BEGIN + RESTART_AT,
        number=0,
        began=BEGIN - 1,
        rank=1,
        text=f"was ended by SIGKILL{text}",
        step=RESTART_AT,
        checkpoint=f"checkpoint_1{text}",
        checkpoint_step=RESTART_FROM,
    )


def start(rank: int, attempt: int, text: str) -> Start:
    """Return the record of a start."""
    settings = [
        Setting(name=f"mixed_precision{text}", value=f"bf16{text}", source=f"--mixed_precision{text}"),
        Setting(name="num_processes", value="2", source="default"),
    ]
    return Start(
        time=BEGIN + attempt * RESTART_AT,
        rank=rank,
        world_size=2,
        node=rank,
        num_nodes=2,
        pid=100 + rank,
        attempt=attempt,
        device=f"cuda:{rank}",
        device_name=f"GPU{text}",
        script=f"train.py{text}",
        versions={"torch": "2.13.0", f"package{text}": f"1.0{text}"},
        settings=settings if rank == 0 else [],
        mesh={f"dp_shard{text}": 2},
    )


def steps(rank: int, first: int, last: int, text: str) -> list[Record]:
    """Return the windows of ten steps each, and one logged value per step."""
    records: list[Record] = []
    seconds_by = {name: 0.1 * (index + 1) for index, name in enumerate(PHASES)}
    seconds = sum(seconds_by.values()) * (1.0 + rank)
    seconds_by = {name: value * (1.0 + rank) for name, value in seconds_by.items()}
    for step in range(first, last + 1):
        loss = 0.5 + 2.0 / step
        if step == 100:
            loss = math.nan
        if step == 120:
            loss = math.inf
        logged: dict[str, object] = {
            "loss": loss,
            f"accuracy{text}": 1 - 1 / step,
            f"phase{text}": f"a{text}",
        }
        if rank == 0:
            records.append(Values(time=BEGIN + step, step=step, values=logged))
        if step % 10 == 0:
            window = Window(
                time=BEGIN + step,
                first=step - 9,
                last=step,
                seconds=seconds,
                seconds_by=seconds_by,
                memory=2**30 + step * 2**20,
                peak_memory=2**31,
                samples=80,
                values={"learning_rate": 0.1 * (1 - step / STEPS)},
            )
            records.append(window)
    return records


def findings(text: str) -> list[Record]:
    """Return what rank 0 writes about checkpoints, events and the speed of ranks."""
    now = BEGIN + 250
    place = f"checkpoints/checkpoint_0{text}"
    compute = {"least": 0.1, "mean": 0.15, "most": 0.2}
    saved = {"path": place, "step": RESTART_FROM, "seconds": 2.5, "blocked": 0.25, "size": 3 * 2**30}
    return [
        Checkpoint(time=now, event="committed", **saved),  # type: ignore[arg-type]
        Checkpoint(time=now + 1, event="verified", path=place, step=RESTART_FROM),
        Checkpoint(time=now + 2, event="failed", path=place, step=250, text=f"no space left{text}"),
        Event(time=now + 3, name="warning", step=250, text=f"the disk is slow{text}"),
        Event(time=now + 3, name="warning", step=260, text=f"the disk is slow{text}"),
        Event(time=now + 4, name="hang", step=280, text=f"rank 1 waits for rank 0\n  in train.py:7{text}"),
        RankTimes(time=now, first=1, last=200, compute=compute, slowest=1, slow={"1": 0.25}),
        RankTimes(time=now + 5, first=201, last=250, compute=compute, slowest=1, slow={"1": 0.33}),
        Conclusion(time=now, name="straggler", step=250, text=f"rank 1 is 33 % slower since step 100{text}"),
    ]
