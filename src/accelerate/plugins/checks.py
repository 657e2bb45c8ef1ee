"""Checks that several plugins make on the values they are given."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from numbers import Number
from typing import TypeVar

from accelerate.base import FALSE_WORDS, TRUE_WORDS, wrong_value

Choice = TypeVar("Choice")
Member = TypeVar("Member", bound=Enum)


def one_of(
    name: str, value: Choice, choices: Iterable[Choice], given: object = None, *kinds: type[BaseException]
) -> Choice:
    """Return a value that is among the choices.

    Args:
        name: what the value is called where the user gave it.
        value: the value.
        choices: every value that can be given.
        given: what the user wrote, where `value` is another spelling of it.
        kinds: built-in classes that the error is an instance of, too.

    Raises:
        ConfigurationError: the value is not among them.
    """
    known = list(choices)
    if value not in known:
        shown = value if given is None else given
        raise wrong_value(name, shown, "it is not a known choice", f"Choose one of {_listed(known)}", *kinds)
    return value


def read_flag(name: str, value: object) -> bool:
    """Return a truth value that may be written as a word.

    Args:
        name: what the value is called where the user gave it.
        value: a bool, or a word such as "true".

    Raises:
        ConfigurationError: it is neither a yes nor a no.
    """
    word = str(value).strip().lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise wrong_value(name, value, "it is neither a yes nor a no", "Give True or False")
    return word in TRUE_WORDS


def member(name: str, value: object, kind: type[Member]) -> Member:
    """Return the member of an enumeration that a user named.

    Args:
        name: what the value is called where the user gave it.
        value: a member, or the value of one.
        kind: the enumeration.

    Raises:
        ConfigurationError: no member has that value.
    """
    for candidate in kind:
        if value == candidate or value == candidate.value:
            return candidate
    raise wrong_value(
        name, value, "it is not a known choice", f"Choose one of {_listed(entry.value for entry in kind)}"
    )


def at_least(name: str, value: float, minimum: float) -> None:
    """Refuse a number below a minimum.

    Args:
        name: what the value is called where the user gave it.
        value: the number.
        minimum: the smallest number that can be given.

    Raises:
        ConfigurationError: the number is smaller, or none.
    """
    if not isinstance(value, Number):
        raise wrong_value(name, value, "it is not a number", f"Give {minimum} or more", TypeError)
    if value < minimum:
        raise wrong_value(name, value, "it is too small", f"Give {minimum} or more")


def _listed(choices: Iterable[object]) -> str:
    return ", ".join(str(choice) for choice in choices)
