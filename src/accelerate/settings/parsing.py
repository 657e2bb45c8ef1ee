"""Parsing of YAML and JSON text within limits of size, depth and number of values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.base import ConfigurationError, shortened, shown

if TYPE_CHECKING:
    import yaml

LARGEST_FILE = 2**20
"""Bytes."""
DEEPEST = 50
"""Levels of mappings and lists in each other."""
MOST_VALUES = 10_000
"""Values of a YAML file, those counted again that an alias repeats."""
LONGEST_NUMBER = 400
"""Maximum length of numbers in characters, because converting longer ones takes seconds."""
LONGEST_REPORT = 400
"""Characters of what PyYAML says about a fault."""


def read_text(path: Path) -> str:
    """Reads the text of a configuration file.

    Raises a `ValueError` if it is too large or not UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ConfigurationError(f"it has more than {LARGEST_FILE // 1024} KiB")
    return content.decode("utf-8")


def parse_json(text: str) -> Any:
    """Parses JSON with plain values, which are not nested too deeply."""
    try:
        content = json.loads(text, object_pairs_hook=_mapping_of)
    except RecursionError:
        raise _too_deep() from None
    check_values(content)
    return content


def _mapping_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f"the key {shown(twice)} occurs twice: remove one of them")
    return mapping


def parse_yaml(text: str) -> Any:
    """Parses one document of YAML with plain values only."""
    import yaml

    try:
        content = yaml.load(text, _loader())  # the safe loader, with limits
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise ConfigurationError(shortened(reason, LONGEST_REPORT)) from error
    check_values(content)
    return content


def check_values(content: object) -> None:
    """Raises an error for keys that are not text, and for values that are nested too deeply."""
    level = [("", content)]
    for _ in range(DEEPEST + 1):
        level = [inner for name, value in level for inner in _values_in(name, value)]
        if not level:
            return
    raise _too_deep()


def _values_in(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                where = f"{shortened(name) or 'it'} has the key {shown(key)}"
                raise ConfigurationError(f"{where}, which is not text: write it in quotes")
            yield f"{name}.{key}" if name else key, inner
    elif isinstance(value, (list, tuple)):
        yield from ((name, inner) for inner in value)


def _too_deep() -> ConfigurationError:
    return ConfigurationError(f"it has more than {DEEPEST} levels of values in each other")


@cache
def _loader() -> type[yaml.SafeLoader]:
    import yaml
    from yaml.constructor import ConstructorError

    class Bounded(yaml.SafeLoader):
        """YAML loader that stops at the limits before it creates values."""

        def __init__(self, text: str) -> None:
            super().__init__(text)
            self._depth = self._count = 0
            self._counts: dict[int, int] = {}

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            mark: Any = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            before = self._count
            is_alias = self.check_event(yaml.AliasEvent)
            self._depth += 1
            self._count += 1
            self._check_limits(mark)
            node = super().compose_node(parent, index)
            self._depth -= 1
            if not is_alias:
                self._counts[id(node)] = self._count - before
            elif id(node) not in self._counts:  # the node is not complete yet
                raise ConstructorError(None, None, "a value holds itself", mark)
            else:
                self._count += self._counts[id(node)]
                self._check_limits(mark)
            return node

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys: set[tuple[str, str]] = set()
            for key, _ in node.value:  # before merged mappings are added, which may repeat keys
                if not isinstance(key, yaml.ScalarNode):
                    continue
                if (key.tag, key.value) in keys:
                    reason = f"the key {shown(key.value)} occurs twice: remove one of them"
                    raise ConstructorError(None, None, reason, key.start_mark)
                keys.add((key.tag, key.value))
            return super().construct_mapping(node, deep)

        def _check_limits(self, mark: yaml.Mark) -> None:
            if self._depth > DEEPEST:
                raise ConstructorError(None, None, str(_too_deep()), mark)
            if self._count > MOST_VALUES:
                reason = f"with those that aliases repeat, it has more than {MOST_VALUES} values"
                raise ConstructorError(None, None, reason, mark)

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            if not isinstance(node, yaml.ScalarNode):
                return super().construct_object(node, deep)
            kind = node.tag.rpartition(":")[2]
            reason = f"{shown(node.value)} is no {kind}"
            if kind in ("int", "float") and len(node.value) > LONGEST_NUMBER:
                reason = f"{shown(node.value)} has more than {LONGEST_NUMBER} digits"
                raise ConstructorError(None, None, reason, node.start_mark)
            try:
                return super().construct_object(node, deep)
            except (ArithmeticError, AttributeError, LookupError, ValueError) as error:
                raise ConstructorError(None, None, reason, node.start_mark) from error

    return Bounded
