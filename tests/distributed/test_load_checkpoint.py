"""Loading weights into a model that is sharded over processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.stand_ins.cases import call_for_each
from torch import nn

from accelerate import PartialState, load_checkpoint_and_dispatch, load_checkpoint_in_model
from accelerate.base import CheckpointError, ConfigurationError
from accelerate.hooks import align_module_device

Run = Callable[..., list[Any]]


def build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def fill(path: str, broadcast: bool) -> Any:
    from torch.distributed.fsdp import fully_shard

    state = PartialState()
    model = build()
    for parameter in model.parameters():
        nn.init.constant_(parameter, state.process_index)
    if state.process_index and broadcast:
        path = "only rank 0 reads"
    fully_shard(model)
    load_checkpoint_in_model(model, path, broadcast_from_rank0=broadcast, strict=True)
    return {name: tensor.full_tensor().tolist() for name, tensor in model.state_dict().items()}


def test_a_sharded_model_gets_its_parts(run: Run, tmp_path: Path) -> None:
    expected, path = build().state_dict(), tmp_path / "model.safetensors"
    save_file(expected, path)
    whole = {name: tensor.tolist() for name, tensor in expected.items()}
    cases = [(str(path), False), (str(path), True)]  # read on all ranks, and received from rank 0
    assert run(call_for_each, fill, cases, processes=2) == [[whole, whole]] * 2


def refuse(path: str, broadcast: bool) -> tuple[str, bool]:
    from torch.distributed.fsdp import fully_shard

    state = PartialState()
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


def test_weights_that_do_not_fit_are_named_on_all_ranks(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    save_file({"0.weight": torch.full((4, 3), 7.0)}, path)
    for found in run(call_for_each, refuse, [(path, False), (path, True)], processes=2):
        for said, loaded in found:
            assert f"{path} does not fit this" in said
            assert "it lacks 0.bias, 1.weight, 1.bias" in said
            assert loaded, "without strict, what there is is loaded"


class Tied(nn.Module):
    """Two names for one parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def receive(folder: str) -> list[Any]:
    """Fill models of this process from files that only rank 0 finds."""
    state = PartialState()
    path = folder if state.is_main_process else "only rank 0 reads"
    with torch.device("meta"):
        half, spread = Tied(), Tied()
    load_checkpoint_in_model(half, path, {"": "cpu"}, dtype=torch.bfloat16, broadcast_from_rank0=True)
    own = Path(folder) / f"rank {state.process_index}"
    spread = load_checkpoint_and_dispatch(
        spread, path, {"": "cpu", "norm": "disk"}, offload_folder=own, broadcast_from_rank0=True
    )
    with align_module_device(spread.norm):
        norm = spread.norm.weight.tolist()
    with pytest.raises(CheckpointError) as missing:
        load_checkpoint_in_model(Tied(), f"{folder}/model.bin", broadcast_from_rank0=True)
    return [
        half.head.weight is half.embed.weight,
        (str(half.embed.weight.dtype), str(half.norm.num_batches_tracked.dtype)),
        half.embed.weight.float().tolist(),
        norm,
        str(missing.value),
    ]


def test_models_that_are_not_sharded_get_all_of_what_rank_0_reads(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(6)
    model = Tied()
    nn.init.normal_(model.norm.weight)
    save_file(
        {n: t for n, t in model.state_dict().items() if n != "head.weight"}, tmp_path / "model.safetensors"
    )
    (tmp_path / "model.bin").write_bytes(b"torn")
    for is_tied, dtypes, embed, norm, missing in run(receive, str(tmp_path), processes=2):
        assert is_tied
        assert dtypes == ("torch.bfloat16", "torch.int64")
        assert embed == model.embed.weight.bfloat16().float().tolist()
        assert norm == model.norm.weight.tolist()
        assert f"{tmp_path}/model.bin cannot be read" in missing


def fill_parts(folder: str) -> list[Any]:
    """Fill the shards of this rank from a file of its own."""
    from torch.distributed.fsdp import fully_shard

    state = PartialState()
    model = build()
    fully_shard(model)
    parts: Any = {name: tensor.to_local() for name, tensor in model.state_dict().items()}
    path = Path(folder) / f"{state.process_index}.safetensors"
    save_file({name: torch.full_like(part, 3 + state.process_index) for name, part in parts.items()}, path)
    load_checkpoint_in_model(model, path, full_state_dict=False, strict=True)
    with pytest.raises(CheckpointError) as whole:
        load_checkpoint_in_model(model, f"{folder}/whole.safetensors", full_state_dict=False)
    with torch.device("meta"):
        empty = build()
    fully_shard(empty)
    with pytest.raises(ConfigurationError) as without:
        load_checkpoint_in_model(empty, path, full_state_dict=False)
    full: Any = model[0].weight
    return [full.full_tensor()[:, 0].tolist(), str(whole.value), str(without.value)]


def test_each_rank_loads_its_shards(run: Run, tmp_path: Path) -> None:
    save_file(build().state_dict(), tmp_path / "whole.safetensors")
    for weight, whole, without in run(fill_parts, str(tmp_path), processes=2):
        assert weight == [3, 3, 4, 4]
        assert "does not fit this part of a" in whole
        assert "0.weight is (4, 3) and not (2, 3)" in whole
        assert "have no values to fill" in without
