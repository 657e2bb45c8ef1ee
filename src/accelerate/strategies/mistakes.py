"""Warnings about models and optimizers that do not belong together, and loaders that are not prepared.

`Strategy.check` logs them before `prepare` changes anything.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelerate import torch_private
from accelerate.base import listed
from accelerate.data_loader import has_own_shard
from accelerate.logging import get_logger
from accelerate.strategies.bundle import Bundle, Kind, is_prepared, parameter_ids

logger = get_logger(__name__)

_PACKAGE = __name__.partition(".")[0]
_MOST_OBJECTS = 1000
"""Number of objects in an argument of `prepare` among which loaders are searched."""


def warn_of_mistakes(
    bundle: Bundle, models: Sequence[nn.Module], optimizers: Sequence[Any], *, is_alone: bool
) -> None:
    """Logs a warning for each new optimizer and model that do not belong together.

    Args:
        bundle: Objects of a call of `prepare`.
        models: Models that were prepared before.
        optimizers: Optimizers that were prepared before.
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
        optimizers: The optimizers to check.
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
    """Returns a warning if iterators or containers have loaders of torch, which `prepare` does not find.

    Args:
        objects: Objects that `prepare` returns unchanged.
    """
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
