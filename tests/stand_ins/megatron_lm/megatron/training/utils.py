"""Values on which all ranks of a copy of the model agree."""

from typing import Any

import torch
from megatron.core import parallel_state


def logical_and_across_model_parallel_group(flag: bool) -> bool:
    found = torch.tensor([int(flag)])
    group = parallel_state.get_model_parallel_group()
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=group)
    return bool(found.item())


def reduce_max_stat_across_model_parallel_group(stat: Any) -> Any:
    found = torch.tensor([-1.0 if stat is None else float(stat)])
    group = parallel_state.get_model_parallel_group()
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=group)
    return None if found.item() == -1.0 else found.item()


def report_memory(name: str) -> None:
    print(name)
