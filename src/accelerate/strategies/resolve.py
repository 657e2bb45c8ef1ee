"""Choice of the strategy of a run, from its request, its topology and the hardware."""

from __future__ import annotations

import torch

from accelerate.base import ConfigurationError, DynamoBackend, is_torch_version, wrong_value
from accelerate.devices import hardware_table
from accelerate.parallelism_config import MeshAxis, ParallelismConfig
from accelerate.plugins import SCHEDULES, FullyShardedDataParallelPlugin, version_of
from accelerate.state import Topology
from accelerate.strategies import deepspeed, fsdp, megatron
from accelerate.strategies.base import Strategy
from accelerate.strategies.ddp import DataParallel
from accelerate.strategies.request import RunRequest


def resolve_strategy(request: RunRequest, topology: Topology, hardware: str = "cpu") -> type[Strategy]:
    """Returns the class of the strategy of a run, and imports only the module of this class.

    Args:
        hardware: Name of the row of the hardware table.

    Raises:
        ConfigurationError: The arguments do not work together, or not on this hardware.
    """
    mesh = request.parallelism
    if request.activations is not None:
        _check_activations(request, hardware)
    if request.dynamo.backend != DynamoBackend.NO:
        _check_compilation(request)
    if request.megatron is not None:
        _check_megatron(request, hardware)
        return megatron.MegatronLM
    if request.deepspeed is not None:
        _check_deepspeed(request, hardware)
        return deepspeed.DeepSpeed
    if mesh is not None:
        _check_sequences(mesh, request)
        _check_mesh(mesh, request.fsdp)
        if mesh.pp_enabled:
            _check_pipeline(mesh, request)
    if hardware == "xla":
        return _on_xla(request)
    if topology.size == 1:  # `build_runtime` warns that FSDP has no effect
        return Strategy
    if request.fsdp is not None:
        return fsdp.Fsdp1 if version_of(request.fsdp).number == 1 else fsdp.Fsdp2
    if mesh is not None and mesh.tp_enabled and not mesh.pp_enabled:
        return fsdp.ReplicatedTensorParallel if mesh.dp_cp_dim_names else fsdp.TensorParallel
    return DataParallel


def prepare_devices(request: RunRequest) -> None:
    """Sets options of the devices that a strategy needs before this process opens one."""
    if request.fsdp is not None and not request.cpu and hardware_table.detect().own_runtime:
        from accelerate.strategies import xla

        xla.open_spmd(request)


def _check_activations(request: RunRequest, hardware: str) -> None:
    """Raises an error for a run in which another setting or engine applies activation checkpointing."""
    fixes = {
        "activation_checkpointing of fsdp_plugin": request.fsdp is not None
        and request.fsdp.activation_checkpointing,
        "the activation_checkpointing section of DeepSpeed's configuration": request.deepspeed,
        "recompute_granularity of megatron_lm_plugin": request.megatron,
        "fsdp_plugin with activation_checkpointing=True": hardware == "xla",
    }
    if other := next((name for name, is_set in fixes.items() if is_set), None):
        reason = f"{other} recomputes activations in this run"
        raise wrong_value("kwargs_handlers", "ActivationCheckpointing", reason, "Use one of them")


def _check_compilation(request: RunRequest) -> None:
    """Raises an error for a compiled run that offloads activations."""
    activations, plugin = request.activations, request.fsdp
    if activations is not None and activations.offload:
        name = "offload"
    elif plugin is not None and plugin.activation_checkpointing_offload:
        name = "activation_checkpointing_offload"
    else:
        return
    reason = "a compiled block has no copies on a side stream"
    raise wrong_value(name, True, reason, 'Leave it out, or set dynamo_backend="no"')


def _check_deepspeed(request: RunRequest, hardware: str) -> None:
    """Raises an error for hardware and arguments with which DeepSpeed does not work."""
    if hardware == "xla":
        raise ConfigurationError(
            "deepspeed_plugin on XLA devices, for which DeepSpeed has no engine. Pass fsdp_plugin, which "
            "shards parameters there, or none of them; Accelerator(cpu=True) trains by DeepSpeed on the CPU."
        )
    if request.fsdp is not None:
        raise ConfigurationError(
            "deepspeed_plugin and fsdp_plugin both shard parameters over the ranks. Pass one of them; "
            "ZeRO stage 3 is DeepSpeed's counterpart of FULL_SHARD."
        )
    _refuse_constant_batch(request, "train_batch_size in the configuration of DeepSpeed")
    mesh = request.parallelism
    hint = "; its own tensor parallelism is tensor_parallel.autotp_size in its configuration"
    own = (MeshAxis.SP, MeshAxis.DP_REPLICATE, MeshAxis.DP_SHARD)
    if mesh is not None and mesh.sequence_backend == "torch":
        reason = "DeepSpeed's engine shards sequences itself"
        fix = 'Set it to "deepspeed", or train without deepspeed_plugin'
        raise wrong_value("sp_backend", mesh.sp_backend, reason, fix)
    for axis in (each.value for each in MeshAxis if each not in own) if mesh is not None else ():
        size = getattr(mesh, f"{axis}_size")
        if size > 1:
            reason = "DeepSpeed's engine shards sequences (sp_size) and data only"
            fix = (
                f"Leave it at 1, or train without deepspeed_plugin{hint if axis == MeshAxis.TP.value else ''}"
            )
            raise wrong_value(f"{axis}_size", size, reason, fix)


def _on_xla(request: RunRequest) -> type[Strategy]:
    """Returns the strategy for XLA devices, of which one process may drive several."""
    from accelerate.strategies import xla

    if request.parallelism is not None:
        fix = "Leave it out; fsdp_plugin with fsdp_version=2 shards parameters and batches over all devices"
        raise wrong_value("parallelism_config", request.parallelism, "on XLA devices there is one axis", fix)
    if request.fsdp is None:
        return xla.XlaReplicas
    return xla.XlaFullyShard if version_of(request.fsdp).is_spmd_on_xla else xla.XlaFullySharded


def _check_megatron(request: RunRequest, hardware: str) -> None:
    """Raises an error for hardware and arguments with which Megatron-LM does not work."""
    if hardware == "xla":
        raise ConfigurationError(
            "megatron_lm_plugin on XLA devices: Megatron-LM computes on CUDA devices. Leave it out; "
            "fsdp_plugin with fsdp_version=2 shards parameters and batches over all XLA devices."
        )
    fields = {"fsdp_plugin": "fsdp", "deepspeed_plugin": "deepspeed", "parallelism_config": "parallelism"}
    exclusive = [name for name, field in fields.items() if getattr(request, field) is not None]
    if exclusive:
        raise ConfigurationError(
            f"megatron_lm_plugin and {' and '.join(exclusive)} both shard the model. Pass one of "
            "them; tp_degree, pp_degree and context_parallel_size are Megatron-LM's own axes."
        )
    _refuse_constant_batch(request, "num_micro_batches of megatron_lm_plugin")


def _refuse_constant_batch(request: RunRequest, option: str) -> None:
    """Raises an error if the global batch size is set and an engine accumulates gradients."""
    size = request.accumulation.global_batch_size
    if size is not None:
        raise wrong_value("global_batch_size", size, "the engine accumulates gradients", f"Set {option}")


def _check_pipeline(mesh: ParallelismConfig, request: RunRequest) -> None:
    """Raises an error for arguments that do not work with pipeline parallelism."""
    if is_torch_version("<", "2.13"):
        reason = f"the schedules of torch {torch.__version__} take micro-batches of one size"
        raise wrong_value("pp_size", mesh.pp_size, reason, "Install torch 2.13, or set pp_size=1")
    if mesh.cp_enabled:
        reason = "the stages of a pipeline exchange whole sequences"
        raise wrong_value("cp_size", mesh.cp_size, reason, "Set it to 1, or pp_size=1")
    if mesh.ep_enabled and mesh.tp_enabled and request.fsdp is None:
        reason = "with tp_size and pp_size only FSDP shards experts"
        fix = "Pass fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), or set tp_size=1"
        raise wrong_value("ep_size", mesh.ep_size, reason, fix)
    if request.fsdp is not None and version_of(request.fsdp).number == 1:
        reason = "the schedules of torch take FSDP 2"
        raise wrong_value("fsdp_version", 1, reason, "Set fsdp_version=2, or pp_size=1")
    if request.dynamo.backend != DynamoBackend.NO:
        reason = "a compiled model cannot be split into stages"
        raise wrong_value("dynamo_backend", request.dynamo.backend, reason, 'Set it to "no"')
    assert mesh.pp_handler is not None
    schedule = mesh.pp_handler.schedule
    policy = request.activations
    if policy is not None and policy.save_operators is not None and SCHEDULES[schedule].splits_backward:
        reason = f"the schedule {schedule} runs two backward passes over a layer, and torch allows one"
        fix = "Leave it out, which recomputes whole blocks, or use the schedule 1f1b"
        raise wrong_value("save_operators", policy.save_operators, reason, fix)


def _check_sequences(mesh: ParallelismConfig, request: RunRequest) -> None:
    """Raises an error for arguments that do not work with Ulysses sequence parallelism by torch."""
    if mesh.sequence_backend != "torch":
        return
    if mesh.pp_enabled:
        reason = "the stages of a pipeline exchange whole sequences"
        raise wrong_value("sp_size", mesh.sp_size, reason, "Set it to 1, or pp_size=1")
    if request.fsdp is not None and version_of(request.fsdp).number == 1:
        reason = "FSDP 1 averages gradients over other ranks than those that shard sequences"
        raise wrong_value("fsdp_version", 1, reason, "Set fsdp_version=2, or sp_size=1")
    if request.dynamo.backend != DynamoBackend.NO:
        reason = "sp_size exchanges heads between the ranks inside of attention, which is not compiled"
        raise wrong_value("dynamo_backend", request.dynamo.backend, reason, 'Set it to "no"')


def _check_mesh(mesh: ParallelismConfig, plugin: FullyShardedDataParallelPlugin | None) -> None:
    if mesh.sequence_backend == "deepspeed":
        reason = "DeepSpeed's attention shards sequences, and this run does not use DeepSpeed"
        fix = 'Set sp_backend="torch", pass deepspeed_plugin=DeepSpeedPlugin(...), or set cp_size instead'
        raise wrong_value("sp_size", mesh.sp_size, reason, fix)
    if mesh.ep_enabled and plugin is not None and not version_of(plugin).takes_any_mesh:
        reason = "FSDP 1 shards experts like all other parameters"
        raise wrong_value("ep_size", mesh.ep_size, reason, "Set fsdp_version=2")
    if plugin is None:  # models may be sharded before they are prepared
        return
    if not mesh.dp_shard_cp_dim_names:
        reason = "fsdp_plugin shards parameters, and the mesh has no axis for it"
        fix = "Set it to the number of processes that shard a replica of the model, or leave fsdp_plugin out"
        raise wrong_value("dp_shard_size", mesh.dp_shard_size, reason, fix)
    if version_of(plugin).takes_any_mesh:
        return
    strategy = plugin.sharding_strategy.name
    if mesh.tp_enabled or not (mesh.dp_replicate_enabled and "HYBRID" in strategy):
        raise ConfigurationError(
            f"A mesh with fsdp_version=1 and sharding_strategy={strategy}: FSDP 1 takes a mesh for hybrid "
            "sharding only. Set fsdp_version=2, or sharding_strategy=HYBRID_SHARD and dp_replicate_size."
        )
