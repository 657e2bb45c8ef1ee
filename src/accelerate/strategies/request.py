"""What a run asks for, checked, and what a strategy is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate.base import PrecisionName, PrecisionType, RNGName, RNGType
from accelerate.devices import DeviceBackend
from accelerate.parallelism_config import ParallelismConfig
from accelerate.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    MegatronLMPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate.scheduler import StepPolicy
from accelerate.state import GradientState, Topology
from accelerate.strategies.session import PrepareSession


@dataclass(frozen=True)
class RunRequest:
    """The arguments of a run, laid over its environment and checked.

    The plugins in it are the user's own objects: clients change their fields after construction, and a change
    counts from the next `prepare` on.

    Args:
        mixed_precision: name of the number format, `None` to take the one that is already set, or "no".
        cpu: whether the run stays on the CPU although the machine has something faster.
        rng_types: generators that are synchronised at the start of each epoch; `None` for the default.
        deepspeed: how DeepSpeed trains: a plugin, or several by name; `None` trains without it.
        fp8_library: which library computes in FP8; `None` leaves it open.
        handlers: all handlers the user gave, also those of other number formats.
        notes: what the user should know about how the request came about, one line each.
    """

    mixed_precision: PrecisionType | PrecisionName | None = None
    cpu: bool = False
    device_placement: bool = True
    step_scheduler_with_optimizer: StepPolicy = True
    rng_types: Sequence[RNGName | RNGType] | None = None
    dataloader_config: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    accumulation: GradientAccumulationPlugin = field(default_factory=GradientAccumulationPlugin)
    project: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    dynamo: TorchDynamoPlugin = field(default_factory=TorchDynamoPlugin)
    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    autocast: AutocastKwargs | None = None
    process_group: InitProcessGroupKwargs | None = None
    profile: ProfileKwargs | None = None
    fsdp: FullyShardedDataParallelPlugin | None = None
    deepspeed: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None
    megatron: MegatronLMPlugin | None = None
    parallelism: ParallelismConfig | None = None
    fp8_library: str | None = None
    handlers: tuple[KwargsHandler, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Context:
    """All that a strategy is given; complete when the strategy is built.

    Args:
        request: what the run asks for; its number format is resolved.
        mesh: the device mesh, `None` for plain data parallelism.
    """

    topology: Topology
    backend: DeviceBackend
    device: Any
    request: RunRequest
    mixed_precision: str
    gradients: GradientState
    session: PrepareSession
    mesh: Any = None
