"""Choose the strategy of a run."""

from __future__ import annotations

from accelerate.base import ConfigurationError, wrong_value
from accelerate.parallelism_config import ParallelismConfig
from accelerate.plugins import FullyShardedDataParallelPlugin, version_of
from accelerate.state import Topology
from accelerate.strategies.base import Strategy
from accelerate.strategies.ddp import DataParallel
from accelerate.strategies.session import RunRequest


def resolve_strategy(request: RunRequest, topology: Topology, hardware: str = "cpu") -> type[Strategy]:
    """Return the strategy for a run on a row of the hardware table."""
    if request.megatron is not None:
        _check_megatron(request, hardware)
        from accelerate.strategies.megatron import MegatronLM

        return MegatronLM
    if request.deepspeed is not None:
        _check_with_engine(request, hardware)
        from accelerate.strategies.deepspeed import DeepSpeed

        return DeepSpeed
    if request.parallelism is not None:
        _check_mesh(request.parallelism, request.fsdp)
    if hardware == "xla":
        return _on_xla(request)
    if topology.size == 1:
        return Strategy
    if request.fsdp is not None:
        return _of_fsdp({1: "FullySharded", 2: "FullyShard"}[request.fsdp.fsdp_version])
    if request.parallelism is not None and request.parallelism.tp_enabled:
        return _of_fsdp("CopiedTensorParallel" if request.parallelism.dp_cp_dim_names else "TensorParallel")
    return DataParallel


def _of_fsdp(name: str) -> type[Strategy]:
    """Return a strategy that distributes tensors; torch's part of it takes a second to import."""
    from accelerate.strategies import fsdp

    kind: type[Strategy] = getattr(fsdp, name)
    return kind


def _check_with_engine(request: RunRequest, hardware: str) -> None:
    """Refuse what DeepSpeed's engine does not go together with."""
    if hardware == "xla":
        raise ConfigurationError(
            "deepspeed_plugin on XLA devices, for which DeepSpeed has no engine. Pass fsdp_plugin, which "
            "shards parameters there, or none of them; Accelerator(cpu=True) trains by DeepSpeed on the CPU."
        )
    if request.fsdp is not None:
        raise ConfigurationError(
            "deepspeed_plugin and fsdp_plugin both share parameters between processes. Pass one of them; "
            "ZeRO stage 3 is DeepSpeed's counterpart of FULL_SHARD."
        )
    mesh = request.parallelism
    hint = "; its own tensor parallelism is tensor_parallel.autotp_size in its configuration"
    for axis in ("tp", "cp") if mesh is not None else ():
        size = getattr(mesh, f"{axis}_size")
        if size > 1:
            reason = "DeepSpeed's engine shares sequences (sp_size) and data, and nothing else"
            fix = f"Leave it at 1, or train without deepspeed_plugin{hint if axis == 'tp' else ''}"
            raise wrong_value(f"{axis}_size", size, reason, fix)


def _on_xla(request: RunRequest) -> type[Strategy]:
    """Return the class for XLA devices, where one process may drive many."""
    from accelerate.strategies.xla import XlaFullyShard, XlaFullySharded, XlaReplicas

    if request.parallelism is not None:
        fix = "Leave it out; fsdp_plugin with fsdp_version=2 shards parameters and batches over all devices"
        raise wrong_value("parallelism_config", request.parallelism, "on XLA devices there is one axis", fix)
    if request.fsdp is None:
        return XlaReplicas
    return XlaFullyShard if version_of(request.fsdp).is_spmd_on_xla else XlaFullySharded


def _check_megatron(request: RunRequest, hardware: str) -> None:
    """Refuse what shares models between processes in another way than Megatron-LM does."""
    if hardware == "xla":
        raise ConfigurationError(
            "megatron_lm_plugin on XLA devices: Megatron-LM computes on CUDA devices. Leave it out; "
            "fsdp_plugin with fsdp_version=2 shards parameters and batches over all XLA devices."
        )
    others = {
        "fsdp_plugin": request.fsdp,
        "deepspeed_plugin": request.deepspeed,
        "parallelism_config": request.parallelism,
    }
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ConfigurationError(
            f"megatron_lm_plugin and {' and '.join(given)} both say how processes share a model. Pass one of "
            "them; tp_degree, pp_degree and context_parallel_size are Megatron-LM's own axes."
        )


def _check_mesh(mesh: ParallelismConfig, plugin: FullyShardedDataParallelPlugin | None) -> None:
    if mesh.sp_enabled:
        reason = "sequences are shared by DeepSpeed's attention, and this run does not use DeepSpeed"
        fix = "Pass deepspeed_plugin=DeepSpeedPlugin(...), or set cp_size instead"
        raise wrong_value("sp_size", mesh.sp_size, reason, fix)
    if plugin is None:
        if mesh.dp_shard_enabled:
            raise wrong_value(
                "dp_shard_size",
                mesh.dp_shard_size,
                "nothing says how parameters are sharded",
                "Pass fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), or launch with --use_fsdp "
                "--fsdp_version 2",
            )
        return
    if not mesh.dp_shard_cp_dim_names:
        raise wrong_value(
            "dp_shard_size",
            mesh.dp_shard_size,
            "fsdp_plugin shards parameters, and the mesh has no axis for it",
            "Set dp_shard_size to the number of processes that share a copy of the model, or leave "
            "fsdp_plugin out",
        )
    if version_of(plugin).takes_any_mesh:
        return
    strategy = plugin.sharding_strategy.name
    if mesh.tp_enabled or not (mesh.dp_replicate_enabled and "HYBRID" in strategy):
        raise ConfigurationError(
            f"A mesh with fsdp_version=1 and sharding_strategy={strategy}: FSDP 1 takes a mesh for hybrid "
            "sharding only. Set fsdp_version=2, or sharding_strategy=HYBRID_SHARD and dp_replicate_size."
        )
