"""Filling a model whose parameters are spread over processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import PartialState, load_checkpoint_in_model
from accelerate.base.errors import CheckpointError

Run = Callable[..., list[Any]]


def build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def fill(path: str, broadcast: bool) -> Any:
    from torch.distributed.fsdp import fully_shard

    state = PartialState(cpu=True)
    model = build()
    for parameter in model.parameters():
        nn.init.constant_(parameter, state.process_index)
    if state.process_index and broadcast:
        path = "only rank 0 reads"
    fully_shard(model)
    load_checkpoint_in_model(model, path, broadcast_from_rank0=broadcast, strict=True)
    return {name: tensor.full_tensor().tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_sharded_model_gets_its_parts(run: Run, tmp_path: Path, broadcast: bool) -> None:
    expected = build().state_dict()
    save_file(expected, tmp_path / "model.safetensors")
    for found in run(fill, str(tmp_path / "model.safetensors"), broadcast, processes=2):
        assert found == {name: tensor.tolist() for name, tensor in expected.items()}


def refuse(path: str, broadcast: bool) -> tuple[str, bool]:
    from torch.distributed.fsdp import fully_shard

    state = PartialState(cpu=True)
    model = build()
    fully_shard(model)
    if state.process_index and broadcast:
        path = "only rank 0 reads"
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint_in_model(model, path, broadcast_from_rank0=broadcast, strict=True)
    model = build()
    fully_shard(model)
    load_checkpoint_in_model(model, path, broadcast_from_rank0=broadcast)
    loaded: Any = model[0].weight
    return str(caught.value), bool((loaded.full_tensor() == 7).all())


@pytest.mark.parametrize("broadcast", [False, True])
def test_what_does_not_fit_is_named_on_all_ranks(run: Run, tmp_path: Path, broadcast: bool) -> None:
    save_file({"0.weight": torch.full((4, 3), 7.0)}, tmp_path / "model.safetensors")
    for said, loaded in run(refuse, str(tmp_path / "model.safetensors"), broadcast, processes=2):
        assert f"{tmp_path}/model.safetensors does not fit this" in said
        assert "it lacks 0.bias, 1.weight, 1.bias" in said
        assert loaded, "without strict, what there is is loaded"
