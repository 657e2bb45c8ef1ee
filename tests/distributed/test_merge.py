"""Shards of two processes are merged into full weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accelerate.base import ConfigurationError
from accelerate.strategies.fsdp import merge_fsdp_weights

Run = Callable[..., list[Any]]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))


def shard_save_and_merge(folder: str) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(make_model(), mesh=mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/shards")
    merge_fsdp_weights(f"{folder}/shards", f"{folder}/whole")
    there = Path(folder, "whole", "model.safetensors").is_file()
    dist.destroy_process_group()
    return there


def test_two_processes_merge_what_they_sharded(run: Run, tmp_path: Path) -> None:
    assert run(shard_save_and_merge, str(tmp_path)) == [True, True]
    merged, wanted = load_file(tmp_path / "whole" / "model.safetensors"), make_model().state_dict()
    assert set(merged) == set(wanted)
    assert all(torch.equal(merged[name], wanted[name]) for name in wanted)


def merge_nothing(folder: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        merge_fsdp_weights(f"{folder}/shards", f"{folder}/whole")
    return str(caught.value)


def test_all_ranks_raise_the_error_of_rank_0(run: Run, tmp_path: Path) -> None:
    first, second = run(merge_nothing, str(tmp_path))
    assert first == second
    assert "the folder contains no sharded checkpoint" in first
