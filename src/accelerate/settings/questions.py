"""Declarations -> the questionnaire: only what applies is asked, and each answer is checked at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accelerate.base import wrong_value
from accelerate.settings.layers import SECTIONS, all_options
from accelerate.settings.option import Option, Section
from accelerate.settings.prompts import Prompt
from accelerate.settings.sections import EXCLUSIVE, PARADIGM_OF_TYPE

ADVANCED = "Go through the advanced settings too?"
NEEDED = ("num_processes", "main_process_ip", "main_process_port", "ec2_instance_type", "iam_role_name")
"""Options that must be answered where they are asked."""
COUNTS = ("num_processes", "num_machines")
"""Options that count something of which there is at least one."""


class Questionnaire:
    """The questions of some sections, asked once.

    Args:
        prompt: asks.
        sections: whose questions, in this order.
        suggested: defaults by option name, instead of the built-in ones.
        offers: by option name: the values that are listed, instead of the declared ones.
        left_out: names of options that are not asked, because `suggested` answers them.
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
        """Ask the usual questions, and the advanced ones if the user wants to see them.

        Returns:
            Option name -> value, of every question that was asked.

        Raises:
            ConfigurationError: on a pipe, an answer is wrong or missing.
        """
        self._walk(advanced=False)
        if self._next(advanced=True) and self._prompt.confirm(ADVANCED, False):
            self._walk(advanced=True)
        return self._asked

    def _walk(self, advanced: bool) -> None:
        while (row := self._next(advanced)) is not None:
            self._answer(row, self._ask(row))

    def _next(self, advanced: bool) -> Option | None:
        """The first question that applies by the answers so far and was not asked yet."""
        for section in self._sections:
            if not section.asked(self._answers):
                continue
            for row in section.options():
                if self._applies(row) and (advanced or not row.advanced):
                    return row
        return None

    def _applies(self, row: Option) -> bool:
        if row.ask is None or row.name in self._asked or row.name in self._left_out:
            return False
        return row.when is None or row.when(self._answers)

    def _answer(self, row: Option, value: Any) -> None:
        self._asked[row.name] = self._answers[row.name] = value
        if row.name == "distributed_type":
            self._answers.update({name: name == PARADIGM_OF_TYPE.get(value) for name in EXCLUSIVE})

    def _ask(self, row: Option) -> Any:
        text, default = str(row.ask), self._answers[row.name]
        if row.kind is bool:
            return self._prompt.confirm(text, bool(default))
        offers = self._offers.get(row.name, row.offers)
        if offers:
            choice = self._prompt.choose(text, offers, str(offers[0] if default is None else default))
            return row.read(choice, row.name)
        answer = self._prompt.write(text, _as_answer(default), lambda text: self._check(row, text))
        return row.read(answer, row.key or row.name) if answer else None

    def _check(self, row: Option, answer: str) -> None:
        """Refuse what cannot be the answer, also in view of the other answers."""
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


def _as_answer(value: Any) -> str:
    if value is None:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def as_mapping(values: Mapping[str, Any]) -> dict[str, Any]:
    """Lay values out as a configuration file does.

    Args:
        values: by option name; options without a key, and values of ``None``, are left out.

    Returns:
        File key -> value, with a mapping for each group.
    """
    mapping: dict[str, Any] = {}
    for section in SECTIONS:
        for row in section.options():
            value = values.get(row.name)
            if row.key is None or value is None:
                continue
            group = mapping.setdefault(section.file_key, {}) if section.file_key else mapping
            group[row.key] = list(value) if isinstance(value, tuple) else value
    return mapping
