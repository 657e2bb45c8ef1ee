"""Sizes and names of the axes of the mesh."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accelerate.base import ConfigurationError, StateError
from accelerate.parallelism_config import ParallelismConfig
from accelerate.plugins import (
    DeepSpeedSequenceParallelConfig,
    ExpertParallelConfig,
    TorchContextParallelConfig,
    TorchSequenceParallelConfig,
    TorchTensorParallelConfig,
)


def test_one_process_is_no_mesh() -> None:
    config = ParallelismConfig()
    assert config.total_size == config.data_parallel_size == config.non_data_parallel_size == 1
    assert config.active_mesh_dims == []
    assert config.build_device_mesh("cpu") is None
    assert (config.cp_backend, config.sp_backend) == ("torch", "deepspeed")


def test_axes_have_an_order_and_common_names() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, tp_size=4, cp_size=5)
    assert config._get_mesh() == ((2, 3, 5, 4), ("dp_replicate", "dp_shard", "cp", "tp"))
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp", "cp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (120, 6, 20)
    assert config._sizes == {"pp": 1, "ep": 1, "dp_replicate": 2, "dp_shard": 3, "cp": 5, "sp": 1, "tp": 4}


def test_experts_are_the_outermost_axis_and_their_ranks_have_different_data() -> None:
    config = ParallelismConfig(ep_size=2, dp_replicate_size=3, dp_shard_size=4, tp_size=5)
    assert config._get_mesh() == ((2, 3, 4, 5), ("ep", "dp_replicate", "dp_shard", "tp"))
    assert config.dp_dim_names == config.dp_cp_dim_names == ["ep", "dp_replicate", "dp_shard"]
    assert config.dp_shard_cp_dim_names == ["ep", "dp_shard"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (120, 24, 5)
    assert config.ep_enabled
    assert config.ep_handler == ExpertParallelConfig()


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")  # which torch is about to change
def test_the_mesh_has_the_unions_of_its_axes() -> None:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2).build_device_mesh("cpu")
        assert mesh is not None
        assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "cp")
        sizes = {name: mesh[name].size() for name in ("dp_replicate", "dp", "dp_shard_cp", "dp_cp")}
        assert sizes == {"dp_replicate": 2, "dp": 4, "dp_shard_cp": 4, "dp_cp": 8}
    finally:
        dist.destroy_process_group()


def test_only_axes_with_several_processes_are_in_the_mesh() -> None:
    config = ParallelismConfig(dp_shard_size=2, sp_size=2)
    assert config._get_mesh() == ((2, 2), ("dp_shard", "sp"))
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert config.dp_shard_enabled
    assert config.sp_enabled
    assert not any((config.dp_replicate_enabled, config.tp_enabled, config.cp_enabled))


def test_sizes_assigned_later_are_used() -> None:
    config = ParallelismConfig()
    config.tp_size = 2
    config._set_size("dp_shard", 4)
    assert (config.total_size, config.dp_shard_size, config._sizes["tp"]) == (8, 4, 2)


def test_details_are_made_for_the_axes_that_are_used() -> None:
    config = ParallelismConfig(tp_size=2, cp_size=2)
    assert config.tp_handler == TorchTensorParallelConfig()
    assert config.cp_handler == TorchContextParallelConfig("allgather")
    assert config.sp_handler is None
    mine = TorchContextParallelConfig("alltoall")
    assert ParallelismConfig(cp_size=2, cp_handler=mine).cp_handler is mine


def test_the_environment_fills_what_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    config = ParallelismConfig(tp_size=3)
    assert (config.dp_shard_size, config.tp_size, config.total_size) == (2, 3, 6)


def test_a_config_is_written_as_json() -> None:
    written = json.loads(json.dumps(ParallelismConfig(cp_size=2).to_json()))
    assert written["cp_size"] == 2
    assert written["cp_handler"] == {"cp_comm_strategy": "allgather"}
    handler = ExpertParallelConfig(is_experts=lambda module: True)
    written = json.loads(json.dumps(ParallelismConfig(ep_size=2, ep_handler=handler).to_json()))
    assert "<lambda>" in written["ep_handler"]["is_experts"]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tp_size": 0}, "tp_size=0"),
        ({"cp_backend": "ring"}, "cp_backend='ring'"),
        ({"sp_backend": "ring"}, "sp_backend='ring'"),
        (
            {"sp_size": 2, "sp_backend": "torch", "sp_handler": DeepSpeedSequenceParallelConfig()},
            "sp_handler='DeepSpeedSequenceParallelConfig'.* Pass TorchSequenceParallelConfig",
        ),
        ({"cp_size": 2, "sp_size": 2}, 'sp_size=2: cp_size=2 shards .* already.* Set sp_backend="torch"'),
    ],
)
def test_invalid_settings_are_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        ParallelismConfig(**wrong)


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="parallelism='xp'"):
        ParallelismConfig()._set_size("xp", 2)


def test_the_mesh_is_made_of_all_processes() -> None:
    config = ParallelismConfig(dp_shard_size=2, tp_size=2)
    config._validate_accelerator(SimpleNamespace(num_processes=4))
    with pytest.raises(
        ConfigurationError, match=r"dp_shard_size=2 x tp_size=2 makes 4 processes, and there are 6"
    ):
        config._validate_accelerator(SimpleNamespace(num_processes=6))


def test_a_mesh_that_is_not_built_is_an_error() -> None:
    with pytest.raises(StateError, match="not built yet"):
        ParallelismConfig(tp_size=2).get_device_mesh()


def test_torch_shards_parameters_over_the_ranks_of_sequences() -> None:
    config = ParallelismConfig(dp_shard_size=2, sp_size=2, sp_backend="torch")
    assert isinstance(config.sp_handler, TorchSequenceParallelConfig)
    assert config.dp_shard_cp_dim_names == ["dp_shard", "sp"]
    assert config.dp_cp_dim_names == ["dp_shard", "sp"]
    assert config.data_parallel_size == 2
    assert ParallelismConfig(sp_size=2).dp_cp_dim_names == []


def test_torch_divides_sequences_by_both_axes() -> None:
    config = ParallelismConfig(dp_replicate_size=2, cp_size=2, sp_size=2, sp_backend="torch")
    assert config._get_mesh() == ((2, 2, 2), ("dp_replicate", "cp", "sp"))
    assert config.dp_shard_cp_dim_names == ["cp", "sp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "cp", "sp"]
    assert (config.data_parallel_size, config.non_data_parallel_size) == (2, 4)
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    try:
        mesh = config.build_device_mesh("cpu")
        assert mesh is not None
        assert (mesh["cp"].mesh.tolist(), mesh["sp"].mesh.tolist()) == ([5, 7], [4, 5])
    finally:
        dist.destroy_process_group()
