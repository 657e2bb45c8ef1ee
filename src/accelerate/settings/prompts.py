"""How a question reaches the user: arrow keys on a terminal, plain lines from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from accelerate.base import ConfigurationError

Check = Callable[[str], object]
"""Raises a `ConfigurationError` for a text that cannot be an answer."""


class LinePrompt:
    """Plain lines: the question is printed, and the next line of the input is the answer.

    An empty line takes the default. A wrong answer ends the questionnaire: what follows on a pipe was written
    as the answers to other questions.

    Args:
        source: where answers are read.
        target: where questions are printed.
    """

    def __init__(self, source: TextIO, target: TextIO) -> None:
        self._source = source
        self._target = target

    def say(self, text: str) -> None:
        """Print a line that is no question."""
        print(text, file=self._target)

    def choose(self, text: str, offers: Sequence[str], default: str) -> str:
        """Ask for one of several values, in any case of letters.

        Raises:
            ConfigurationError: the answer is none of them, or the input ended.
        """
        answer = self._read(f"{text} [{'/'.join(offers)}]", default)
        for offer in offers:
            if offer.lower() == answer.lower():
                return offer
        raise ConfigurationError(
            f"{text} {answer!r} is not among the answers. Answer with one of {', '.join(offers)}."
        )

    def confirm(self, text: str, default: bool) -> bool:
        """Ask for yes or no.

        Raises:
            ConfigurationError: the answer is neither, or the input ended.
        """
        answer = self._read(text, "yes" if default else "no").lower()
        if answer not in YES_OR_NO:
            raise ConfigurationError(f"{text} {answer!r} is neither yes nor no. Answer yes or no.")
        return YES_OR_NO[answer]

    def write(self, text: str, default: str, check: Check) -> str:
        """Ask for a text.

        Raises:
            ConfigurationError: `check` refuses it, or the input ended.
        """
        answer = self._read(text, default)
        check(answer)
        return answer

    def _read(self, text: str, default: str) -> str:
        print(f"{text}{f' ({default})' if default else ''}: ", end="", file=self._target, flush=True)
        line = self._source.readline()
        if not line:
            print(file=self._target)
            raise ConfigurationError(
                f"The input ended before the question {text!r} was answered. Give one line for each question "
                f"(an empty one takes the default), or use `accelerate config default`, which asks nothing."
            )
        print(file=self._target)
        return line.strip() or default


YES_OR_NO = {
    "yes": True,
    "y": True,
    "true": True,
    "1": True,
    "no": False,
    "n": False,
    "false": False,
    "0": False,
}


class TerminalPrompt:
    """Lists with arrow keys, and answers that are checked before they are accepted."""

    def say(self, text: str) -> None:
        """Print a line that is no question."""
        print(text)

    def choose(self, text: str, offers: Sequence[str], default: str) -> str:
        """Ask for one of several values."""
        import questionary

        marked = default if default in offers else None
        return str(_answer(questionary.select(text, choices=list(offers), default=marked)))

    def confirm(self, text: str, default: bool) -> bool:
        """Ask for yes or no."""
        import questionary

        return bool(_answer(questionary.confirm(text, default=default)))

    def write(self, text: str, default: str, check: Check) -> str:
        """Ask for a text, again until `check` accepts it."""
        import questionary

        def validate(answer: str) -> bool | str:
            try:
                check(answer.strip())
            except ConfigurationError as error:
                return str(error)
            return True

        return str(_answer(questionary.text(text, default=default, validate=validate))).strip()


def _answer(question: Any) -> Any:
    """Ask; Ctrl-D ends the questionnaire as Ctrl-C does."""
    try:
        return question.unsafe_ask()
    except EOFError:
        raise KeyboardInterrupt from None


Prompt = LinePrompt | TerminalPrompt


def prompt_of_this_process() -> Prompt:
    """The terminal when both ends are one, else plain lines."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return TerminalPrompt()
    return LinePrompt(sys.stdin, sys.stdout)
