"""Conversion between sections and command-line flags, and detection of the flags that the user has passed."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from accelerate.settings.layers import FLAG, SECTIONS, Layer, Settings, all_options
from accelerate.settings.option import Option, refuse_all
from accelerate.settings.parser import CustomArgumentParser
from accelerate.settings.sections import GENERAL

RETIRED = {
    "ipex": "Intel Extension for PyTorch is no longer used",
    "use_xpu": "an XPU is used when there is one",
}
"""Flags of older versions that are accepted and mean nothing now -> why."""

METAVARS = {bool: "BOOL", int: "N", float: "X", str: "TEXT", tuple: "TEXT"}


def add_sections(parser: CustomArgumentParser) -> None:
    """Adds the flags of all options under the headings of their sections, and those of older versions."""
    for name in RETIRED:
        parser.add_argument(f"--{name}", action="store_true", default=None, help=argparse.SUPPRESS)
    groups: dict[str, Any] = {GENERAL: parser}
    for section in SECTIONS:
        for row in section.options():
            if not row.flags:
                continue
            if row.group not in groups:
                groups[row.group] = parser.add_argument_group(row.group)
            groups[row.group].add_argument(*row.flags, **_arguments(row))
            for flag in row.negations:
                no = {"action": "store_const", "const": False, "default": True}
                groups[row.group].add_argument(flag, **no, dest=row.name, help=f"Not {row.flags[0]}.")


def _arguments(row: Option) -> dict[str, Any]:
    text = row.help.replace("%", "%%")
    if not all(choice in text for choice in row.choices):
        text += f" One of: {', '.join(row.choices)}."
    arguments = {"action": row.action, "default": row.flag_default, "dest": row.name, "help": text}
    if row.action.startswith("store_"):
        return arguments
    if row.action != "append" and row.choices:
        return {**arguments, "type": row.flag_type, "choices": row.choices, "metavar": "NAME"}
    return {**arguments, "type": row.flag_type, "metavar": METAVARS[row.kind]}


def mark_given(parser: argparse.ArgumentParser, namespace: argparse.Namespace, args: Iterable[str]) -> None:
    """Sets ``namespace.given`` to a frozenset of the option names whose flags are in `args`.

    A flag's default is part of the public interface, so a value alone does not say whether the user chose it.
    The words, which `parser` has parsed without an error, are therefore parsed once more, onto a namespace
    where every flag is unset.
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
    """Returns the passed flags as a layer.

    Of a namespace created by hand, it contains the values that differ from the default.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    given = getattr(namespace, "given", None)
    for name, row in all_options().items():
        value = getattr(namespace, name, None)
        if value in (None, row.flag_default) if given is None else name not in given:
            continue
        try:
            where = next((flag for flag in row.flags if flag.startswith("--")), name)
            values[name] = row.read(value, where)
        except ValueError as error:
            problems.append(str(error))
    refuse_all(problems)
    retired = (name for name in RETIRED if getattr(namespace, name, None))
    return Layer(FLAG, values, tuple(f"--{name} has no effect: {RETIRED[name]}" for name in retired))


def words(settings: Settings, *left_out: str) -> list[str]:
    """Returns settings as the flags of a command line that parses to the same settings.

    Built-in values, secrets, options without a flag and the options `left_out` are not written.
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
