"""Split of a model into the stages of a pipeline.

A stage begins at a module that the forward calls once, such as a layer. The modules between two such modules
belong to the earlier stage. Modules are in the order in which the code of the forward around them calls them,
and those that it does not name stay between the modules that were registered before and after them. The
layers of lists that one loop goes through alternate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from torch import nn

from accelerate.base import PreparationError, listed, wrong_value
from accelerate.strategies.pipeline.call_order import Use, uses_in_order

T = TypeVar("T")

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_PARAMETERS = (nn.ParameterList, nn.ParameterDict)


@dataclass(eq=False)
class Submodule:
    """Module of a model that is computed as a whole on one stage, or on each stage that uses it.

    Attributes:
        names: Names of the module in the model.
        stages: Stages that have the parameters and buffers of the module.
    """

    names: list[str]
    module: nn.Module
    stages: set[int] = field(default_factory=set)
    has_parameters: bool = field(init=False)
    """Whether the module has parameters, which only its stages keep."""

    def __post_init__(self) -> None:
        self.has_parameters = next(self.module.parameters(), None) is not None


class Child(NamedTuple):
    """Module in another one.

    Attributes:
        name: Name in the other module.
        order: Names of its entries in the order of their calls, if it is a list in another order.
    """

    name: str
    module: nn.Module
    order: Sequence[str]


@dataclass(frozen=True)
class Split:
    """Submodules of a model and its containers, which are the modules around them.

    Attributes:
        starts: Submodule with which each stage but the first begins.
        containers: Names of the modules that contain submodules. Their forwards run on each stage.
    """

    submodules: list[Submodule]
    starts: list[Submodule]
    containers: list[str]


def split_model(model: nn.Module, num_stages: int, split: str | Sequence[str]) -> Split:
    """Returns the split of a model into stages.

    Args:
        split: "auto", or the names of the modules with which the stages after the first begin.

    Raises:
        PreparationError: The model has too few layers.
        ConfigurationError: A name is wrong.
    """
    if split == "auto":
        candidates = list(_layers_of(model))
        starts = [] if num_stages == 1 else _balanced(model, candidates, num_stages)
    else:
        candidates = starts = _checked(model, num_stages, split)
    containers = _containers_of(model, candidates)
    names = list(_submodule_names(model, containers))
    first = _first_names(model, names)
    first_starts = {first[name] for name in starts}
    submodules: dict[nn.Module, Submodule] = {}
    stage = 0
    for name in names:
        stage += name in first_starts and first[name] == name
        module = model.get_submodule(name)
        submodule = submodules.setdefault(module, Submodule([], module))
        submodule.names.append(name)
        if first[name] == name:
            submodule.stages.add(stage)
    begins = [submodules[model.get_submodule(name)] for name in starts]
    return Split(list(submodules.values()), begins, containers)


def _checked(model: nn.Module, num_stages: int, split: Sequence[str]) -> list[str]:
    names = dict(model.named_modules(remove_duplicate=False))
    if isinstance(split, str):
        raise wrong_value("split", split, "it is one name", 'Pass "auto" or a list of names')
    unknown = [name for name in split if name not in names or not name]
    if unknown:
        raise wrong_value(
            "split",
            listed(unknown),
            f"{type(model).__name__} has no such modules",
            f"Pass names such as {listed([name for name in names if name][:3])}",
        )
    if len(split) != num_stages - 1:
        raise wrong_value(
            "split",
            list(split),
            f"{num_stages} stages begin at {num_stages - 1} modules, besides the first stage",
            f"Pass {num_stages - 1} names",
        )
    order = {name: position for position, name in enumerate(_walk(model, set(names)))}
    if sorted(split, key=order.__getitem__) != list(split) or len(set(split)) < len(split):
        raise wrong_value(
            "split", list(split), "the modules are not in the order of the model", "Sort the names"
        )
    nested = [name for name in split for other in split if name.startswith(f"{other}.")]
    if nested:
        raise wrong_value(
            "split", listed(nested), "they are inside of other modules of the list", "Drop them"
        )
    return list(split)


def _layers_of(model: nn.Module, prefix: str = "", order: Sequence[str] = ()) -> Iterator[str]:
    """Yields the names of the modules in the outermost lists of a model."""
    if isinstance(model, nn.ModuleList) and _is_called(model):  # such as a list of parametrizations
        return
    for child in chain.from_iterable(_groups_in_order(model, order)):
        if isinstance(model, _LISTS) and _is_called(child.module):
            yield f"{prefix}{child.name}"
        else:
            yield from _layers_of(child.module, f"{prefix}{child.name}.", child.order)


def _is_called(module: nn.Module) -> bool:
    """Returns whether a module has a forward, which lists of modules have not."""
    return getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"


def _groups_in_order(module: nn.Module, order: Sequence[str]) -> list[list[Child]]:
    """Returns the modules in a module, in the order in which the code of its forward calls them.

    The lists of modules that one loop goes through are one group.

    Args:
        order: Names of the entries of a list in the order of their calls, as for `Child`.
    """
    uses = [use for use in uses_in_order(module) if use.is_call]
    children = [
        Child(name, child, _order_of_entries(child, [use for use in uses if use.name == name]))
        for name, child in module._modules.items()
        if child is not None
    ]
    if isinstance(module, _LISTS):
        by_name = {child.name: child for child in children}
        return [[by_name[name]] for name in order or by_name if name in by_name]
    first: dict[str, int] = {}
    for position, use in enumerate(uses):
        first.setdefault(use.name, position)
    known = [first.get(child.name) for child in children]
    positions = []
    for i, own in enumerate(known):
        before = next((each for each in reversed(known[:i]) if each is not None), -1.0)
        after = next((each for each in known[i + 1 :] if each is not None), math.inf)
        positions.append((before if after >= before else after - 0.5) if own is None else own)
    groups: list[list[Child]] = []
    group_of: dict[Any, list[Child]] = {}  # of each loop
    for i in sorted(range(len(children)), key=positions.__getitem__):
        loops = {use.loop for use in uses if use.name == children[i].name} - {None}
        loops = loops if isinstance(children[i].module, nn.ModuleList) else set()
        group = next((group_of[loop] for loop in loops if loop in group_of), [])
        if not group:
            groups.append(group)
        group.append(children[i])
        group_of.update(dict.fromkeys(loops, group))
    return groups


def _order_of_entries(module: nn.Module, uses: Sequence[Use]) -> Sequence[str]:
    """Returns the names of the entries of a list in the order of their uses, if it is known."""
    names = list(module._modules)
    if any(use.is_reversed for use in uses):
        return names[::-1]
    used = list(dict.fromkeys(use.entry for use in uses))
    return used if sorted(used) == sorted(names) else ()


def _containers_of(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Returns the names of the modules whose forwards run on each stage, the outermost first.

    These contain some modules, or have weights that the code around them reads.
    """
    containers = {"": None}
    for name in names:
        parts = name.split(".")
        containers.update(dict.fromkeys(".".join(parts[:depth]) for depth in range(1, len(parts))))
    for container in list(containers):
        module = model.get_submodule(container)
        read = {use.name for use in uses_in_order(module) if use.reads_weight}
        read |= {name for name, child in module._modules.items() if isinstance(child, _PARAMETERS)}
        containers.update(dict.fromkeys(f"{container}.{name}".removeprefix(".") for name in sorted(read)))
        for group in _groups_in_order(module, ()):
            alternating = [f"{container}.{child.name}".removeprefix(".") for child in group]
            if not containers.keys().isdisjoint(alternating):
                containers.update(dict.fromkeys(alternating))
    return list(containers)


def _submodule_names(model: nn.Module, containers: Sequence[str]) -> Iterator[str]:
    """Yields the names of the modules in containers that are not containers themselves, in order."""
    inner = set(containers)
    return (name for name in _walk(model, inner) if name not in inner)


def _first_names(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Returns for each name the first name of the same entry, such as of a list with two names."""
    first: dict[tuple[nn.Module, str], str] = {}
    found = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        found[name] = first.setdefault((model.get_submodule(parent), last), name)
    return found


def _walk(model: nn.Module, containers: Collection[str]) -> Iterator[str]:
    """Yields the names of the modules in a model and in containers, tied ones by each of their names."""
    return chain.from_iterable(_parts(model, containers, "", ()))


def _parts(
    model: nn.Module, containers: Collection[str], prefix: str, order: Sequence[str]
) -> Iterator[list[str]]:
    """Yields the names of each group of modules in a model, with those inside of containers."""
    for group in _groups_in_order(model, order):
        names = [f"{prefix}{child.name}" for child in group]
        lists = [
            list(_parts(child.module, containers, f"{name}.", child.order)) if name in containers else []
            for name, child in zip(names, group, strict=True)
        ]
        yield [*names, *chain.from_iterable(_alternated(lists))]


def _alternated(lists: Sequence[Sequence[T]]) -> list[T]:
    """Returns the entries of lists one by one.

    A list with one entry less is between those of a longer one, and half as many follow every other one.
    """
    longest = max(map(len, lists))
    positions: list[tuple[int, int, T]] = []
    for number, entries in enumerate(lists):
        is_regular = len(entries) < longest - 1 and entries and longest % len(entries) == 0
        distance = longest // len(entries) if is_regular else 1
        positions += [(distance * (i + 1), number, entry) for i, entry in enumerate(entries)]
    return [entry for *_, entry in sorted(positions, key=itemgetter(0, 1))]


def _balanced(model: nn.Module, candidates: Sequence[str], num_stages: int) -> list[str]:
    """Returns the layers at which stages begin, so that the largest stage is as small as possible.

    The size of a stage is the number of its parameters, without embeddings, which are only looked up.
    """
    names = list(_submodule_names(model, _containers_of(model, candidates)))
    layers = set(candidates)
    modules = [model.get_submodule(name) for name in names]
    first = _first_names(model, names)
    num_places = Counter(module for name, module in zip(names, modules, strict=True) if first[name] == name)
    positions = [
        i
        for i, name in enumerate(names)
        if i > 0 and name in layers and first[name] == name and num_places[modules[i]] == 1
    ]
    if len(positions) < num_stages - 1:
        raise PreparationError(
            f"{type(model).__name__} cannot be split into {num_stages} stages: a stage begins at a module of "
            f"an nn.ModuleList or nn.Sequential, and the model has {len(positions)} after its first one. "
            "Use fewer stages, or name the first module of each later stage in PipelineConfig(split=[...])."
        )
    costs = [_cost(module) for module in modules]
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[k][i]: smallest size of the largest of k + 1 stages up to position i, and where the last begins
    ends = [*positions, len(names)]
    best: list[dict[int, tuple[int, int]]] = [{end: (total[end], 0) for end in ends}]
    for _ in range(num_stages - 1):
        previous, row = best[-1], {}
        for end in ends:
            options = [
                (max(previous[start][0], total[end] - total[start]), start)
                for start in positions
                if start < end and start in previous
            ]
            if options:
                row[end] = min(options)
        best.append(row)
    starts: list[int] = []
    end = len(names)
    for row in reversed(best[1:]):
        end = row[end][1]
        starts.append(end)
    return [names[start] for start in reversed(starts)]


def _cost(module: nn.Module) -> int:
    embeddings = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag))
        for parameter in part.parameters(recurse=False)
    }
    return 1 + sum(p.numel() for p in module.parameters() if id(p) not in embeddings)
