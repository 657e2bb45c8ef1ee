"""List of all sections, and their values, merged from layers that record the source of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from accelerate.settings import sections
from accelerate.settings.option import Option, Section

S = TypeVar("S", bound=Section)

SECTIONS: tuple[type[Section], ...] = (
    sections.LaunchSection,
    sections.PrecisionSection,
    sections.DynamoSection,
    sections.RendezvousSection,
    sections.TpuSection,
    sections.DeepSpeedSection,
    sections.FsdpSection,
    sections.MegatronSection,
    sections.Fp8Section,
    sections.SageMakerSection,
    sections.MpirunSection,
    sections.SlurmSection,
    sections.StoppingSection,
    sections.RecoverySection,
    sections.ParallelismSection,
    sections.PipelineSection,
    sections.ContextParallelSection,
    sections.SequenceParallelSection,
    sections.DiagnosticsSection,
)
"""In the order of the help and of the documentation."""

BUILT_IN = "built-in"
ENVIRONMENT = "environment"
FLAG = "flag"


@dataclass(frozen=True)
class Layer:
    """Typed values from one source by option name."""

    source: str  # "flag", "environment", or the path of a configuration file
    values: Mapping[str, Any]  # only those that the source sets
    notes: tuple[str, ...] = ()  # what the user should know about how the source was read


@cache
def all_options() -> Mapping[str, Option]:
    """Returns every option of every section by its name."""
    return {row.name: row for section in SECTIONS for row in section.options()}


@dataclass(frozen=True, eq=False)
class Settings:
    """Value and source of every option, where ``settings[DynamoSection].dynamo_mode`` is typed."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]  # of the values that a layer gives
    notes: tuple[str, ...] = ()

    def __getitem__(self, section: type[S]) -> S:
        """Returns the section as an object."""
        return section(**{row.name: self.values[row.name] for row in section.options()})

    def source(self, name: str) -> str:
        """Returns the source of the value of an option, which is "built-in" if no layer sets it."""
        return self.sources.get(name, BUILT_IN)

    def given(self, name: str) -> bool:
        """Returns whether a layer sets a value."""
        return name in self.sources

    def replaced(self, source: str, **values: Any) -> Settings:
        """Returns the settings with some values replaced, and `source` as their source."""
        sources = {**self.sources, **dict.fromkeys(values, source)}
        return replace(self, values={**self.values, **values}, sources=sources)

    def noted(self, note: str) -> Settings:
        """Returns the settings with an additional line for the user."""
        return replace(self, notes=(*self.notes, note))

    def __iter__(self) -> Iterator[tuple[Option, Any, str]]:
        """Yields every option with its value and source, in the order of declaration."""
        for name, row in all_options().items():
            yield row, self.values[name], self.source(name)


def merge_layers(*layers: Layer) -> Settings:
    """Merges layers over the built-in values, where a later layer takes precedence.

    A layer that names a strategy (``multi_gpu``, ``use_fsdp``, ...) also drops those named by weaker
    layers, so that a flag can leave what a file chose.
    """
    values = {name: row.default for name, row in all_options().items()}
    sources: dict[str, str] = {}
    for layer in layers:
        given = dict(layer.values)
        if any(given.get(name) for name in sections.EXCLUSIVE):
            given = {**dict.fromkeys(sections.EXCLUSIVE, False), **given}
        values.update(given)
        sources.update(dict.fromkeys(given, layer.source))
    return Settings(values, sources, tuple(note for layer in layers for note in layer.notes))
