"""Checks of the options of a loss, which must fit the window, the mesh and the pipeline of the run.

`Accelerator.lm_loss` calls them before the loss is computed.
"""

from __future__ import annotations

import torch

from accelerate import losses
from accelerate.accelerator.accumulation import Accumulation
from accelerate.accelerator.runtime import Runtime
from accelerate.base import wrong_value
from accelerate.parallelism_config import MeshAxis
from accelerate.state import mesh_sizes
from accelerate.strategies import axes


def check_loss(runtime: Runtime, accumulation: Accumulation, shift: bool, reduction: str) -> losses.Sequences:
    """Returns the ranks with other tokens of the sequences of this rank, or raises an error for an option."""
    weighting = accumulation.weighting
    if reduction == "mean" and weighting is not None and weighting.counts_items and torch.is_grad_enabled():
        reason = "items are counted in this window, which divides losses by their number"
        raise wrong_value("reduction", reduction, reason, 'Pass reduction="sum", or leave num_items out')
    mesh = runtime.strategy.context.mesh
    sizes = mesh_sizes(mesh)
    stages = sizes.get(MeshAxis.PP.value, 1)
    if stages > 1:
        reason = "the head is on the last stage, which computes the loss of a pipeline"
        raise wrong_value("pp_size", stages, reason, "Compute the loss from logits in loss_fn")
    if axes.outputs_are_whole(runtime.request.parallelism):
        return losses.Sequences()
    sequences = losses.ranks_of_sequences(mesh, runtime.strategy.replicas, runtime.state.num_processes)
    if shift and sequences.groups:
        reason = "sequences are sharded, so the label of the last position of a rank is on another rank"
        fix = "Shift the labels of whole sequences, shard them like the inputs, and pass shift=False"
        raise wrong_value("shift", shift, reason, fix)
    return sequences
