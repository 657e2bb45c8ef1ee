"""What a plan places: the parts of a model that stay whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from accelerate.weights import Dtype, find_blocks, tensor_bytes


@dataclass(frozen=True)
class Unit:
    """One or several modules, or single tensors, that go to one device.

    Attributes:
        names: theirs; several where modules share parameters.
        size: bytes of all their tensors that no unit before has.
        buffers: bytes of the buffers among them.
        block: bytes of the largest block that one of their tensors is part of: what a device must have free
            to work with them when they lie elsewhere.
    """

    names: tuple[str, ...]
    size: float
    buffers: float
    block: float


@dataclass(frozen=True)
class _Part:
    name: str
    tensors: Mapping[str, Tensor]


def find_units(
    model: nn.Module,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    join_tied: bool = True,
) -> list[Unit]:
    """Return the units of a model in the order of its modules; those that share parameters stand together.

    Args:
        model: the module; it may lie on the meta device.
        no_split_module_classes: names of classes that stay whole; None: `_no_split_modules` of the model.
        dtype: of the model once it is loaded; None: as it is.
        special_dtypes: those of single tensors, by name.
        join_tied: whether parts that share parameters are one unit.
    """
    parts = list(_walk(model, "", whole_classes(model, no_split_module_classes)))
    blocks = _block_sizes(model, dtype, special_dtypes)
    counted: set[int] = set()
    units = []
    for group in _join_tied(parts) if join_tied else [[part] for part in parts]:
        sizes = []
        for name, tensor in ((name, tensor) for part in group for name, tensor in part.tensors.items()):
            if id(tensor) not in counted:
                sizes.append((tensor_bytes(name, tensor, dtype, special_dtypes), tensor))
            counted.add(id(tensor))
        units.append(
            Unit(
                names=tuple(part.name for part in group),
                size=sum(size for size, _ in sizes),
                buffers=sum(size for size, tensor in sizes if not isinstance(tensor, nn.Parameter)),
                block=max(blocks[name] for part in group for name in part.tensors),
            )
        )
    return units


def whole_classes(model: nn.Module, named: str | Collection[str] | None) -> frozenset[str]:
    """Return the names of the classes that stay whole.

    Args:
        model: the module, maybe with `_no_split_modules`.
        named: by the user; None leaves it to the model.
    """
    chosen = getattr(model, "_no_split_modules", None) if named is None else named
    return frozenset([chosen] if isinstance(chosen, str) else chosen or ())


def _walk(module: nn.Module, name: str, whole: frozenset[str]) -> Iterator[_Part]:
    children = {key: child for key, child in module._modules.items() if child is not None}
    is_unit = bool(name) and (not children or type(module).__name__ in whole)
    prefix = f"{name}." if name else ""
    own = {f"{prefix}{each}": tensor for each, tensor in _tensors(module, recurse=is_unit)}
    if is_unit:
        yield from [_Part(name, own)] if own else []
        return
    yield from (_Part(each, {each: tensor}) for each, tensor in own.items())
    for key, child in children.items():
        yield from _walk(child, f"{prefix}{key}", whole)


def _tensors(module: nn.Module, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(recurse=recurse, remove_duplicate=False)


def _join_tied(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Group parts that share a parameter; a group stands where its first part does."""
    groups = list(range(len(parts)))
    owner: dict[int, int] = {}
    for index, part in enumerate(parts):
        shared = [id(tensor) for tensor in part.tensors.values() if isinstance(tensor, nn.Parameter)]
        joined = {groups[owner[key]] for key in shared if key in owner} | {index}
        if len(joined) > 1:
            groups = [min(joined) if group in joined else group for group in groups]
        owner.update(dict.fromkeys(shared, index))
    found: dict[int, list[_Part]] = defaultdict(list)
    for group, part in zip(groups, parts, strict=True):
        found[group].append(part)
    return [found[group] for group in sorted(found)]


def _block_sizes(
    model: nn.Module, dtype: Dtype | None, special_dtypes: Mapping[str, Dtype] | None
) -> dict[str, float]:
    """Return, for each tensor, the bytes of the block that it is part of."""
    sizes: dict[str, float] = {}
    for path, module, with_inner in find_blocks(model):
        prefix = f"{path}." if path else ""
        named = {f"{prefix}{name}": tensor for name, tensor in _tensors(module, with_inner)}
        total = sum(tensor_bytes(name, tensor, dtype, special_dtypes) for name, tensor in named.items())
        sizes.update(dict.fromkeys(named, total))
    return sizes
