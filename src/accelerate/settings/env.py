"""Settings <-> environment variables: the contract between launcher and worker.

`encode` runs in the launcher, `decode` and `read` in the worker; all are loops over the same declarations,
so a value written by one is read by the other. A worker reads single sections and loads no others: what only
the launcher needs is imported in its functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.base import read_flag
from accelerate.settings.option import Option, Section, refuse_all

if TYPE_CHECKING:
    from accelerate.settings.layers import Layer, Settings

S = TypeVar("S", bound=Section)


def encode(settings: Settings, sections: Iterable[type[Section]] | None = None) -> dict[str, str]:
    """Write the variables that the workers read.

    Args:
        settings: what was decided.
        sections: only these; default: all. A section that is not active writes nothing.
    """
    from accelerate.settings.layers import SECTIONS

    written: dict[str, str] = {}
    for section in SECTIONS if sections is None else sections:
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
    from accelerate.settings.layers import ENVIRONMENT, SECTIONS, Layer

    return Layer(ENVIRONMENT, read(environ, SECTIONS))


def decode(section: type[S], environ: Mapping[str, str]) -> S:
    """Read a section from the environment; what is not set has its built-in value.

    Args:
        section: a class of `settings.sections`.
        environ: this process's variables.

    Raises:
        ConfigurationError: variables hold values that cannot be; all of them are named.
    """
    return section(**read(environ, (section,)))


def read(environ: Mapping[str, str], sections: Iterable[type[Section]]) -> dict[str, Any]:
    """Read only those options that the environment sets.

    Args:
        environ: variables of this process.
        sections: which ones.

    Returns:
        Option name -> value.

    Raises:
        ConfigurationError: variables hold values that cannot be; all of them are named.
    """
    values, problems = read_with_problems(environ, sections)
    refuse_all(problems)
    return values


def read_with_problems(
    environ: Mapping[str, str], sections: Iterable[type[Section]]
) -> tuple[dict[str, Any], list[str]]:
    """Read as `read` does, and return what is wrong instead of raising it.

    Args:
        environ: variables of this process.
        sections: which ones.

    Returns:
        Option name -> value, and a line for each variable whose value cannot be.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for section in sections:
        for row in section.options():
            try:
                values.update(_value_of(row, environ))
            except ValueError as error:
                problems += [] if row.foreign else [str(error)]
    return values, problems


def _value_of(row: Option, environ: Mapping[str, str]) -> dict[str, Any]:
    if len(row.variables) > 1:
        return _tuple_of(row, environ)
    for variable in (*row.variables, *row.aliases):
        text = environ.get(variable, "")
        if text and not (text == "None" and row.default is None):
            return {row.name: row.read(text, variable)}
    return {}


def _tuple_of(row: Option, environ: Mapping[str, str]) -> dict[str, Any]:
    present = [variable for variable in row.variables if environ.get(variable)]
    if not present:
        return {}
    defaults = dict(zip(row.variables, row.default, strict=True))
    return {row.name: tuple(read_flag(environ, variable, defaults[variable]) for variable in row.variables)}
