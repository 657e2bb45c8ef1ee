"""Declaration of options, from which flag, file key, variable, question and reference row are derived.

A section is a frozen dataclass whose fields are made by `option`. ``Section.options()`` turns the fields into
`Option` rows; flags, file, environment and documentation are loops over those rows and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

from accelerate.base import LARGEST, SMALLEST, ConfigurationError, itemized, shown, str_to_bool, wrong_value

Encoder = Callable[[Any], str | None]
"""Encoder of a value for an environment variable, where ``None`` does not set the variable."""


def _encoder(case: Callable[[str], str] = str, writes_empty: bool = True) -> Encoder:
    """Returns a function that encodes text in a case, and encodes ``None`` as no text."""

    def encode(value: object) -> str | None:
        is_written = value is not None and (writes_empty or value != "")
        return case(str(value)) if is_written else None

    return encode


as_text = _encoder()
lower = _encoder(str.lower)
upper = _encoder(str.upper)
unless_empty = _encoder(writes_empty=False)
unless_empty_lower = _encoder(str.lower, writes_empty=False)


def lower_bool(value: object) -> str | None:
    """Encodes a bool as ``true`` or ``false``, and other values as ``str``."""
    return lower(value) if isinstance(value, bool) else as_text(value)


def as_bit(value: object) -> str | None:
    """Encodes a bool as ``1`` or ``0``."""
    return None if value is None else str(int(bool(value)))


def only_true(text: str) -> Encoder:
    """Returns a function that encodes True as `text`, and other values as no text."""
    return lambda value: text if value else None


@dataclass(frozen=True, kw_only=True)
class Option:
    """Properties of one option, with defaults derived from its field and section."""

    name: str  # unique over all sections, also the attribute of the parsed flag
    kind: type  # bool, int, float, str, tuple or dict (of the user's own, in files only)
    default: Any
    help: str  # one sentence for `-h` and the docs
    encode: Encoder
    flags: tuple[str, ...]  # flags on the command line, or empty
    flag_default: Any  # what an absent flag leaves in the namespace (part of the interface, not a setting)
    flag_type: Callable[[str], Any]  # how argparse converts the text of the flag
    action: str  # what argparse does with the flag
    group: str  # heading of the flag in the help
    key: str | None  # name in the configuration file, or None if it is not in files
    field: str  # name of the field of the plugin that has the same meaning, if there is one
    offers: tuple[str, ...]  # values that the questionnaire lists
    variables: tuple[str, ...]  # several when the value is a tuple with a variable for each element
    aliases: tuple[str, ...] = ()  # variables that are read where the first is absent, and never written
    choices: tuple[str, ...] = ()  # accepted values, or empty for any
    words: tuple[str, ...] = ()  # the same for a text that the parser of flags accepts
    limits: tuple[float, float] | None = None  # minimum and maximum, or None for any 64-bit number
    negations: tuple[str, ...] = ()  # flags that say no, where a switch has one of its own
    ask: str | None = None  # question of the questionnaire, or None
    when: Callable[[Mapping[str, Any]], bool] | None = None  # asked only if it holds for the answers so far
    advanced: bool = False  # asked only when the user wants to see everything
    secret: bool = False  # never printed
    foreign: bool = False  # variable of another program, whose invalid values are ignored

    def read(self, value: object, where: str) -> Any:
        """Converts a value of the flag, key or variable `where` to the type of the option."""
        try:
            result = self._convert(value)
        except UnicodeError:
            reason = "no variable and no path can hold some of its characters"
            raise wrong_value(where, value, reason, "Remove them") from None
        except (ValueError, TypeError, OverflowError):
            wanted = WANTED[self.kind]
            if len(self.variables) > 1:
                wanted = f"{len(self.variables)} words like true,false,true"
            raise wrong_value(where, value, f"this must be {wanted}", "Change the value") from None
        least, most = self.limits or (SMALLEST, LARGEST)
        if self.kind in (int, float) and not least <= result <= most:
            span = f"{least} to {most}"
            raise wrong_value(where, value, "this number is out of range", f"Use one from {span}")
        return self._choose(result, value, where) if self.choices or self.words else result

    def _convert(self, value: object) -> Any:
        result = READERS[self.kind](value)
        if len(self.variables) <= 1:
            return result
        if len(result) != len(self.variables):
            raise ValueError(value)
        return tuple(_read_bool(part) for part in result)

    def _choose(self, result: object, value: object, where: str) -> Any:
        text = "no" if value is False else str(result).lower()  # YAML reads `no` as a boolean
        choices = self.choices or self.words
        for choice in choices:
            if text == choice.lower():
                return choice if self.kind is str else result
        reason = "this is not one of the accepted values"
        raise wrong_value(where, value, reason, f"Use one of {', '.join(choices)}")


def _read_bool(value: object) -> bool:
    return value if isinstance(value, bool) else bool(str_to_bool(str(value)))


def _read_int(value: object) -> int:
    if isinstance(value, (bool, bytes)) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    return int(value)  # type: ignore[call-overload, no-any-return]


def _read_float(value: object) -> float:
    number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _read_str(value: object) -> str:
    if value is None or isinstance(value, dict | list | tuple | set | bytes):
        raise ValueError(value)
    text = ("true" if value else "false") if isinstance(value, bool) else str(value)
    text.encode("utf-8", "surrogateescape")
    if "\0" in text:
        raise UnicodeError(text)
    return text


def _read_tuple(value: object) -> tuple[str, ...]:
    if isinstance(value, list | tuple):
        return tuple(_read_str(part) for part in value)
    if isinstance(value, str):
        return tuple(part.strip() for part in _read_str(value).split(",") if part.strip())
    raise ValueError(value)


def _read_dict(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError(value)


READERS: dict[type, Callable[[object], Any]] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_str,
    tuple: _read_tuple,
    dict: _read_dict,
}
WANTED = {
    bool: "yes or no",
    int: "a whole number",
    float: "a number",
    str: "one text",
    tuple: "a list",
    dict: "a group of settings",
}


EMPTY_ANSWERS: dict[type, str] = {str: " (empty for none)", tuple: " (separated by commas, empty for none)"}
"""Kind of an option that may be left out -> the end of its question."""


def option(default: object, help: str, **attributes: Any) -> Any:
    """Declares one option as a field of a `Section`.

    What is not given follows from the field: the flag is ``--<name>`` (the parser adds the dash form), the
    key is the name, the group is the section's title, the offers are the choices, and action, default and
    type of the flag follow from the field's type.

    Args:
        default: the built-in value.
        help: one sentence; its first clause is the question with ``ask=True``.
        **attributes: attributes of :class:`Option`, and ``env``: the variable, or one variable for each
            element of a tuple; default: the one of the section's `env_prefix`, if it has one.
    """
    return dataclasses.field(default=default, kw_only=True, metadata={"help": help, **attributes})


optional = partial(option, None)
"""Declare an option without a built-in value."""


class Section:
    """Base class of all sections, which are frozen dataclasses with keyword-only fields from `option`."""

    title: ClassVar[str]  # heading in the help and the docs
    file_key: ClassVar[str | None] = None  # mapping of the section in the file, or None for the top level
    switch: ClassVar[str] = ""  # flag that makes the section active, or empty if it is always active
    key_prefix: ClassVar[str] = ""  # beginning of the options' names that their keys leave out
    field_prefix: ClassVar[str] = ""  # the same for fields of plugins
    # Beginning of the variables, which end with the names of options in upper case; None: an option has only
    # the variables that it declares.
    env_prefix: ClassVar[str | None] = None
    makes_flags: ClassVar[bool] = True  # options have a flag by default
    takes_words: ClassVar[bool] = False  # flags of yes/no options take true or false, and are no switches
    encode: ClassVar[Encoder] = as_text  # how options are written into variables by default
    encode_optional: ClassVar[Encoder] = as_text  # the same for options whose default is None

    @classmethod
    def active(cls, values: Mapping[str, Any]) -> bool:
        """Returns whether the variables of the section are written, for the values of all options."""
        return not cls.switch or bool(values[cls.switch.removeprefix("--")])

    @classmethod
    def asked(cls, answers: Mapping[str, Any]) -> bool:
        """Returns whether the questionnaire includes this section, from the answers so far by option name."""
        return cls.active(answers)

    @classmethod
    @cache
    def options(cls) -> tuple[Option, ...]:
        """Returns the options of the section in the order of declaration."""
        hints = typing.get_type_hints(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        return tuple(_row(cls, field, hints[field.name]) for field in fields)


def _row(section: type[Section], field: dataclasses.Field[Any], hint: Any) -> Option:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):  # `int | None`
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    kind: type = typing.get_origin(hint) or hint
    declared, default = dict(field.metadata), field.default
    is_word = kind is bool and section.takes_words and "flag_type" not in declared
    is_switch = kind is bool and not is_word and "flag_type" not in declared
    env = () if section.env_prefix is None else f"{section.env_prefix}{field.name.upper()}"
    env = declared.pop("env", env)
    if declared.get("ask") is True:
        # "torchao: pad matrices (true or false)." -> "Pad matrices?"
        clause = declared["help"].removesuffix(".").removesuffix(" (true or false)").rpartition(": ")[2]
        hint = EMPTY_ANSWERS.get(kind, "") if default is None else ""
        declared["ask"] = f"{clause[0].upper()}{clause[1:]}{hint}?"
    follows = {
        "flags": (f"--{field.name}",) if section.makes_flags else (),
        "flag_default": lower(default) if is_word else default,
        "flag_type": str if kind in (bool, tuple) else kind,
        "action": "store_true" if is_switch else "store",
        "group": section.title,
        "key": field.name.removeprefix(section.key_prefix),
        "field": field.name.removeprefix(section.field_prefix),
        "offers": declared.get("choices", ()),
        "variables": (env,) if isinstance(env, str) else env,
        "encode": section.encode_optional if default is None else section.encode,
    }
    return Option(name=field.name, kind=kind, default=default, **{**follows, **declared})


def true_or_false(text: str) -> bool:
    """Converts the value of a flag to a bool, or raises the error that argparse shows."""
    try:
        return bool(str_to_bool(text))
    except ValueError:
        raise ArgumentTypeError(f"{shown(text)} must be true or false") from None


def refuse_all(problems: list[str]) -> None:
    """Raises one error that lists every problem, if there is any."""
    if problems:
        raise ConfigurationError(itemized(problems, "settings are wrong"))
