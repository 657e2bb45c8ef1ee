"""Values of all copies of the model, brought together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accelerate.nested import recursively_apply
from accelerate.strategies.megatron import library


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the means of losses over all copies of the model; called on all ranks of a stage.

    Args:
        losses: 0-d tensors.

    Returns:
        As many values, without gradients.
    """
    group = library.core("parallel_state").get_data_parallel_group(with_context_parallel=True)
    averaged = torch.stack([loss.detach().reshape(()).float() for loss in losses])
    torch.distributed.all_reduce(averaged, group=group)
    return averaged / torch.distributed.get_world_size(group)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Return the values of all copies of the model, each once, along the first dimension.

    Ranks that make up one copy have the same values, and all of them get the result.

    Args:
        tensor: nested tensors; 0-d ones count as one row.
    """
    group = library.core("parallel_state").get_data_parallel_group()

    def gather(leaf: torch.Tensor) -> torch.Tensor:
        rows = leaf.detach().reshape(1) if leaf.ndim == 0 else leaf.detach().contiguous()
        gathered = [torch.empty_like(rows) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(gathered, rows, group=group)
        return torch.cat(gathered)

    return recursively_apply(gather, tensor, error_on_other_type=True)
