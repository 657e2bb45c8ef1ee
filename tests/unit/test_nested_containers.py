"""Containers whose constructors do not take their items are rebuilt with all that they hold."""

from __future__ import annotations

from collections import ChainMap, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import pytest
import torch

from accelerate.nested import concatenate, recursively_apply, send_to_device


class Sized(dict[str, Any]):
    """A dictionary whose constructor takes other arguments."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


class Silent(dict[str, Any]):
    """A dictionary whose constructor takes a mapping for another argument."""

    def __init__(self, size: Any = 0) -> None:
        super().__init__()
        self.size = size


class Rows(list[Any]):
    def __init__(self, size: int, note: str) -> None:
        super().__init__()
        self.size, self.note = size, note


class Noted(namedtuple("Noted", ("x", "y"))):
    def __new__(cls, x: Any) -> Noted:
        self = super().__new__(cls, x, x * 2)
        self.note = "noted"
        return self


class Wide(tuple[Any, ...]):
    def __new__(cls, *items: Any) -> Wide:
        return super().__new__(cls, items)


@dataclass
class Output(OrderedDict[str, Any]):
    """A dictionary with a field for each key, as those of transformers."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Grouped(defaultdict[str, Any]):
    def __init__(self) -> None:
        super().__init__(list)


class Encoding(UserDict[str, Any]):
    def __init__(self, data: dict[str, Any], encodings: Any) -> None:
        super().__init__(data)
        self.encodings = encodings


class Fixed(Mapping[str, Any]):
    def __init__(self, names: Sequence[str], values: Sequence[Any]) -> None:
        self.items_of = dict(zip(names, values, strict=True))

    def __getitem__(self, name: str) -> Any:
        return self.items_of[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


class Forgetful(Fixed):
    """A mapping whose constructor takes a mapping for another argument."""

    def __init__(self, names: Sequence[str], values: Sequence[Any] = ()) -> None:
        super().__init__(*((names, values) if values else ((), ())))


def fill(mapping: Any) -> Any:
    mapping["x"], mapping["y"] = torch.ones(1), [torch.ones(1), "name"]
    return mapping


def make_containers() -> list[Any]:
    rows = Rows(3, "rows")
    rows += [torch.ones(1), "name"]
    mappings = (Sized(3), Silent(3), Grouped(), Encoding({}, "encodings"), OrderedDict(), UserDict())
    return [
        *map(fill, (*mappings, defaultdict(list), ChainMap())),
        *(
            Output(torch.ones(1)),
            Output(torch.ones(1), torch.ones(1)),
            MappingProxyType({"x": torch.ones(1)}),
        ),
        *(rows, Noted(torch.ones(1)), Wide(torch.ones(1), "name"), torch.ones(2).max(0), torch.Size((2, 3))),
    ]


def describe(item: Any, factor: int = 1) -> Any:
    """The types, items, attributes and default factories of a structure, with all tensors multiplied."""
    if isinstance(item, torch.Tensor):
        return (item * factor).tolist()
    if not isinstance(item, (Mapping, list, tuple)):
        return item
    inner = dict(item) if isinstance(item, Mapping) else dict(enumerate(item))
    attributes = {} if isinstance(item, (UserDict, ChainMap)) else getattr(item, "__dict__", {})
    factory, encodings = getattr(item, "default_factory", None), getattr(item, "encodings", None)
    everything = {**inner, **{f".{name}": value for name, value in attributes.items()}}
    return type(item), factory, encodings, {key: describe(value, factor) for key, value in everything.items()}


def test_containers_are_rebuilt_without_their_constructors() -> None:
    wrong = []
    for container in make_containers():
        before, expected = describe(container), describe(container, 2)
        doubled = recursively_apply(lambda tensor: tensor * 2, container)
        moved = send_to_device(container, "cpu")
        if describe(doubled) != expected or describe(moved) != before or describe(container) != before:
            wrong.append((before, describe(doubled), describe(moved), describe(container)))
    assert not wrong


def test_structures_of_other_containers_are_joined() -> None:
    joined = concatenate([Output(torch.ones(1)), Output(torch.zeros(1))])
    assert joined.logits.tolist() == joined["logits"].tolist() == [1, 0]
    rows = Rows(3, "rows")
    rows += ["name"]
    assert concatenate([rows, rows]) == ["name", "name"]
    assert concatenate([rows, rows]).note == "rows"


def test_a_mapping_that_cannot_be_rebuilt_is_named() -> None:
    for kind in (Fixed, Forgetful):
        with pytest.raises(TypeError, match=f"A {kind.__name__} cannot be built.*convert it to a dict"):
            send_to_device(kind(["x"], [torch.ones(1)]), "cpu")
