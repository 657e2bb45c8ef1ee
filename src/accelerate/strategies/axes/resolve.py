"""Choice of the mesh axes of a run, from its `ParallelismConfig` and its device mesh."""

from __future__ import annotations

from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from accelerate.strategies.axes.base import Axes, Axis
from accelerate.strategies.axes.tensor import TensorAxis
from accelerate.strategies.axes.ulysses import UlyssesAxis


def resolve_axes(parallelism: ParallelismConfig | None, mesh: Any) -> Axes:
    """Returns the axes that shard layers, sequences or experts."""
    if parallelism is None:
        return Axes()
    tensor = TensorAxis(mesh) if parallelism.tp_enabled else Axis()
    return Axes(tensor, _resolve_sequence_axis(parallelism, mesh), _resolve_expert_axis(parallelism, mesh))


def _resolve_expert_axis(parallelism: ParallelismConfig, mesh: Any) -> Axis:
    if not parallelism.ep_enabled:
        return Axis()
    from accelerate.strategies.axes.expert import ExpertAxis  # imports torch.distributed.tensor

    return ExpertAxis(parallelism, mesh)


def _resolve_sequence_axis(parallelism: ParallelismConfig, mesh: Any) -> Axis:
    if parallelism.cp_enabled:
        from accelerate.strategies.axes.context import ContextAxis  # imports torch.distributed.tensor

        return ContextAxis(mesh, parallelism.cp_handler)
    if parallelism.sp_enabled:
        return UlyssesAxis(parallelism.sp_size, parallelism.sp_handler)
    return Axis()
