"""Sections -> command-line flags: both spellings, help by paradigm, and which flags were really given."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from accelerate.base import environ, shortened, shown
from accelerate.settings import complaints
from accelerate.settings.coloring import colored, wants_color
from accelerate.settings.merge import FLAG, Layer, Settings, all_options
from accelerate.settings.option import Option, Section, refuse_all
from accelerate.settings.section_list import SECTIONS
from accelerate.settings.sections import GENERAL

LONGEST_LINE = 1000
"""Characters of one line of an error."""
FORMAT = "%(message)s"

options_to_group = {
    "multi_gpu": "Distributed GPUs",
    "tpu": "TPU",
    "use_deepspeed": "DeepSpeed Arguments",
    "use_fsdp": "FSDP Arguments",
    "use_megatron_lm": "Megatron-LM Arguments",
    "fp8_backend": "FP8 Arguments",
}
"""Flag -> heading of the flags that only matter with it."""

_WRONG = object()
"""Stands for the value of a flag that could not be read."""

_UNKNOWN = "unrecognized arguments:"
"""How argparse begins a message on words that it does not know."""

_SPELLING = re.compile(r"--[a-z0-9]+(_[a-z0-9]+)+$")


def clean_option(option: str) -> str:
    """Take the dashes off a flag: ``--multi-gpu`` -> ``multi_gpu``."""
    return option.lstrip("-").replace("-", "_")


def _both_spellings(flags: tuple[str, ...]) -> tuple[str, ...]:
    dashed = (f"--{flag[2:].replace('_', '-')}" for flag in flags if _SPELLING.match(flag))
    return tuple(dict.fromkeys((*flags, *dashed)))


class CustomArgumentGroup(argparse._ArgumentGroup):
    """A group whose flags can be written with underscores or dashes."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """As in argparse, with the dash form of each long flag added."""
        return super().add_argument(*_both_spellings(args), **kwargs)


class CustomArgumentParser(argparse.ArgumentParser):
    """A parser whose flags take underscores or dashes, and that suggests what a wrong one may mean."""

    # Newer versions of argparse would colour too: whatever they set, it stays off.
    color = property(lambda self: False, lambda self, value: None)
    _words: Sequence[str] = ()

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """As in argparse, with the dash form of each long flag added."""
        return super().add_argument(*_both_spellings(args), **kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> argparse._ArgumentGroup:
        """As in argparse; the group too adds dash forms."""
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse; the words are kept, since they tell which command speaks of an error."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_args(self._words, namespace)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, with all wrong values in one message and not the first alone."""
        self._wrong: list[str] = []
        found = super().parse_known_args(args, namespace)
        if self._wrong:
            self.error(_listed(self._wrong))
        return found

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Some versions of argparse drop the value of `--flag=--` and go on with a list of nothing.
        if arg_strings == ["--"] and action.option_strings and action.nargs is None:
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            self._wrong.append(_with_short(arg_string, str(error)))
            return _WRONG

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            if value is not _WRONG:
                super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if isinstance(action, argparse._SubParsersAction):
                self.error(complaints.unknown_command(value, action.choices))
            problem = _with_short(str(value), str(error))
            self._wrong.append(complaints.wrong_choice(problem, value, action.choices or ()))

    def print_help(self, file: Any = None) -> None:
        """Print the help, with colours where it is read on a terminal."""
        stream = file or sys.stdout
        text = self.format_help()
        stream.write(colored(text) if wants_color(stream, environ.current()) else text)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, with a suggestion for a misspelt flag, and exit with status 2."""
        speaker, hint = self.prog, f" (see {self.prog} --help)"
        if message.startswith(_UNKNOWN):
            asked = _asked(self, self._words)
            speaker, hint = asked.prog, complaints.unknown_flag(message, _all_flags(asked), asked.prog)
        short = "\n".join(shortened(line, LONGEST_LINE) for line in message.split("\n"))
        self.exit(2, f"{speaker}: error: {short}{hint}\n")


def _asked(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that words name."""
    below = next(
        (action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None
    )
    place = next((place for place, word in enumerate(words) if below and word in below.choices), None)
    if below is None or place is None:
        return parser
    return _asked(below.choices[words[place]], words[place + 1 :])


def _with_short(value: str, problem: str) -> str:
    """What argparse says of a value, which it shows whole."""
    return problem.replace(repr(value), shown(value))


def _listed(problems: list[str]) -> str:
    """One problem as it is, and several below each other."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} flags are wrong:", *(f"  - {problem}" for problem in problems)])


def _all_flags(parser: argparse.ArgumentParser) -> list[str]:
    """The flags of a parser and of its subcommands."""
    groups = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    below = (flag for group in groups for child in group.choices.values() for flag in _all_flags(child))
    return [*parser._option_string_actions, *below]


class OneSpellingFormatter(argparse.HelpFormatter):
    """Help that shows each flag in one spelling, and its value once."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shown = [
            flag for flag in action.option_strings if "-" not in flag.lstrip("-")
        ] or action.option_strings
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return f"{', '.join(shown)}{value}"


class CustomHelpFormatter(OneSpellingFormatter):
    """Help that leaves out the groups of ways of training other than the one named on the command line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        chosen = {clean_option(word.split("=")[0]) for word in sys.argv[1:] if word.startswith("--")}
        self.titles = {options_to_group[name] for name in options_to_group if name in chosen}
        self._hidden = set(options_to_group.values()) - self.titles if self.titles else set()

    def add_argument(self, action: argparse.Action) -> None:
        """Add a flag's help, unless its group is left out."""
        if self._current_section.heading not in self._hidden:
            super().add_argument(action)

    def add_usage(self, *args: Any, **kwargs: Any) -> None:
        """Show the short usage: more than a hundred flags help nobody there."""
        prog = self._prog
        super().add_usage(f"{prog} [options] script [arguments of the script]", (), (), *args[3:], **kwargs)


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
