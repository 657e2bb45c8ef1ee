"""Choice of the mesh axes of a run, from its `ParallelismConfig` and its device mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.parallelism_config import ParallelismConfig
from accelerate.strategies.axes import Axes, Axis, TensorAxis, UlyssesAxis

if TYPE_CHECKING:
    from accelerate.strategies.pipeline import PipelineAxis


def resolve_axes(
    parallelism: ParallelismConfig | None, mesh: Any, device: Any = None, precision: str = "no"
) -> Axes:
    """Returns the axes that shard layers, sequences or experts."""
    if parallelism is None:
        return Axes()
    tensor = TensorAxis(mesh) if parallelism.tp_enabled else Axis()
    sequence = _resolve_sequence_axis(parallelism, mesh, precision)
    expert = _resolve_expert_axis(parallelism, mesh)
    return Axes(tensor, sequence, expert, _resolve_pipeline(parallelism, mesh, device))


def _resolve_expert_axis(parallelism: ParallelismConfig, mesh: Any) -> Axis:
    if not parallelism.ep_enabled:
        return Axis()
    from accelerate.strategies.axes import ExpertAxis  # imports torch.distributed.tensor

    return ExpertAxis(parallelism, mesh)


def _resolve_pipeline(parallelism: ParallelismConfig, mesh: Any, device: Any) -> PipelineAxis | None:
    if not parallelism.pp_enabled or mesh is None:
        return None
    from accelerate.strategies.pipeline import PipelineAxis  # imports torch.distributed.pipelining

    assert parallelism.pp_handler is not None
    return PipelineAxis(mesh, parallelism.pp_handler, device)


def _resolve_sequence_axis(parallelism: ParallelismConfig, mesh: Any, precision: str) -> Axis:
    if parallelism.cp_enabled:
        from accelerate.strategies.axes import ContextAxis  # imports torch.distributed.tensor

        return ContextAxis(mesh, parallelism.cp_handler, precision)
    if parallelism.sp_enabled:
        return UlyssesAxis(parallelism.sp_size, parallelism.sp_handler)
    return Axis()
