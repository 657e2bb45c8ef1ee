"""Wrote the folders beside it, with the original package on two processes.

torchrun --nproc-per-node 2 write.py VERSION STATE_DICT_TYPE FOLDER: shards with FSDP 1 to `fsdp1`, with FSDP
2 to `fsdp2`; whole states with FSDP 2 to `whole`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


def step(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return optimizer


def main() -> None:
    version, form, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    options: dict[str, Any] = {"use_orig_params": True} if version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=form, **options)
    accelerator = Accelerator(cpu=True)
    model: Any = build()
    if version == 1:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = step(model)
    os.makedirs(folder, exist_ok=True)
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
