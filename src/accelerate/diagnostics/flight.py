"""What torch's own flight recorder says of the collectives that did not go through this package."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable
from typing import Any

from accelerate import torch_private

_ON_DEVICE = "dump_nccl_trace"
_DUMPS = ("dump_fr_trace", _ON_DEVICE)
"""Names of the recorders; a build of torch has those of the wires that it was built with."""
_DONE = "completed"


def describe_recorded() -> str:
    """Say for each process group how far its collectives have come; empty where nothing was recorded."""
    return "; ".join(text for name in _DUMPS for text in _describe_groups(_read(name)))


def seconds_on_device() -> float:
    """For how long the oldest collective of an accelerator has been on its way; 0.0 where none is.

    The thread that trains only enqueues these, and waits for them where it needs a result.
    """
    begun = [entry["time_created_ns"] for entry in _entries(_read(_ON_DEVICE)) if entry["state"] != _DONE]
    return max(time.time() - min(begun) / 1e9, 0.0) if begun else 0.0


def _read(name: str) -> dict[str, Any]:
    dump = getattr(torch_private, name)
    if dump is None:
        return {}
    found: dict[str, Any] = pickle.loads(dump(includeStackTraces=False))
    return found


def _entries(found: dict[str, Any]) -> Iterable[dict[str, Any]]:
    return (entry for entry in found.get("entries", ()) if not entry["is_p2p"])


def _describe_groups(found: dict[str, Any]) -> list[str]:
    last = {entry["process_group"]: entry for entry in _entries(found)}
    status = found.get("pg_status", {})
    return [
        f"{description or number}: {_progress(status.get(number, {}))}the last one is {_spell(entry)}"
        for (number, description), entry in last.items()
    ]


def _progress(status: dict[str, int]) -> str:
    enqueued, completed = (status.get(f"last_{kind}_collective", -1) for kind in ("enqueued", "completed"))
    return f"{max(completed, 0)} of {enqueued} collectives completed, " if enqueued > 0 else ""


def _spell(entry: dict[str, Any]) -> str:
    name, shapes, dtypes = entry["profiling_name"], entry["input_sizes"], entry["input_dtypes"]
    given = ", ".join(f"{list(shape)} {dtype}" for shape, dtype in zip(shapes, dtypes, strict=False))
    return f"#{entry['collective_seq_id']} {name} of {given or 'nothing'}"
