"""The strategy follows from request and topology."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import ConfigurationError, is_torch_version
from accelerate.plugins import ActivationCheckpointing, MegatronLMPlugin, TorchDynamoPlugin
from accelerate.state import Topology
from accelerate.strategies import (
    DataParallel,
    ReplicatedTensorParallel,
    RunRequest,
    Strategy,
    TensorParallel,
    resolve_strategy,
)
from accelerate.strategies.deepspeed import DeepSpeed
from accelerate.strategies.fsdp import Fsdp1, Fsdp2
from accelerate.strategies.xla import XlaFullyShard, XlaFullySharded, XlaReplicas

HAS_PIPELINES = pytest.mark.skipif(is_torch_version("<", "2.13"), reason="pipelines need torch 2.13")


def with_engine(**fields: Any) -> RunRequest:
    mesh = fields.pop("mesh", None)
    parallelism = None if mesh is None else ParallelismConfig(**mesh)
    return RunRequest(deepspeed=DeepSpeedPlugin(), parallelism=parallelism, **fields)


def request(version: int | None = None, mesh: dict[str, int] | None = None, **fields: Any) -> RunRequest:
    plugin = None if version is None else FullyShardedDataParallelPlugin(fsdp_version=version, **fields)
    return RunRequest(fsdp=plugin, parallelism=None if mesh is None else ParallelismConfig(**mesh))


@pytest.mark.parametrize(
    ("asked", "size", "expected"),
    [
        (request(), 1, Strategy),
        (request(), 2, DataParallel),
        (request(2), 1, Strategy),
        (request(1), 2, Fsdp1),
        (request(2), 2, Fsdp2),
        (request(2, {"dp_shard_size": 2}), 2, Fsdp2),
        (request(2, {"dp_replicate_size": 2, "dp_shard_size": 2}), 4, Fsdp2),
        (
            request(1, {"dp_replicate_size": 2, "dp_shard_size": 2}, sharding_strategy="HYBRID_SHARD"),
            4,
            Fsdp1,
        ),
        (request(None, {"dp_replicate_size": 2}), 2, DataParallel),
        (request(None, {"tp_size": 2}), 2, TensorParallel),
        (request(None, {"tp_size": 2, "dp_replicate_size": 2}), 4, ReplicatedTensorParallel),
        (request(None, {"tp_size": 2, "cp_size": 2}), 4, ReplicatedTensorParallel),
        (request(2, {"tp_size": 2, "dp_shard_size": 2}), 4, Fsdp2),
        (request(None, {"sp_size": 2, "sp_backend": "torch"}), 2, DataParallel),
        (request(2, {"sp_size": 2, "sp_backend": "torch"}), 2, Fsdp2),
        (request(None, {"sp_size": 2, "sp_backend": "torch", "tp_size": 2}), 4, ReplicatedTensorParallel),
        (with_engine(), 1, DeepSpeed),
        (with_engine(), 2, DeepSpeed),
        (with_engine(mesh={"sp_size": 2, "dp_replicate_size": 2}), 4, DeepSpeed),
    ],
)
def test_each_request_has_one_strategy(asked: RunRequest, size: int, expected: type) -> None:
    assert resolve_strategy(asked, Topology(size=size)) is expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request(2, {"sp_size": 2}), 'sp_size=2: .* sp_backend="torch".* set cp_size'),
        (
            request(1, {"sp_size": 2, "sp_backend": "torch", "dp_shard_size": 2}),
            "fsdp_version=1: FSDP 1 averages",
        ),
        (
            replace(
                request(2, {"sp_size": 2, "sp_backend": "torch"}),
                dynamo=TorchDynamoPlugin(backend="inductor"),
            ),
            "dynamo_backend=.* is not compiled",
        ),
        (with_engine(mesh={"sp_size": 2, "sp_backend": "torch"}), "sp_backend='torch': DeepSpeed's engine"),
        pytest.param(
            request(None, {"pp_size": 2, "sp_size": 2, "sp_backend": "torch"}),
            "sp_size=2: the stages of a pipeline exchange whole",
            marks=HAS_PIPELINES,
        ),
        (with_engine(mesh={"tp_size": 2}), "tp_size=2: .*tensor_parallel.autotp_size"),
        (with_engine(mesh={"cp_size": 2}), "cp_size=2: DeepSpeed's engine shards sequences"),
        (with_engine(fsdp=FullyShardedDataParallelPlugin()), "deepspeed_plugin and fsdp_plugin both"),
        (request(1, {"ep_size": 2}), "ep_size=2: FSDP 1 shards experts .* fsdp_version=2"),
        (with_engine(mesh={"ep_size": 2}), "ep_size=2: DeepSpeed's engine shards sequences"),
        pytest.param(
            request(None, {"pp_size": 2, "ep_size": 2, "tp_size": 2}),
            "ep_size=2: with tp_size .* fsdp_plugin",
            marks=HAS_PIPELINES,
        ),
        pytest.param(
            request(None, {"pp_size": 2, "cp_size": 2}),
            "cp_size=2: the stages of a pipeline exchange whole",
            marks=HAS_PIPELINES,
        ),
        (request(2, {"tp_size": 2}), "dp_shard_size=1: fsdp_plugin shards"),
        (request(1, {"tp_size": 2, "dp_shard_size": 2}), "FSDP 1 takes a mesh for hybrid"),
        (request(2, {"dp_replicate_size": 2}), "dp_shard_size=1: fsdp_plugin shards"),
        (request(1, {"dp_shard_size": 2}), "sharding_strategy=FULL_SHARD: FSDP 1 takes a mesh for hybrid"),
        (
            with_engine(activations=ActivationCheckpointing()),
            "section of DeepSpeed's configuration recomputes",
        ),
        (
            replace(request(2, activation_checkpointing=True), activations=ActivationCheckpointing()),
            "activation_checkpointing of fsdp_plugin recomputes",
        ),
    ],
)
def test_contradicting_requests_are_refused(asked: RunRequest, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_strategy(asked, Topology(size=2))


def test_older_torch_has_no_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "accelerate.strategies.resolve.is_torch_version", lambda *wanted: wanted == ("<", "2.13")
    )
    with pytest.raises(ConfigurationError, match="pp_size=2: .* Install torch 2.13"):
        resolve_strategy(request(None, {"pp_size": 2}), Topology(size=2))


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize(
    ("asked", "expected"),
    [(request(), XlaReplicas), (request(1), XlaFullySharded), (request(2), XlaFullyShard)],
)
def test_xla_devices_have_their_own_strategies(asked: RunRequest, size: int, expected: type) -> None:
    assert resolve_strategy(asked, Topology(size=size), "xla") is expected


def test_xla_devices_have_one_axis() -> None:
    with pytest.raises(ConfigurationError, match="parallelism_config=.*fsdp_version=2"):
        resolve_strategy(request(2, {"dp_shard_size": 2}), Topology(), "xla")


def test_megatron_does_not_compute_on_xla_devices() -> None:
    with pytest.raises(ConfigurationError, match="megatron_lm_plugin on XLA devices"):
        resolve_strategy(RunRequest(megatron=MegatronLMPlugin()), Topology(), "xla")


def test_deepspeed_has_no_engine_for_xla() -> None:
    with pytest.raises(ConfigurationError, match="deepspeed_plugin on XLA devices"):
        resolve_strategy(with_engine(), Topology(), "xla")
