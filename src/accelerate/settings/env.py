"""Settings <-> environment variables: the contract between launcher and worker.

`encode` runs in the launcher, `decode` and `read` in the worker; all are loops over the same declarations,
so a value written by one is read by the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accelerate.settings.merge import ENVIRONMENT, Layer, Settings
from accelerate.settings.option import Option, Section
from accelerate.settings.section_list import SECTIONS
from accelerate.settings.variables import decode as decode, read as read


def encode(settings: Settings, sections: Iterable[type[Section]] = SECTIONS) -> dict[str, str]:
    """Write the variables that the workers read.

    Args:
        settings: what was decided.
        sections: only these; a section that is not active writes nothing.
    """
    written: dict[str, str] = {}
    for section in sections:
        if not section.active(settings.values):
            continue
        for row in section.options():
            written.update(_spell(row, settings.values[row.name]))
    return written


def _spell(row: Option, value: Any) -> dict[str, str]:
    parts = value if len(row.variables) > 1 else (value,) * len(row.variables)
    spelled = {name: row.spell(part) for name, part in zip(row.variables, parts, strict=True)}
    return {name: text for name, text in spelled.items() if text is not None}


def layer(environ: Mapping[str, str]) -> Layer:
    """The environment as a layer of the launcher's settings."""
    return Layer(ENVIRONMENT, read(environ, SECTIONS))
