"""Questionnaire over the declared options, with prompts on a terminal or as plain lines.

Only what applies is asked, and each answer is checked at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from accelerate.base import ConfigurationError, wrong_value
from accelerate.settings.layers import SECTIONS, all_options
from accelerate.settings.option import Option, Section
from accelerate.settings.sections import EXCLUSIVE, PARADIGM_OF_TYPE

Check = Callable[[str], object]
"""Raises a `ConfigurationError` for a text that cannot be an answer."""


@dataclass
class LinePrompt:
    """Prompt that prints questions to `target` and reads answers from the lines of `source`.

    An empty line takes the default. A wrong answer, or the end of the input, is a `ConfigurationError`: what
    follows on a pipe was written as the answers to other questions.
    """

    source: TextIO
    target: TextIO

    def say(self, text: str) -> None:
        print(text, file=self.target)

    def choose(self, text: str, offers: Sequence[str], default: str) -> str:
        """Asks for one of several values, in any case of letters."""
        answer = self._read(f"{text} [{'/'.join(offers)}]", default)
        for offer in offers:
            if offer.lower() == answer.lower():
                return offer
        raise ConfigurationError(
            f"{text} {answer!r} is not among the answers. Answer with one of {', '.join(offers)}."
        )

    def confirm(self, text: str, default: bool) -> bool:
        """Asks for yes or no."""
        answer = self._read(text, "yes" if default else "no").lower()
        if answer not in ("yes", "y", "true", "1", "no", "n", "false", "0"):
            raise ConfigurationError(f"{text} {answer!r} is neither yes nor no. Answer yes or no.")
        return answer in ("yes", "y", "true", "1")

    def write(self, text: str, default: str, check: Check) -> str:
        """Asks for a text that `check` accepts."""
        answer = self._read(text, default)
        check(answer)
        return answer

    def _read(self, text: str, default: str) -> str:
        print(f"{text}{f' ({default})' if default else ''}: ", end="", file=self.target, flush=True)
        line = self.source.readline()
        print(file=self.target)
        if not line:
            raise ConfigurationError(
                f"The input ended before the question {text!r} was answered. Give one line for each question "
                f"(an empty one takes the default), or use `accelerate config default`, which asks nothing."
            )
        return line.strip() or default


class TerminalPrompt:
    """Prompt with arrow keys, which checks answers before it accepts them."""

    def say(self, text: str) -> None:
        print(text)

    def choose(self, text: str, offers: Sequence[str], default: str) -> str:
        default_offer = default if default in offers else None
        return str(_ask_on_terminal("select", text, choices=list(offers), default=default_offer))

    def confirm(self, text: str, default: bool) -> bool:
        return bool(_ask_on_terminal("confirm", text, default=default))

    def write(self, text: str, default: str, check: Check) -> str:
        def validate(answer: str) -> bool | str:
            try:
                check(answer.strip())
            except ConfigurationError as error:
                return str(error)
            return True

        return str(_ask_on_terminal("text", text, default=default, validate=validate)).strip()


def _ask_on_terminal(kind: str, text: str, **arguments: Any) -> Any:
    """Asks a question with questionary, where Ctrl-D ends the questionnaire as Ctrl-C does."""
    import questionary

    try:
        return getattr(questionary, kind)(text, **arguments).unsafe_ask()
    except EOFError:
        raise KeyboardInterrupt from None


Prompt = LinePrompt | TerminalPrompt


def prompt_of_this_process() -> Prompt:
    """Returns a terminal prompt if input and output are a terminal, or else a line prompt."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return TerminalPrompt()
    return LinePrompt(sys.stdin, sys.stdout)


ADVANCED = "Go through the advanced settings too?"
NEEDED = ("num_processes", "main_process_ip", "main_process_port", "ec2_instance_type", "iam_role_name")
"""Options that must be answered where they are asked."""
COUNTS = ("num_processes", "num_machines")
"""Options that count something of which there is at least one."""


class Questionnaire:
    """Questions of sections, each asked once in order.

    By option name, `suggested` has defaults instead of the built-in ones, and `offers` the values that are
    listed instead of the declared ones; `left_out` are not asked, because `suggested` answers them.
    """

    def __init__(
        self,
        prompt: Prompt,
        sections: Iterable[type[Section]] = SECTIONS,
        suggested: Mapping[str, Any] | None = None,
        offers: Mapping[str, tuple[str, ...]] | None = None,
        left_out: Iterable[str] = (),
    ) -> None:
        self._prompt = prompt
        self._sections = tuple(sections)
        self._offers = offers or {}
        self._left_out = frozenset(left_out)
        self._answers = {name: row.default for name, row in all_options().items()} | dict(suggested or {})
        self._asked: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Asks the usual questions, and optionally the advanced ones, and returns the answers."""
        self._walk(advanced=False)
        if self._next(advanced=True) and self._prompt.confirm(ADVANCED, False):
            self._walk(advanced=True)
        return self._asked

    def _walk(self, advanced: bool) -> None:
        while (row := self._next(advanced)) is not None:
            value = self._asked[row.name] = self._answers[row.name] = self._ask(row)
            if row.name == "distributed_type":
                self._answers.update({name: name == PARADIGM_OF_TYPE.get(value) for name in EXCLUSIVE})

    def _next(self, advanced: bool) -> Option | None:
        """Returns the next unasked question that applies to the answers so far."""
        sections = (section for section in self._sections if section.asked(self._answers))
        rows = (row for section in sections for row in section.options())
        return next((row for row in rows if self._applies(row) and (advanced or not row.advanced)), None)

    def _applies(self, row: Option) -> bool:
        if row.ask is None or row.name in self._asked or row.name in self._left_out:
            return False
        return row.when is None or row.when(self._answers)

    def _ask(self, row: Option) -> Any:
        text, default = str(row.ask), self._answers[row.name]
        if row.kind is bool:
            return self._prompt.confirm(text, bool(default))
        offers = self._offers.get(row.name, row.offers)
        if offers:
            choice = self._prompt.choose(text, offers, str(offers[0] if default is None else default))
            return row.read(choice, row.name)
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        written = "" if default is None else str(default)
        answer = self._prompt.write(text, written, lambda text: self._check(row, text))
        return row.read(answer, row.key or row.name) if answer else None

    def _check(self, row: Option, answer: str) -> None:
        """Raises an error for an invalid answer, also in combination with other answers."""
        where = row.key or row.name
        if not answer:
            if row.name in NEEDED:
                raise wrong_value(where, answer, "this needs an answer", "Write one")
            return
        value = row.read(answer, where)
        if row.name in COUNTS and value < 1:
            raise wrong_value(where, value, "there is at least one", "Write 1 or more")
        last = self._answers["num_machines"] - 1
        if row.name == "machine_rank" and not 0 <= value <= last:
            raise wrong_value(where, value, f"ranks of machines go from 0 to {last}", "Write one of these")


def as_mapping(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by option name in the format of a configuration file, without ``None``."""
    mapping: dict[str, Any] = {}
    for section in SECTIONS:
        for row in section.options():
            value = values.get(row.name)
            if row.key is None or value is None:
                continue
            group = mapping.setdefault(section.file_key, {}) if section.file_key else mapping
            group[row.key] = list(value) if isinstance(value, tuple) else value
    return mapping
