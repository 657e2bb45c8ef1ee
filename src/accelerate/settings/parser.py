"""Argument parser of all commands, with dashes or underscores in flags, colored help, and suggestions."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from accelerate.base import environ, itemized, shortened, shown

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

LONGEST_LINE = 1000
"""Characters of one line of an error."""

options_to_group = {
    "multi_gpu": "Distributed GPUs",
    "tpu": "TPU",
    "use_deepspeed": "DeepSpeed Arguments",
    "use_fsdp": "FSDP Arguments",
    "use_megatron_lm": "Megatron-LM Arguments",
    "fp8_backend": "FP8 Arguments",
}
"""Flag -> heading of the flags that only matter with it."""

BOLD, CYAN, YELLOW, PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[33m", "\x1b[0m"
HEADING = re.compile(r"^(usage:|\S[^\n]*:)(?=$| )", re.MULTILINE)
FLAG_WORD = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
VALUE = re.compile(r"(?<=[\w,]) ([A-Z][A-Z_]+)(?=$|[ ,])")
INVOCATION = re.compile(r"^  -[^\n]*?(?=  |$)", re.MULTILINE)

SYNONYMS = (
    ("fp32", "float32", "float", "no"),
    ("fp16", "float16", "half"),
    ("bf16", "bfloat16"),
    ("fp8", "float8"),
    ("int8", "8bit", "8-bit"),
    ("int4", "4bit", "4-bit"),
)
"""Words for the same thing, of which each option takes one."""

LONGEST_WORD = 100
"""Maximum length of words for which a suggestion is made, in characters."""

_WRONG = object()
"""Replaces the value of a flag that could not be read."""

_UNKNOWN = "unrecognized arguments:"
"""Beginning of the argparse message for unknown arguments."""

_SPELLING = re.compile(r"--[a-z0-9]+(_[a-z0-9]+)+$")


def clean_option(option: str) -> str:
    """Removes the dashes from a flag, such as ``multi_gpu`` from ``--multi-gpu``."""
    return option.lstrip("-").replace("-", "_")


class _BothSpellings(argparse._ActionsContainer):
    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Adds an argument as argparse does, with the dash form of each long flag."""
        dashed = (f"--{flag[2:].replace('_', '-')}" for flag in args if _SPELLING.match(flag))
        return super().add_argument(*dict.fromkeys((*args, *dashed)), **kwargs)


class CustomArgumentGroup(_BothSpellings, argparse._ArgumentGroup):
    """Argument group whose flags accept underscores or dashes."""


class CustomArgumentParser(_BothSpellings, argparse.ArgumentParser):
    """Parser whose flags accept underscores or dashes, and that suggests flags for unknown ones."""

    # Newer versions of argparse add colors, which are always disabled here.
    color = property(lambda self: False, lambda self, value: None)
    _words: Sequence[str] = ()

    def add_argument_group(self, *args: Any, **kwargs: Any) -> argparse._ArgumentGroup:
        """Adds a group as argparse does, which also adds dash forms."""
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group

    def parse_args(self, args: Iterable[str] | None = None, namespace: object = None) -> Any:
        """Parses as argparse does, and stores the arguments to name the command in errors."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_args(self._words, namespace)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: object = None) -> Any:
        """Parses as argparse does, and reports all invalid values in one message."""
        self._wrong: list[str] = []
        parsed = super().parse_known_args(args, namespace)
        if self._wrong:
            self.error(itemized(self._wrong, "flags are wrong"))
        return parsed

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
            self._wrong.append(str(error).replace(repr(arg_string), shown(arg_string)))
            return _WRONG

    def _check_value(self, action: argparse.Action, value: object) -> None:
        try:
            if value is not _WRONG:
                super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if isinstance(action, argparse._SubParsersAction):
                self.error(unknown_command(str(value), action.choices))
            problem = str(error).replace(repr(str(value)), shown(str(value)))  # argparse shows it whole
            self._wrong.append(wrong_choice(problem, value, action.choices or ()))

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Prints the help, in color on a terminal."""
        stream = file or sys.stdout
        text = self.format_help()
        stream.write(colored(text) if wants_color(stream, environ.current()) else text)

    def error(self, message: str) -> NoReturn:
        """Prints one line with the error and a suggestion for a misspelled flag, and exits with status 2."""
        prog, hint = self.prog, f" (see {self.prog} --help)"
        if message.startswith(_UNKNOWN):
            command = _command_of(self, self._words)
            prog, hint = command.prog, unknown_flag(message, _all_flags(command), command.prog)
        short = "\n".join(shortened(line, LONGEST_LINE) for line in message.split("\n"))
        self.exit(2, f"{prog}: error: {short}{hint}\n")


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of the subcommands of a parser by name."""
    groups = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: child for group in groups for name, child in group.choices.items()}


def _command_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    children = subcommands(parser)
    for index, word in enumerate(words):
        if word in children:
            return _command_of(children[word], words[index + 1 :])
    return parser


def _all_flags(parser: argparse.ArgumentParser) -> list[str]:
    nested = (flag for child in subcommands(parser).values() for flag in _all_flags(child))
    return [*parser._option_string_actions, *nested]


class OneSpellingFormatter(argparse.HelpFormatter):
    """Help formatter that shows one form of each flag and its value once."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        flags = [flag for flag in action.option_strings if "-" not in flag.lstrip("-")]
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return f"{', '.join(flags or action.option_strings)}{value}"


class CustomHelpFormatter(OneSpellingFormatter):
    """Help formatter that hides the groups of strategies that are not on the command line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        chosen = {clean_option(word.split("=")[0]) for word in sys.argv[1:] if word.startswith("--")}
        self.titles = {options_to_group[name] for name in options_to_group if name in chosen}
        self._hidden = set(options_to_group.values()) - self.titles if self.titles else set()

    def add_argument(self, action: argparse.Action) -> None:
        """Adds the help of a flag unless its group is hidden."""
        if self._current_section.heading not in self._hidden:
            super().add_argument(action)

    def add_usage(self, *args: Any, **kwargs: Any) -> None:
        """Shows the short usage, because there are more than a hundred flags."""
        prog = self._prog
        super().add_usage(f"{prog} [options] script [arguments of the script]", (), (), *args[3:], **kwargs)


def wants_color(stream: object, environ: Mapping[str, str]) -> bool:
    """Returns whether text on a stream may be colored, which `NO_COLOR` and `TERM=dumb` disable."""
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    return bool(getattr(stream, "isatty", lambda: False)())


def colored(text: str) -> str:
    """Colors a help text, with bold headings, cyan flags, and yellow values."""
    text = INVOCATION.sub(lambda match: VALUE.sub(rf" {YELLOW}\1{PLAIN}", match[0]), text)
    text = FLAG_WORD.sub(lambda match: f"{CYAN}{match[0]}{PLAIN}", text)
    return HEADING.sub(lambda match: f"{BOLD}{match[0]}{PLAIN}", text)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the known word that `word` may mean, a synonym, a similar one, or one that it abbreviates."""
    if len(word) > LONGEST_WORD:
        return None
    choices = list(known)
    same = next((row for row in SYNONYMS if word.lower() in row), ())
    close = [choice for choice in choices if choice in same]
    close = close or difflib.get_close_matches(word.lower(), choices, 1, 0.8)
    if not close and len(word.lstrip("-")) >= 3:  # shorter words are similar to any
        letters = re.compile(".*".join(map(re.escape, word)))  # in their order
        close = sorted(filter(letters.match, choices), key=len)
        close = close or difflib.get_close_matches(word.lower(), choices, 1, 0.6)
    return close[0] if close else None


def unknown_command(word: str, known: Iterable[str]) -> str:
    """Returns the message for a command that does not exist."""
    names = list(known)
    close = nearest(word, names)
    fix = f"Did you mean {close!r}?" if close else f"There are: {', '.join(names)}."
    return f"there is no command {shown(word)}. {fix}"


def wrong_choice(problem: str, word: object, known: Iterable[object]) -> str:
    """Returns the argparse message for an invalid value, with the known value that it may mean."""
    close = nearest(str(word), map(str, known))
    return f"{problem}. Did you mean {close!r}?" if close else problem


def unknown_flag(message: str, known: Iterable[str], prog: str) -> str:
    """Returns the hint after the argparse message for unknown flags of the command `prog`."""
    word = next((word for word in message.split() if word.startswith("--")), "").split("=")[0]
    close = nearest(word, known) if word else None
    return f" (did you mean {close}? See {prog} --help)" if close else f" (see {prog} --help)"
