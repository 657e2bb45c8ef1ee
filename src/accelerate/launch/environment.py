"""The variables that launched processes get in addition to those of this one."""

from __future__ import annotations

from accelerate.base.errors import wrong_value
from accelerate.launch.machine import Machine
from accelerate.settings import env
from accelerate.settings.merge import Settings

INTEL_OPENMP = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
"""For one process on the CPU: how Intel's OpenMP places its threads; others ignore it."""


def device_ids(gpu_ids: str | None) -> tuple[str, ...]:
    """Split ``--gpu_ids``; empty for "all".

    Raises:
        ConfigurationError: an entry is empty or given twice.
    """
    if gpu_ids is None or gpu_ids.strip() in ("", "all"):
        return ()
    ids = tuple(part.strip() for part in gpu_ids.split(","))
    if "" in ids or len(set(ids)) < len(ids):
        raise wrong_value("--gpu_ids", gpu_ids, "an entry is empty or given twice", "Write for example 0,1")
    return ids


def environment(settings: Settings, machine: Machine, launcher: str) -> dict[str, str]:
    """The variables that the workers get in addition to those of this process."""
    added = env.encode(settings)
    ids = device_ids(settings.values["gpu_ids"])
    if ids and machine.hardware.visible_env:
        added[machine.hardware.visible_env] = ",".join(ids)
    if launcher == "local" and settings.values["cpu"]:
        present = machine.environ or {}
        added.update({name: text for name, text in INTEL_OPENMP.items() if name not in present})
    return added
