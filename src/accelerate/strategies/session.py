"""What a strategy gets: the request, the objects of a `prepare` call, and what all calls of a run share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from accelerate import plugins
from accelerate.base import PrecisionName, PrecisionType, RNGName, RNGType, listed
from accelerate.devices import DeviceBackend
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallelism_config import ParallelismConfig
from accelerate.plugins import DataLoaderConfiguration, GradientAccumulationPlugin
from accelerate.scheduler import AcceleratedScheduler, StepPolicy
from accelerate.state import GradientState, Topology
from accelerate.strategies.fsdp import fsdp2_switch_optimizer_parameters

T = TypeVar("T")

PREPARED_MARK = "_is_accelerate_prepared"


class Kind(Enum):
    """What an object is to `prepare`."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    LOADER = "loader"
    OTHER = "other"


_SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, AcceleratedScheduler)
_OF_OPTIMIZERS = ("param_groups", "add_param_group", "zero_grad", "step", "state_dict")


def _is_scheduler(obj: Any) -> bool:
    methods = (getattr(obj, name, None) for name in ("step", "get_last_lr"))
    return isinstance(obj, _SCHEDULERS) or all(map(callable, methods))


def _is_optimizer(obj: Any) -> bool:
    """Whether this is torch's optimizer, or one around another that derives from nothing (schedule-free)."""
    return isinstance(obj, torch.optim.Optimizer) or all(hasattr(obj, name) for name in _OF_OPTIMIZERS)


KINDS: tuple[tuple[Kind, Callable[[Any], bool]], ...] = (
    (Kind.LOADER, lambda obj: isinstance(obj, DataLoader)),
    (Kind.MODEL, lambda obj: isinstance(obj, nn.Module)),
    (Kind.OPTIMIZER, _is_optimizer),
    (Kind.SCHEDULER, _is_scheduler),
)
"""Each kind with its condition; the first that holds counts."""


def placeholder_kind(obj: Any) -> Kind | None:
    """Return what `obj` takes the place of until an engine has built it; None for most objects."""
    kind = getattr(type(obj), "placeholder_for", None)
    return kind if isinstance(kind, Kind) else None


def kind_of(obj: Any) -> Kind:
    """Return what `obj` is to `prepare`; `Kind.OTHER` is handed back untouched."""
    return placeholder_kind(obj) or next((kind for kind, holds in KINDS if holds(obj)), Kind.OTHER)


def is_prepared(obj: Any) -> bool:
    """Whether `obj` came out of a `prepare` call."""
    return (
        isinstance(obj, (AcceleratedOptimizer, AcceleratedScheduler))
        or getattr(obj, PREPARED_MARK, False) is True
    )


def mark_prepared(obj: T) -> T:
    """Note on `obj` that it came out of a `prepare` call, and return it."""
    setattr(obj, PREPARED_MARK, True)
    return obj


class Bundle:
    """The objects of one `prepare` call; `placement` has whether each is moved, None leaves it to the run."""

    def __init__(self, objects: Sequence[Any], placement: Sequence[bool | None] | None = None) -> None:
        self.objects = list(objects)
        self.placement = list(placement) if placement is not None else [None] * len(self.objects)
        self.kinds = [kind_of(obj) for obj in self.objects]

    def of(self, kind: Kind) -> list[Any]:
        """Return the objects of one kind, in order."""
        return [obj for obj, its_kind in zip(self.objects, self.kinds, strict=True) if its_kind is kind]

    def new(self, kind: Kind) -> list[Any]:
        """Return the objects of one kind that no earlier call has prepared, in order."""
        return [obj for obj in self.of(kind) if not is_prepared(obj)]

    @property
    def models(self) -> list[nn.Module]:
        return self.of(Kind.MODEL)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.of(Kind.OPTIMIZER)

    def replace(self, kind: Kind, prepare: Callable[[Any, bool | None], Any]) -> None:
        """Replace each object of `kind` by `prepare(object, placement)`."""
        for index, its_kind in enumerate(self.kinds):
            if its_kind is kind:
                self.objects[index] = prepare(self.objects[index], self.placement[index])

    def result(self) -> Any:
        """Return what `prepare` returns: the objects as a tuple, or the one object."""
        return self.objects[0] if len(self.objects) == 1 else tuple(self.objects)


def as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return one parameter or many as a list."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def parameter_ids(optimizers: Iterable[Any]) -> set[int]:
    """Return the identities of all parameters that `optimizers` own."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def find_unstepped_models(models: Iterable[nn.Module], optimizers: Sequence[Any]) -> list[str]:
    """Return one warning for each model with trainable parameters that no optimizer steps."""
    owned = parameter_ids(optimizers)
    warnings = []
    for model in models:
        listed_by_model = {id(p) for p in model.parameters()}  # a model may hide those of another optimizer
        names = [
            name
            for name, p in model.named_parameters()
            if p.requires_grad and id(p) in listed_by_model and id(p) not in owned
        ]
        if names:
            warnings.append(
                f"{len(names)} trainable parameters of {type(model).__name__} belong to no prepared "
                f"optimizer and will not change: {listed(names)}. Pass them to the optimizer before "
                "`prepare`, or freeze them with requires_grad_(False) if that is meant."
            )
    return warnings


def find_unrelated_optimizers(
    optimizers: Iterable[Any], models: Sequence[nn.Module], stepped: set[int] | None = None
) -> list[str]:
    """Return one warning for each optimizer that steps no parameter of any prepared model.

    Args:
        optimizers: The optimizers to check.
        models: All prepared models.
        stepped: The identities of all parameters that prepared optimizers step, on one process: there an
            optimizer of other parameters is a mistake only if a model has trainable parameters that none
            steps. None on several processes, where gradients of other parameters are not averaged.
    """
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    known = {id(tensor) for model in models for tensor in _registered_tensors(model)} | set(map(id, trained))
    if stepped is not None and all(id(p) in stepped for p in trained):
        return []
    return [
        f"{type(optimizer).__name__} steps no parameter of any prepared model: was it built before "
        "the model was copied or replaced, or for a model that was not prepared? Build it from the "
        "parameters of the model that you pass to `prepare`, and pass that model too."
        for optimizer in optimizers
        if (ids := parameter_ids([optimizer])) and not ids & known
    ]


def _registered_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield all parameters and buffers of a model, also those that an overridden `parameters` hides."""
    waiting, seen = [model], set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
        waiting += [child for child in module._modules.values() if child is not None]


@dataclass(frozen=True)
class RunRequest:
    """The arguments of a run, laid over its environment and checked.

    The plugins in it are the user's own objects: clients change their fields after construction, and a change
    counts from the next `prepare` on.
    """

    mixed_precision: PrecisionType | PrecisionName | None = (
        None  # None takes the one that is already set, or "no"
    )
    cpu: bool = False  # also where the machine has something faster
    device_placement: bool = True
    step_scheduler_with_optimizer: StepPolicy = True
    rng_types: Sequence[RNGName | RNGType] | None = None  # synchronised for each epoch; None for the default
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
    fp8_library: str | None = None  # None leaves it open
    handlers: tuple[plugins.KwargsHandler, ...] = ()  # also those of other number formats
    notes: tuple[str, ...] = ()  # what the user should know about how the request came about, one line each


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
    """Maps an old parameter, while it is in use, to the one that has taken its place, by identity.

    A copy or a pickle holds the same pairs; an old parameter stays in it where something else that is pickled
    with it, such as an optimizer, holds that too.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        pairs = list(self.items())  # type: ignore[no-untyped-call]
        return ReplacedParameters, (), None, None, iter(pairs)


def update_singly(optimizer: torch.optim.Optimizer) -> bool:
    """Let groups of parameters on different meshes, or on one and on none, be updated one by one.

    torch's implementations for lists of tensors, its default on accelerators, refuse such a list. Returns
    whether the optimizer had one of these.
    """
    has_changed = False
    for group in getattr(optimizer, "param_groups", ()):
        meshes = {getattr(p, "device_mesh", None) for p in group["params"] if p.requires_grad}
        for name in ("foreach", "fused"):
            if len(meshes) > 1 and group.get(name, False) is not False:
                group[name] = False
                has_changed = True
    return has_changed


class PrepareSession:
    """What the `prepare` calls of one run share, and what is known only while one of them runs.

    Strategies call `prepare_model`, `prepare_optimizer`, `prepare_scheduler` and `prepare_data_loader` of the
    `Accelerator`, and functions of the module `accelerate.accelerator`, so those that clients replace count.
    """

    def __init__(self, preparer: Any, functions: Callable[[], Any]) -> None:
        self.preparer = preparer
        self.functions = functions  # returns the module
        self.prepared = Prepared()
        self.replaced = ReplacedParameters()
        self.waiting: Sequence[Any] = ()  # during a call, optimizers that follow replaced parameters

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
        mapping: Mapping[Tensor, Tensor] = self.replaced
        for optimizer in optimizers:
            inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
            if len(self.replaced):
                fsdp2_switch_optimizer_parameters(inner, mapping)
                for old in [key for key in inner.state if isinstance(key, Tensor) and key in mapping]:
                    inner.state[mapping[old]] = inner.state.pop(old)
            if update_singly(inner):
                inner.register_load_state_dict_post_hook(update_singly)  # type: ignore[arg-type]

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
