"""Functions with which plugins check their fields and fill those that are None."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from numbers import Integral, Number
from typing import Any, TypeVar

from accelerate.base import FALSE_WORDS, TRUE_WORDS, current, plain_value, wrong_value
from accelerate.settings import Section, read_fields

Choice = TypeVar("Choice")
Member = TypeVar("Member", bound=Enum)


def one_of(
    name: str, value: Choice, choices: Iterable[Choice], given: object = None, *kinds: type[BaseException]
) -> Choice:
    """Returns a value that is one of the choices, and raises an error otherwise.

    Args:
        given: The value as the user wrote it, if `value` is a normalized form of it.
        *kinds: Builtin exceptions that the error is an instance of, too.
    """
    choices, value = list(choices), plain_value(value)
    if value not in choices:
        fix = f"Choose one of {', '.join(map(str, choices))}"
        raise wrong_value(name, value if given is None else given, "it is not a known choice", fix, *kinds)
    return value


def read_flag(name: str, value: object) -> bool:
    """Returns the boolean for a value that may be a word, such as "true"."""
    word = str(plain_value(value)).strip().lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise wrong_value(name, value, "it is neither a yes nor a no", "Give True or False")
    return word in TRUE_WORDS


def member(name: str, value: object, kind: type[Member]) -> Member:
    """Returns the member of an enumeration for the member itself or its value."""
    for candidate in kind:
        if plain_value(value) in (candidate, candidate.value):
            return candidate
    fix = f"Choose one of {', '.join(str(candidate.value) for candidate in kind)}"
    raise wrong_value(name, value, "it is not a known choice", fix)


def plain_fields(plugin: Any) -> None:
    """Replaces members of string enumerations in the fields of a dataclass by plain strings."""
    for entry in dataclasses.fields(plugin):
        setattr(plugin, entry.name, plain_value(getattr(plugin, entry.name)))


def at_least(name: str, value: float, minimum: float) -> None:
    """Raises an error for a value that is not a number or is below the minimum."""
    if not isinstance(value, Number):
        raise wrong_value(name, value, "it is not a number", f"Give {minimum} or more", TypeError)
    if value < minimum:
        raise wrong_value(name, value, "it is too small", f"Give {minimum} or more")


def whole_at_least(name: str, value: Any, minimum: int) -> None:
    """Raises an error for a value that is not a whole number or is below the minimum."""
    at_least(name, value, minimum)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise wrong_value(name, value, "it is not a whole number", f"Give {minimum} or more", TypeError)


def fill_from(plugin: object, section: type[Section], optional: Collection[str] = ()) -> None:
    """Sets fields that are None to the values of options in the environment, or to their defaults.

    Args:
        optional: Fields that stay None if the environment does not set them.
    """
    defaults = {row.field: row.default for row in section.options() if row.field not in optional}
    fill(plugin, {**defaults, **read_fields(current(), section)})


def check_choices(plugin: object, section: type[Section], *fields: str) -> None:
    """Raises an error for fields whose values are not among those that the section lists."""
    for row in section.options():
        if row.field in fields:
            one_of(row.field, getattr(plugin, row.field), row.offers)


def fill(plugin: object, values: Mapping[str, Any], names: Collection[str] = ()) -> None:
    """Sets fields that are None to the values of their names.

    Args:
        names: Fields to set. Empty for all fields in `values`.
    """
    for name in names or values:
        if name in values and getattr(plugin, name, ...) is None:
            setattr(plugin, name, values[name])
