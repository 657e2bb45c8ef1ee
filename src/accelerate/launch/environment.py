"""The variables that launched processes get in addition to those of this one."""

from __future__ import annotations

from accelerate.base import wrong_value
from accelerate.launch.machine import Machine
from accelerate.settings import Settings, env

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


def worker_environment(settings: Settings, machine: Machine, launcher: str) -> dict[str, str]:
    """The variables that the workers get in addition to those of this process."""
    added = env.encode(settings)
    ids = device_ids(settings.values["gpu_ids"])
    if ids and machine.hardware.visible_env:
        added[machine.hardware.visible_env] = ",".join(ids)
    present = machine.environ or {}
    usual = {**_openmp(settings, launcher), **_queues(settings)}
    return {**added, **{name: text for name, text in usual.items() if name not in present}}


def _openmp(settings: Settings, launcher: str) -> dict[str, str]:
    return INTEL_OPENMP if launcher == "local" and settings.values["cpu"] else {}


def _queues(settings: Settings) -> dict[str, str]:
    """One queue of kernels where Megatron-LM shares layers or sequences; its own FSDP wants several."""
    values = settings.values
    shares = (values["megatron_lm_tp_degree"] or 1) > 1 or (
        values["megatron_lm_context_parallel_size"] or 1
    ) > 1
    wanted = values["use_megatron_lm"] and shares and not values["megatron_lm_use_custom_fsdp"]
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if wanted else {}
