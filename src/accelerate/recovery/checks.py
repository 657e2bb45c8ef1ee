"""Settings and calls that do not work with replica groups."""

from __future__ import annotations

from accelerate.base import wrong_value
from accelerate.plugins import version_of
from accelerate.state import GradientState
from accelerate.strategies import RunRequest

_REFUSED = {
    "gradient_accumulation_steps": (
        "replica groups have divided the batches of this step",
        "Set it between two passes over a loader",
    ),
    "windows": (
        "replica groups repeat steps, and a window has batches that are read before",
        "Use accumulate(), or leave --replicas out",
    ),
    "num_items": (
        "the items of a step are not known when replica groups repeat it",
        "Return the mean loss, or leave --replicas out",
    ),
}
"""Reason and fix by option or method that does not work with replica groups."""


def refuse(name: str, value: object) -> None:
    """Raises the error for an option or a method that does not work with replica groups now."""
    reason, fix = _REFUSED[name]
    raise wrong_value(name, value, reason, fix)


def check_settings(request: RunRequest, gradients: GradientState) -> None:
    """Raises an error for settings that do not work with replica groups."""
    kinds = {"deepspeed_plugin": request.deepspeed, "megatron_lm_plugin": request.megatron}
    for name, plugin in kinds.items():
        if plugin is not None:
            raise wrong_value(name, type(plugin).__name__, "its engine takes the steps", "Leave it out")
    if request.fsdp is not None and not version_of(request.fsdp).takes_any_mesh:
        raise wrong_value("fsdp_version", 1, "replica groups average shards", "Set fsdp_version=2")
    mesh = request.parallelism
    if mesh is not None and mesh.pp_enabled:
        reason = "the ranks of a pipeline add up gradients after the step of their replica group"
        raise wrong_value("pp_size", mesh.pp_size, reason, "Set pp_size=1, or leave --replicas out")
    size = gradients.global_batch_size
    if size is not None:
        reason = "the global batch of replica groups is constant already"
        raise wrong_value("global_batch_size", size, reason, "Pass gradient_accumulation_steps")
    if not gradients.sync_with_dataloader:
        reason = "a step would have batches of two passes"
        raise wrong_value("sync_with_dataloader", False, reason, "Leave it out, or leave --replicas out")
