"""What a strategy is given: what the run asks for, and the state that its `prepare` calls share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from accelerate import plugins
from accelerate.base import PrecisionName, PrecisionType, RNGName, RNGType
from accelerate.devices import DeviceBackend
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallelism_config import ParallelismConfig
from accelerate.plugins import DataLoaderConfiguration, GradientAccumulationPlugin
from accelerate.scheduler import StepPolicy
from accelerate.state import GradientState, Topology
from accelerate.strategies.fsdp import fsdp2_switch_optimizer_parameters


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
    project: plugins.ProjectConfiguration = field(default_factory=plugins.ProjectConfiguration)
    dynamo: plugins.TorchDynamoPlugin = field(default_factory=plugins.TorchDynamoPlugin)
    ddp: plugins.DistributedDataParallelKwargs | None = None
    scaler: plugins.GradScalerKwargs | None = None
    autocast: plugins.AutocastKwargs | None = None
    process_group: plugins.InitProcessGroupKwargs | None = None
    profile: plugins.ProfileKwargs | None = None
    fsdp: plugins.FullyShardedDataParallelPlugin | None = None
    deepspeed: plugins.DeepSpeedPlugin | dict[str, plugins.DeepSpeedPlugin] | None = None
    megatron: plugins.MegatronLMPlugin | None = None
    parallelism: ParallelismConfig | None = None
    fp8_library: str | None = None
    handlers: tuple[plugins.KwargsHandler, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(eq=False)
class Prepared:
    """Everything a run has prepared so far, by kind, in the order of preparation."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[DataLoader[Any]] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)

    def clear(self) -> None:
        """Remove all objects; the lists stay the same objects."""
        for objects in vars(self).values():
            objects.clear()


class ReplacedParameters(WeakIdKeyDictionary):
    """Maps an old parameter, while it is in use, to the one that has taken its place: found by identity.

    A copy or a pickle holds the same pairs; an old parameter stays in it where something else that is pickled
    with it, such as an optimizer, holds that too.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        pairs = list(self.items())  # type: ignore[no-untyped-call]
        return ReplacedParameters, (), None, None, iter(pairs)


class PrepareSession:
    """What the `prepare` calls of one run share, and what is known only while one of them runs.

    Attributes:
        preparer: the `Accelerator`. Strategies call its `prepare_model`, `prepare_optimizer`,
            `prepare_scheduler` and `prepare_data_loader`, so a client that replaces one of them takes effect.
        functions: returns the module `accelerate.accelerator`, whose functions clients may replace.
        replaced: old parameter -> the one that has taken its place, for as long as the old one is in use.
        waiting: during a call, the optimizers that follow when parameters of models are replaced.
    """

    def __init__(self, preparer: Any, functions: Callable[[], Any]) -> None:
        self.preparer = preparer
        self.functions = functions
        self.prepared = Prepared()
        self.replaced = ReplacedParameters()
        self.waiting: Sequence[Any] = ()

    @contextmanager
    def following(self, optimizers: Iterable[Any]) -> Iterator[None]:
        """Let optimizers follow parameters that are replaced inside the block."""
        self.waiting = list(optimizers)
        try:
            yield
        finally:
            self.waiting = ()

    def replace(self, parameters: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Record which parameters have taken the places of others."""
        for old, new in parameters:
            if new is not old:
                self.replaced[old] = new

    def remap(self, optimizers: Iterable[Any]) -> None:
        """Let optimizers step the parameters that have taken the places of those they were built on."""
        if not len(self.replaced):
            return
        mapping: Mapping[Tensor, Tensor] = self.replaced
        for optimizer in optimizers:
            inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
            fsdp2_switch_optimizer_parameters(inner, mapping)

    def clear(self) -> None:
        """Remove all objects and parameters."""
        self.prepared.clear()
        self.replaced.clear()


@dataclass(frozen=True)
class Context:
    """All that a strategy is given; without a mesh, training is plain data parallelism."""

    topology: Topology
    backend: DeviceBackend
    device: Any
    request: RunRequest
    mixed_precision: str
    gradients: GradientState
    session: PrepareSession
    mesh: Any = None
