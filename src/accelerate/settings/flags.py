"""Sections -> command-line flags, and parsed flags -> settings: which ones were really given."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from accelerate.settings.layers import FLAG, SECTIONS, Layer, Settings, all_options
from accelerate.settings.option import Option, Section, refuse_all
from accelerate.settings.parser import CustomArgumentParser
from accelerate.settings.sections import GENERAL


def add_sections(parser: CustomArgumentParser, sections: Iterable[type[Section]] = SECTIONS) -> None:
    """Add a flag for each option that has one, under its heading.

    Args:
        parser: gets the flags.
        sections: in the order of the help.
    """
    groups: dict[str, Any] = {GENERAL: parser}
    for section in sections:
        for row in section.options():
            if not row.flags:
                continue
            if row.group not in groups:
                groups[row.group] = parser.add_argument_group(row.group)
            groups[row.group].add_argument(*row.flags, **_arguments(row))
            for flag in row.negations:
                groups[row.group].add_argument(
                    flag,
                    action="store_const",
                    const=False,
                    default=True,
                    dest=row.name,
                    help=f"Not {row.flags[0]}.",
                )


def _arguments(row: Option) -> dict[str, Any]:
    arguments = {"action": row.action, "default": row.flag_default, "dest": row.name, "help": _help(row)}
    if row.action.startswith("store_"):
        return arguments
    if row.action != "append" and row.choices:
        return {**arguments, "type": row.flag_type, "choices": row.choices, "metavar": "NAME"}
    return {**arguments, "type": row.flag_type, "metavar": METAVARS[row.kind]}


RETIRED = {
    "ipex": "Intel Extension for PyTorch is no longer used",
    "use_xpu": "an XPU is used when there is one",
}
"""Flags of older versions that are accepted and mean nothing now -> why."""


def add_retired(parser: CustomArgumentParser) -> None:
    """Add the flags of older versions, which the help does not show."""
    for name in RETIRED:
        parser.add_argument(f"--{name}", action="store_true", default=None, help=argparse.SUPPRESS)


def retired_notes(namespace: argparse.Namespace) -> tuple[str, ...]:
    """What to tell a user who gave a flag of an older version."""
    return tuple(
        f"--{name} has no effect: {why}" for name, why in RETIRED.items() if getattr(namespace, name, None)
    )


METAVARS = {bool: "BOOL", int: "N", float: "X", str: "TEXT", tuple: "TEXT"}


def _help(row: Option) -> str:
    text = row.help.replace("%", "%%")
    spelled = all(choice in text for choice in row.choices)
    return text if spelled else f"{text} One of: {', '.join(row.choices)}."


def mark_given(parser: argparse.ArgumentParser, namespace: argparse.Namespace, args: Iterable[str]) -> None:
    """Note on a parsed namespace which flags were on the command line.

    A flag's default is part of the public interface, so a value alone does not say whether the user chose it.
    The same words are therefore parsed once more, onto a namespace where every flag is unset.

    Args:
        parser: parsed `args` without an error before.
        namespace: gets the attribute ``given``, a frozenset of option names.
        args: the words of the command line.
    """
    unset = object()
    append = {action.dest for action in parser._actions if isinstance(action, argparse._AppendAction)}
    dests = {action.dest for action in parser._actions}
    probe = argparse.Namespace(**{dest: None if dest in append else unset for dest in dests})
    argparse.ArgumentParser.parse_known_args(parser, list(args), probe)
    values = vars(probe)
    namespace.given = frozenset(
        dest for dest in dests if values[dest] is not unset and not (dest in append and values[dest] is None)
    )


def layer(namespace: argparse.Namespace) -> Layer:
    """The given flags as a layer of settings.

    Args:
        namespace: result of parsing; of one built by hand, values that differ from the default count.

    Raises:
        ConfigurationError: values have the wrong type; all of them are named.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name in given_names(namespace):
        row = all_options()[name]
        value = getattr(namespace, name)
        try:
            values[name] = row.read(value, row.flags[0] if row.flags else name)
        except ValueError as error:
            problems.append(str(error))
    refuse_all(problems)
    return Layer(FLAG, values, retired_notes(namespace))


def given_names(namespace: argparse.Namespace) -> list[str]:
    """Names of the options that a namespace sets."""
    marked = getattr(namespace, "given", None)
    if marked is not None:
        return [name for name in all_options() if name in marked]
    held = vars(namespace)
    return [
        name
        for name, row in all_options().items()
        if name in held and held[name] is not None and held[name] != row.flag_default
    ]


def words(settings: Settings, *left_out: str) -> list[str]:
    """Write settings as the flags of a command line; parsing them gives the same settings.

    Args:
        settings: what was decided. Values that nobody gave, secrets, and options without a flag are not
            written.
        left_out: names of further options that are not written.
    """
    return [
        word
        for row, value, _ in settings
        if row.flags and settings.given(row.name) and not row.secret and row.name not in left_out
        for word in _written(row, value)
    ]


def _written(row: Option, value: Any) -> list[str]:
    flag = row.flags[-1]
    if value is None:
        return []
    if row.action == "store_true":
        return [flag] if value else list(row.negations[:1])
    if row.action == "append":
        return [word for part in value for word in (flag, str(part))]
    if row.kind is tuple:
        return [flag, ",".join(str(part) for part in value)]
    return [f"{flag}={row.read(value, flag)}".lower() if row.kind is bool else f"{flag}={value}"]
