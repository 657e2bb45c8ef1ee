"""Summary of a run for `accelerate report --json`, with the values of the page except points of charts."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from accelerate.report.reading import RecordGroups, Run
from accelerate.report.series import Series


def summarize(run: Run) -> dict[str, Any]:
    """Returns a summary for JSON."""
    state, text = run.outcome()
    goodput = run.goodput()
    summary = {
        "name": run.name,
        "folder": str(run.folder),
        "state": state,
        "text": text,
        "last_time": run.last_time,
        "mesh": run.mesh,
        "starts": [asdict(start) for start in run.starts],
        "failures": [asdict(end) for end in run.ends() if end.how == "failed"],
        "attempts": [asdict(attempt) for attempt in run.timeline.merged_attempts()],
        "goodput": goodput and {**asdict(goodput), "wall": goodput.wall, "fraction": goodput.fraction},
        "conclusions": _groups_as_dicts(run.conclusions),
        "values": {name: _by_rank(by_rank) for name, by_rank in run.values.items()},
        "texts": run.texts,
        "measured": {name: _by_rank(by_rank) for name, by_rank in run.measured.items()},
        "seconds_by": run.phase_seconds.total(),
        "ranks": [
            {
                "rank": rank,
                "position": entry.position,
                "steps": entry.steps,
                "last_step": entry.last_step,
                "seconds": entry.seconds,
                "seconds_by": entry.seconds_by,
                "samples": entry.samples,
                "items": entry.items,
                "flops_per_second": entry.flops_per_second,
                "mfu": entry.mfu,
                "peak_memory": entry.peak_memory,
                "starts": entry.starts,
                "ends": [end.how for end in entry.ends],
                "slower_than_mean": run.slow.get(rank),
                "damaged": entry.damaged,
            }
            for rank, entry in sorted(run.ranks.items())
        ],
        "checkpoints": _groups_as_dicts(run.checkpoints),
        "events": _groups_as_dicts(run.events),
        "config": run.config,
    }
    return finite_values(summary)  # type: ignore[no-any-return]


def _groups_as_dicts(entries: RecordGroups[Any]) -> list[dict[str, Any]]:
    return [
        {
            **asdict(entry.record),
            "count": entry.count,
            "ranks": sorted(entry.ranks),
            "last_step": entry.last_step,
        }
        for entry in entries.in_order()
    ]


def _by_rank(by_rank: dict[int, Series]) -> dict[str, Any]:
    return {
        str(rank): {
            "count": series.count,
            "not_finite": series.invalid,
            "last": series.last and series.last._asdict(),
            "least": series.least and series.least._asdict(),
            "greatest": series.greatest and series.greatest._asdict(),
        }
        for rank, series in sorted(by_rank.items())
    }


def finite_values(value: object) -> Any:
    """Returns a value for JSON, in which infinite values and NaN are strings."""
    if isinstance(value, dict):
        return {str(name): finite_values(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite_values(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
