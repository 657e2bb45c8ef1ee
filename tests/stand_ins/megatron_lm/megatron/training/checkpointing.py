"""Checkpoints: one file for each rank, and one that names the newest."""

from pathlib import Path
from typing import Any

import torch

from .global_vars import get_args

NEWEST = "latest_checkpointed_iteration.txt"


def checkpoint_exists(folder: str) -> bool:
    return (Path(folder) / NEWEST).is_file()


def _file(folder: str, iteration: int) -> Path:
    return Path(folder) / f"iter_{iteration:07d}" / f"rank_{torch.distributed.get_rank():02d}.pt"


def save_checkpoint(
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: int,
) -> None:
    args = get_args()
    path = _file(args.save, iteration)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": [part.state_dict() for part in model],
        "scheduler": opt_param_scheduler.state_dict(),
        "samples": args.consumed_train_samples,
        "operations": num_floating_point_operations_so_far,
    }
    if not args.no_save_optim:
        state["optimizer"] = optimizer.state_dict()
    torch.save(state, path)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (Path(args.save) / NEWEST).write_text(str(iteration))
    torch.distributed.barrier()


def load_checkpoint(ddp_model: Any, optimizer: Any, opt_param_scheduler: Any) -> tuple[int, int]:
    args = get_args()
    assert args.consumed_train_samples == args.consumed_valid_samples == 0
    iteration = int((Path(args.load) / NEWEST).read_text())
    state = torch.load(_file(args.load, iteration), weights_only=False)
    for part, weights in zip(ddp_model, state["model"], strict=True):
        part.load_state_dict(weights)
    if not args.no_load_optim:
        optimizer.load_state_dict(state["optimizer"])
    opt_param_scheduler.load_state_dict(state["scheduler"])
    args.consumed_train_samples = state["samples"]
    return iteration, state["operations"]
