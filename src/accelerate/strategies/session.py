"""Objects of one `prepare` call and of all calls of a run, with the parameters that were replaced.

`Accelerator.prepare` creates a `Bundle`, and replaces its objects one kind after the other. `Accelerator`
creates the `PrepareSession` of a run. Strategies record replaced parameters in it, so that optimizers step
the new ones. `Strategy.check` logs warnings about objects that do not belong together.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import compress, islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from accelerate import torch_private
from accelerate.base import listed
from accelerate.data_loader import has_own_shard
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.strategies.dtensors import fsdp2_switch_optimizer_parameters

T = TypeVar("T")

PREPARED_MARK = "_is_accelerate_prepared"
WHOLE_MATRICES = "whole_matrices"
"""Attribute of optimizers that need whole matrices, and option of groups whose parameters are exempt."""


class Kind(Enum):
    """Kinds of objects that `prepare` distinguishes."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    LOADER = "loader"
    OTHER = "other"


_SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, AcceleratedScheduler)
_OPTIMIZER_METHODS = ("param_groups", "add_param_group", "zero_grad", "step", "state_dict")


def _is_scheduler(obj: object) -> bool:
    methods = (getattr(obj, name, None) for name in ("step", "get_last_lr"))
    return isinstance(obj, _SCHEDULERS) or all(map(callable, methods))


def _is_optimizer(obj: object) -> bool:
    # The schedule-free wrapper of an optimizer has no base class.
    return isinstance(obj, torch.optim.Optimizer) or all(hasattr(obj, name) for name in _OPTIMIZER_METHODS)


KINDS: tuple[tuple[Kind, Callable[[Any], bool]], ...] = (
    (Kind.LOADER, lambda obj: isinstance(obj, DataLoader)),
    (Kind.MODEL, lambda obj: isinstance(obj, nn.Module)),
    (Kind.OPTIMIZER, _is_optimizer),
    (Kind.SCHEDULER, _is_scheduler),
)
"""Condition of each kind, of which the first that is true counts."""


def placeholder_kind(obj: object) -> Kind | None:
    """Returns the kind of the object that an engine builds in place of `obj`, or None for other objects."""
    kind = getattr(type(obj), "placeholder_for", None)
    return kind if isinstance(kind, Kind) else None


def kind_of(obj: object) -> Kind:
    """Returns the kind of an object, `Kind.OTHER` for objects that `prepare` returns unchanged."""
    return placeholder_kind(obj) or next((kind for kind, holds in KINDS if holds(obj)), Kind.OTHER)


def is_prepared(obj: object) -> bool:
    """Returns whether an object is the result of a `prepare` call."""
    return (
        isinstance(obj, (AcceleratedOptimizer, AcceleratedScheduler))
        or getattr(obj, PREPARED_MARK, False) is True
    )


def mark_prepared(obj: T) -> T:
    """Marks an object as the result of a `prepare` call, and returns it."""
    setattr(obj, PREPARED_MARK, True)
    return obj


class Bundle:
    """Objects of one `prepare` call, by position.

    Args:
        placement: For each object whether it is moved to the device. None is the default of the run.
    """

    def __init__(self, objects: Sequence[Any], placement: Sequence[bool | None] | None = None) -> None:
        self.objects = list(objects)
        self.placement = list(placement) if placement is not None else [None] * len(self.objects)
        self.kinds = [kind_of(obj) for obj in self.objects]

    def of(self, kind: Kind) -> list[Any]:
        """Returns the objects of one kind, in order."""
        return [obj for obj, its_kind in zip(self.objects, self.kinds, strict=True) if its_kind is kind]

    def new(self, kind: Kind) -> list[Any]:
        """Returns the objects of one kind that are not prepared yet, in order."""
        return [obj for obj in self.of(kind) if not is_prepared(obj)]

    @property
    def models(self) -> list[nn.Module]:
        """Models, in order."""
        return self.of(Kind.MODEL)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers, in order."""
        return self.of(Kind.OPTIMIZER)

    def replace(self, kind: Kind, prepare: Callable[[Any, bool | None], Any]) -> None:
        """Replaces each object of a kind by `prepare(object, placement)`."""
        for index, its_kind in enumerate(self.kinds):
            if its_kind is kind:
                self.objects[index] = prepare(self.objects[index], self.placement[index])

    def result(self) -> Any:
        """Returns the objects as a tuple, or the object itself if there is one."""
        return self.objects[0] if len(self.objects) == 1 else tuple(self.objects)


def parameter_ids(optimizers: Iterable[Any]) -> set[int]:
    """Returns the ids of all parameters of optimizers."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def needs_whole_matrices(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer is torch's Muon, or declares that it needs whole matrices."""
    return getattr(optimizer, WHOLE_MATRICES, isinstance(optimizer, torch.optim.Muon)) is True


def _reference_to(loader: DataLoader[Any]) -> Callable[[], DataLoader[Any] | None]:
    """Returns a weak reference to a loader that was read, and a strong reference to another one."""
    return weakref.ref(loader) if getattr(loader, "iteration", 0) else lambda: loader


@dataclass(eq=False)
class Prepared:
    """Prepared objects of a run by kind, in the order of preparation."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    stepping_in_backward: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[DataLoader[Any]] = field(default_factory=list)
    loader_numbers: list[int] = field(default_factory=list)  # loaders that were prepared before each
    custom: list[Any] = field(default_factory=list)
    averages: list[Any] = field(default_factory=list)
    local_sgd: list[Any] = field(default_factory=list)

    def clear(self) -> None:
        """Removes all objects from the lists."""
        for objects in vars(self).values():
            objects.clear()

    def add_loader(self, loader: DataLoader[Any]) -> None:
        """Adds a loader, and drops those that were read and of which the program has no reference.

        A program may prepare a loader anew for each evaluation. The numbers of the others do not change, so
        the state of a loader has the same name on all ranks, even if a rank drops another loader later.
        """
        if any(loader is known for known in self.loaders):
            return
        numbered = self.numbered_loaders()
        following = numbered[-1][0] + 1 if numbered else 0
        entries = [(number, _reference_to(known)) for number, known in numbered]
        del numbered
        self.loaders.clear()  # deletes loaders without another reference
        kept = [(number, known) for number, find in entries if (known := find()) is not None]
        self.loaders.extend([*(known for _, known in kept), loader])
        self.loader_numbers[:] = [*(number for number, _ in kept), following]

    def numbered_loaders(self) -> list[tuple[int, DataLoader[Any]]]:
        """Returns each loader with the number of loaders that were prepared before it."""
        numbers: Iterable[int] = self.loader_numbers
        if len(self.loader_numbers) != len(self.loaders):  # a client has changed the list
            numbers = range(len(self.loaders))
        return list(zip(numbers, self.loaders, strict=True))


class ReplacedParameters(WeakIdKeyDictionary):
    """Mapping from old parameters to the ones that replaced them, by identity, while the old ones are in use.

    A copy or a pickle has the same pairs. An old parameter stays in it if an object that is pickled with it,
    such as an optimizer, has a reference to the parameter.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        pairs = list(self.items())  # type: ignore[no-untyped-call]
        return ReplacedParameters, (), None, None, iter(pairs)


def update_singly(optimizer: torch.optim.Optimizer) -> bool:
    """Disables `foreach` and `fused` in groups with parameters on different meshes, or on one and on none.

    torch's implementations for lists of tensors, the default on accelerators, raise an error for such groups.
    Returns whether the optimizer had such a group.
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
    """State that the `prepare` calls of a run have in common."""

    def __init__(self) -> None:
        self.prepared = Prepared()
        self.replaced = ReplacedParameters()
        self.dropped = ReplacedParameters()  # parameters that this rank does not have, as keys
        self.waiting: Sequence[Any] = ()  # optimizers of this call, which are updated after each replacement

    @contextmanager
    def following(self, optimizers: Iterable[Any]) -> Iterator[None]:
        """Updates optimizers when their parameters are replaced inside the block."""
        self.waiting = list(optimizers)
        try:
            yield
        finally:
            self.waiting = ()

    def replace(self, parameters: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Records pairs of an old parameter and the one that replaced it."""
        for old, new in parameters:
            if new is not old:
                self.replaced[old] = new

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Records parameters that this rank does not have, which its optimizers do not step."""
        for parameter in parameters:
            self.dropped[parameter] = torch.empty(0)

    def remap(self, optimizers: Iterable[Any]) -> None:
        """Replaces old parameters in optimizers and their states."""
        mapping: Mapping[Tensor, Tensor] = self.replaced
        for optimizer in optimizers:
            inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
            if len(self.replaced):
                fsdp2_switch_optimizer_parameters(inner, mapping)
                for old in [key for key in inner.state if isinstance(key, Tensor) and key in mapping]:
                    inner.state[mapping[old]] = inner.state.pop(old)
            if len(self.dropped):
                for group in getattr(inner, "param_groups", ()):
                    is_kept = [p not in self.dropped for p in group["params"]]
                    for name in group.keys() & {"params", "param_names"}:
                        group[name] = list(compress(group[name], is_kept))
                for old in [key for key in inner.state if isinstance(key, Tensor) and key in self.dropped]:
                    del inner.state[old]
            if update_singly(inner):
                torch_private.call_after_load(inner, update_singly)

    def change(self, model: nn.Module, change: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Returns the result of a function that changes a model, whose new parameters optimizers step."""
        before = dict(model.named_parameters())
        changed = change(model)
        after = dict(changed.named_parameters(remove_duplicate=False))
        replaced = [(old, after[name]) for name, old in before.items() if after.get(name, old) is not old]
        if replaced:
            self.replace(replaced)
            self.remap([*self.waiting, *self.prepared.optimizers])
        return changed

    def optimizers_of(self, scheduler: object) -> list[AcceleratedOptimizer]:
        inner = getattr(scheduler, "optimizer", None)
        return [optimizer for optimizer in self.prepared.optimizers if _is_or_wraps(optimizer, inner)]

    def assign_optimizers(self) -> None:
        """Sets the optimizers of schedulers that were prepared before their optimizers."""
        for scheduler in self.prepared.schedulers:
            own = self.optimizers_of(scheduler.scheduler)
            if own and own != scheduler.optimizers and not scheduler.belongs_to_engine:
                scheduler.optimizers = own
                scheduler.record_call()

    def clear(self) -> None:
        """Removes all objects and parameters."""
        self.prepared.clear()
        self.replaced.clear()
        self.dropped.clear()


def _is_or_wraps(optimizer: object, inner: object) -> bool:
    """Returns whether an optimizer is another one, or wraps it, in any number of wrappers."""
    while optimizer is not None and optimizer is not inner:
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer is not None


logger = get_logger(__name__)

# Warnings about models and optimizers that do not belong together, and loaders that are not prepared

_PACKAGE = __name__.partition(".")[0]
_MOST_OBJECTS = 1000
"""Number of objects in an argument of `prepare` among which loaders are searched."""


def warn_of_mistakes(
    bundle: Bundle, models: Sequence[nn.Module], optimizers: Sequence[Any], *, is_alone: bool
) -> None:
    """Logs a warning for each new optimizer and model that do not belong together.

    Args:
        models: Models that were prepared before.
        is_alone: Whether the run has one process.
    """
    new_models, new_optimizers = bundle.new(Kind.MODEL), bundle.new(Kind.OPTIMIZER)
    if not new_optimizers:
        return
    optimizers, models = [*optimizers, *bundle.optimizers], [*models, *bundle.models]
    for message in find_unstepped_models(new_models, optimizers):
        logger.warning(message)
    stepped = parameter_ids(optimizers) if is_alone else None
    for message in find_unrelated_optimizers(new_optimizers, models, stepped) if models else []:
        logger.warning(message)


def warn_of_held_loaders(objects: Sequence[Any], *, already_sharded: bool, num_groups: int) -> None:
    """Logs a warning if objects that are not prepared have loaders, and several ranks read them."""
    for message in [] if already_sharded or num_groups == 1 else find_held_loaders(objects):
        logger.warning(message)


def find_unstepped_models(models: Iterable[nn.Module], optimizers: Sequence[Any]) -> list[str]:
    """Returns a warning for each model with trainable parameters that no optimizer steps."""
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
    """Returns a warning for each optimizer that steps no parameter of any prepared model.

    Args:
        stepped: Ids of all parameters that prepared optimizers step, on one process. There an optimizer of
            other parameters is a mistake only if a model has trainable parameters that no optimizer steps.
            None on several processes, where gradients of other parameters are not averaged.
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


def find_held_loaders(objects: Iterable[Any]) -> list[str]:
    """Returns a warning if iterators or containers have loaders of torch, which `prepare` does not find."""
    names = list(dict.fromkeys(type(obj).__name__ for obj in objects if _holds_loader(obj)))
    if not names:
        return []
    return [
        f"prepare() returns objects of type {listed(names)} unchanged, and all ranks read the same batches "
        "of the DataLoader in them. Pass the DataLoader itself to `prepare`, and build the iterator or "
        "container from the loader that it returns."
    ]


def _holds_loader(obj: object) -> bool:
    """Returns whether an object has a loader or an iterator of one that is neither prepared nor sharded."""
    visited, waiting = dict[int, Any](), [obj]
    while waiting and len(visited) < _MOST_OBJECTS:
        current = waiting.pop(0)
        if id(current) in visited or is_prepared(current):
            continue
        visited[id(current)] = current
        if not isinstance(current, (DataLoader, torch_private.LoaderIterator)):
            waiting += islice(_parts(current), _MOST_OBJECTS)
        elif not has_own_shard(*torch_private.sources_of(current)):
            return True
    return False


def _parts(obj: object) -> Iterable[Any]:
    """Returns the objects that an iterable refers to, and none for other objects."""
    kind = type(obj)
    is_iterable = hasattr(kind, "__iter__") or hasattr(kind, "__next__")
    if not is_iterable or isinstance(obj, (Tensor, nn.Module, str, bytes, type)):
        return ()
    if isinstance(obj, dict):
        return obj.values()
    if isinstance(obj, (list, tuple, set, frozenset)):
        return obj
    if isinstance(obj, Generator):
        return _variables(obj)
    # Iterators of zip and itertools have no attributes, and that of a prepared loader reads torch's.
    return () if kind.__module__.startswith(f"{_PACKAGE}.") else gc.get_referents(obj)


def _variables(generator: Any) -> list[Any]:
    """Returns the variables of a generator, loaders among its globals, and the iterator that it reads."""
    frame = getattr(generator, "gi_frame", None)
    if frame is None or frame.f_globals.get("__name__", "").startswith(f"{_PACKAGE}."):
        return []
    names = generator.gi_code.co_names
    known = [value for name in names if isinstance(value := frame.f_globals.get(name), DataLoader)]
    return [*frame.f_locals.values(), generator.gi_yieldfrom, *known]


def _registered_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yields all parameters and buffers of a model, also those that an overridden `parameters` hides."""
    waiting, seen = [model], set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
        waiting += [child for child in module._modules.values() if child is not None]
