"""A second try where accelerators stay empty, because the next module is too large for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from accelerate.big_modeling.budget import Place
from accelerate.big_modeling.units import Unit
from accelerate.weights import NamedModule, named_module_tensors


def place_in_gaps(
    units: Sequence[Unit], places: Sequence[Place | None], limits: Mapping[Place, float], room: float
) -> list[Place | None]:
    """Give each accelerator without a unit the first units that fit it, out of those that have no place.

    Args:
        units: in the order of the model.
        places: of each; None for those without one.
        limits: bytes of each accelerator.
        room: bytes that the first accelerator in use keeps free for units that lie elsewhere.

    Returns:
        The places, with those that were found.
    """
    found = list(places)
    for place, limit in limits.items():
        if place in found:
            continue
        free = limit if any(each is not None for each in found) else limit - room
        for index, unit in enumerate(units):
            if found[index] is None and unit.size <= free:
                found[index] = place
                free -= unit.size
            elif place in found:
                break
    return found


def fallback_allocate(
    modules: Sequence[NamedModule],
    module_sizes: Mapping[str, float],
    size_limit: float,
    no_split_module_classes: Collection[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | Tensor | None, list[NamedModule]]:
    """Find the first module that fits a device; larger ones are opened until one of their parts does.

    Args:
        modules: modules, or single tensors, by name, in their order.
        module_sizes: as `compute_module_sizes` returns them.
        size_limit: bytes that are free.
        no_split_module_classes: names of classes that are not opened.
        tied_parameters: groups of names that stand for one parameter each: a module that has one of several
            is not taken, as the others would be elsewhere.

    Returns:
        Name and module that fits, None twice if there is none; and the modules that are left. A module that
        was opened is replaced by its other parts.
    """
    whole = frozenset(no_split_module_classes or ())
    tied = [group for group in tied_parameters or () if len(group) > 1]
    level: list[tuple[list[NamedModule], list[NamedModule], list[NamedModule]]] = [([], list(modules), [])]
    while level:
        deeper = []
        for before, here, after in level:
            for index, (name, module) in enumerate(here):
                if module_sizes.get(name, 0) <= size_limit and not _is_tied_outside(name, tied):
                    return name, module, [*before, *here[:index], *here[index + 1 :], *after]
            for index, (name, module) in enumerate(here):
                parts = _open(name, module, whole)
                if parts:
                    deeper.append(([*before, *here[:index]], parts, [*here[index + 1 :], *after]))
        level = deeper
    return None, None, list(modules)


def _open(name: str, module: nn.Module | Tensor, whole: frozenset[str]) -> list[NamedModule]:
    if isinstance(module, Tensor) or type(module).__name__ in whole:
        return []
    children = list(module.named_children())
    parts: list[NamedModule] = [*named_module_tensors(module), *children] if children else []
    return [(f"{name}.{each}", part) for each, part in parts]


def _is_tied_outside(name: str, tied: Sequence[Sequence[str]]) -> bool:
    inside = [[f"{each}.".startswith(f"{name}.") for each in group] for group in tied]
    return any(any(group) and not all(group) for group in inside)
