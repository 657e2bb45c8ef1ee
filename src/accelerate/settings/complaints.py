"""What a word may have meant that the command line does not know, and whose help to read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from accelerate.base import shown

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
"""Characters: longer ones mean none of the known words."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return which known word another one may mean: a synonym, one spelt alike, or one that it abbreviates.

    Args:
        word: what was written.
        known: what could have been.
    """
    if len(word) > LONGEST_WORD:
        return None
    choices = list(known)
    same = next((row for row in SYNONYMS if word.lower() in row), ())
    found = [choice for choice in choices if choice in same] or _alike(word, choices, 0.8)
    if not found and len(word.lstrip("-")) >= 3:  # shorter ones are like anything
        found = _abbreviated(word, choices) or _alike(word, choices, 0.6)
    return found[0] if found else None


def _alike(word: str, choices: list[str], likeness: float) -> list[str]:
    return difflib.get_close_matches(word.lower(), choices, 1, likeness)


def _abbreviated(word: str, choices: Iterable[str]) -> list[str]:
    """The choices that have a word's letters in their order, the shortest first."""
    letters = re.compile(".*".join(map(re.escape, word)))
    return sorted(filter(letters.match, choices), key=len)


def unknown_command(word: str, known: Iterable[str]) -> str:
    """Return what is said of a command that does not exist.

    Args:
        word: the command.
        known: those that there are.
    """
    names = list(known)
    close = nearest(word, names)
    fix = f"Did you mean {close!r}?" if close else f"There are: {', '.join(names)}."
    return f"there is no command {shown(word)}. {fix}"


def wrong_choice(problem: str, word: object, known: Iterable[object]) -> str:
    """Return what is said of a value that is none of those that can be chosen.

    Args:
        problem: what argparse says.
        word: the value.
        known: what can be chosen.
    """
    close = nearest(str(word), map(str, known))
    return f"{problem}. Did you mean {close!r}?" if close else problem


def unknown_flag(message: str, known: Iterable[str], prog: str) -> str:
    """Return what follows a message on unknown flags.

    Args:
        message: begins like that of argparse.
        known: the flags of the command.
        prog: the command.
    """
    word = next((word for word in message.split() if word.startswith("--")), "").split("=")[0]
    close = nearest(word, known) if word else None
    return f" (did you mean {close}? See {prog} --help)" if close else f" (see {prog} --help)"
