"""The one place that chooses how ranks share sequences."""

from __future__ import annotations

from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from accelerate.strategies.axes.base import Axis


def resolve_sequence_axis(parallelism: ParallelismConfig | None, mesh: Any) -> Axis:
    """Return the axis along which ranks share each sequence."""
    if parallelism is not None and parallelism.cp_enabled:
        from accelerate.strategies.axes.context import ContextAxis

        return ContextAxis(mesh, parallelism.cp_handler)
    if parallelism is not None and parallelism.sp_enabled:
        from accelerate.strategies.axes.sequence import SequenceAxis

        return SequenceAxis(parallelism.sp_size, parallelism.sp_handler)
    return Axis()
