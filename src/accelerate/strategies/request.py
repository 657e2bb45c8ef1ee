"""Request of a run and the context of its strategy, as frozen values.

`build_request` of `accelerate.accelerator` creates the request from the arguments of `Accelerator` and the
environment. `Accelerator` passes it to the strategy in a `Context`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from accelerate import plugins
from accelerate.base import PrecisionName, PrecisionType, RNGName, RNGType, wrong_value
from accelerate.devices import DeviceBackend
from accelerate.parallelism_config import ParallelismConfig
from accelerate.scheduler import StepPolicy
from accelerate.state import GradientState, Topology
from accelerate.strategies.dtensors import is_sharded
from accelerate.strategies.session import PrepareSession


@dataclass(frozen=True)
class RunRequest:
    """Checked arguments of a run, with the values of the environment as defaults.

    The plugins are the objects of the user. Clients assign their fields after construction, and an assignment
    has an effect on the next call of `prepare`.
    """

    mixed_precision: PrecisionType | PrecisionName | None = None  # None is the value of the state, or "no"
    cpu: bool = False
    device_placement: bool = True
    step_scheduler_with_optimizer: StepPolicy = True
    rng_types: Sequence[RNGName | RNGType] | None = None  # synchronized in each epoch; None is the default
    dataloader_config: plugins.DataLoaderConfiguration = field(
        default_factory=plugins.DataLoaderConfiguration
    )
    accumulation: plugins.GradientAccumulationPlugin = field(
        default_factory=plugins.GradientAccumulationPlugin
    )
    project: plugins.ProjectConfiguration = field(default_factory=plugins.ProjectConfiguration)
    dynamo: plugins.TorchDynamoPlugin = field(default_factory=plugins.TorchDynamoPlugin)
    ddp: plugins.DistributedDataParallelKwargs | None = None
    scaler: plugins.GradScalerKwargs | None = None
    autocast: plugins.AutocastKwargs | None = None
    process_group: plugins.InitProcessGroupKwargs | None = None
    profile: plugins.ProfileKwargs | None = None
    activations: plugins.ActivationCheckpointing | None = None
    fsdp: plugins.FullyShardedDataParallelPlugin | None = None
    deepspeed: plugins.DeepSpeedPlugin | dict[str, plugins.DeepSpeedPlugin] | None = None
    megatron: plugins.MegatronLMPlugin | None = None
    parallelism: ParallelismConfig | None = None
    fp8_library: str | None = None  # None chooses an installed one
    handlers: tuple[plugins.KwargsHandler, ...] = ()  # includes the recipes of FP8 libraries
    notes: tuple[str, ...] = ()  # lines to log about conflicts between arguments and environment


@dataclass(frozen=True)
class Context:
    """Values with which a strategy is created.

    Without a mesh, all ranks have different data.
    """

    topology: Topology
    backend: DeviceBackend
    device: Any
    request: RunRequest
    mixed_precision: str
    gradients: GradientState
    session: PrepareSession
    # Returns the Accelerator, an argument of `fsdp2_prepare_model` and of functions for Megatron-LM. The
    # Accelerator has the strategy, and a reference back would keep both until the next garbage collection.
    accelerator: Callable[[], Any]
    # Returns the module `accelerate.accelerator`, in which clients replace functions.
    functions: Callable[[], Any]
    mesh: Any = None


def require_plugin(model: nn.Module, request: RunRequest) -> None:
    """Raises an error for a trained model that no plugin shards over the dimension "dp_shard" of the mesh."""
    mesh = request.parallelism
    if mesh is None or request.fsdp is not None or not mesh.dp_shard_enabled:
        return
    if is_sharded(model) or not any(p.requires_grad for p in model.parameters()):
        return
    fix = "Pass fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)"
    raise wrong_value(
        "dp_shard_size",
        mesh.dp_shard_size,
        f"no plugin configures how the parameters of {type(model).__name__} are sharded",
        f"{fix}, launch with --use_fsdp --fsdp_version 2, or shard the model before `prepare`",
    )
