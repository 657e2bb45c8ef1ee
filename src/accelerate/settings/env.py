"""Conversion between settings and the environment variables that pass them from launcher to workers.

`encode` runs in the launcher, `decode` and `read` in the worker; all are loops over the same declarations,
so a value written by one is read by the other. A worker reads single sections and loads no others: what only
the launcher needs is imported in its functions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.base import read_flag, whole_number, wrong_value
from accelerate.settings.option import Option, Section, refuse_all

if TYPE_CHECKING:
    from accelerate.settings.layers import Layer, Settings

S = TypeVar("S", bound=Section)


def encode(settings: Settings, sections: Iterable[type[Section]] | None = None) -> dict[str, str]:
    """Returns the variables that the workers read, for some or all active sections."""
    from accelerate.settings.layers import SECTIONS

    variables: dict[str, str] = {}
    for section in SECTIONS if sections is None else sections:
        if not section.active(settings.values):
            continue
        for row in section.options():
            value = settings.values[row.name]
            parts = value if len(row.variables) > 1 else (value,) * len(row.variables)
            encoded = ((name, row.encode(part)) for name, part in zip(row.variables, parts, strict=True))
            variables.update((name, text) for name, text in encoded if text is not None)
    return variables


def layer(environ: Mapping[str, str]) -> Layer:
    """Returns the environment as a layer of the settings of the launcher."""
    from accelerate.settings.layers import ENVIRONMENT, SECTIONS, Layer

    return Layer(ENVIRONMENT, read(environ, SECTIONS))


def decode(section: type[S], environ: Mapping[str, str]) -> S:
    """Reads a section from the environment, with built-in values for unset variables."""
    return section(**read(environ, (section,)))


def read(environ: Mapping[str, str], sections: Iterable[type[Section]]) -> dict[str, Any]:
    """Returns the values of those options that the environment sets, by option name."""
    values, problems = read_with_problems(environ, sections)
    if problems:
        refuse_all(problems)
    return values


def read_fields(environ: Mapping[str, str], *sections: type[Section]) -> dict[str, Any]:
    """Returns the values of those options that the environment sets, by the field of the plugin."""
    values = read(environ, sections)
    rows = (row for section in sections for row in section.options())
    return {row.field: values[row.name] for row in rows if row.name in values}


def read_with_problems(
    environ: Mapping[str, str], sections: Iterable[type[Section]]
) -> tuple[dict[str, Any], list[str]]:
    """Reads as `read` does, and returns a line for each invalid variable instead of raising an error."""
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
    if len(row.variables) > 1:  # one for each element
        if not any(environ.get(variable) for variable in row.variables):
            return {}
        defaults = zip(row.variables, row.default, strict=True)
        return {row.name: tuple(read_flag(environ, variable, default) for variable, default in defaults)}
    for variable in (*row.variables, *row.aliases):
        text = environ.get(variable, "")
        if text and not (text == "None" and row.default is None):
            return {row.name: row.read(text, variable)}
    return {}


PET_VARIABLES = {
    "PET_NNODES": "nnodes",
    "PET_NODE_RANK": "machine_rank",
    "PET_MASTER_ADDR": "main_process_ip",
    "PET_MASTER_PORT": "main_process_port",
    "PET_RDZV_BACKEND": "rdzv_backend",
    "PET_RDZV_CONF": "rdzv_conf",
    "PET_MAX_RESTARTS": "max_restarts",
    "PET_MONITOR_INTERVAL": "monitor_interval",
    "PET_ROLE": "role",
    "PET_LOG_DIR": "log_dir",
    "PET_TEE": "tee",
}
"""Variables that torchrun reads and operators of Kubernetes set -> the option of the same meaning. Others
that begin with PET_ are read by torch itself."""

_RENDEZVOUS = ("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf")
"""Options without meaning in a run that a flag keeps on one machine."""

PET_ENDPOINT = "PET_RDZV_ENDPOINT"
PET_PROCESSES = "PET_NPROC_PER_NODE"
_ON_EACH_DEVICE = ("auto", "gpu", "xpu", "hpu", "npu", "mps")
"""Values of `PET_NPROC_PER_NODE` that mean one process on each device of the machine."""


def apply_torchrun_variables(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Returns settings in which variables of torchrun replace values that no flag sets."""
    from accelerate.settings.layers import FLAG, all_options
    from accelerate.settings.sections import LaunchSection

    has_machines = settings.source("num_machines") == FLAG
    is_alone = has_machines and settings[LaunchSection].num_machines == 1
    endpoint = environ.get(PET_ENDPOINT, "")
    host, _, port = endpoint.rpartition(":") if ":" in endpoint.rpartition("]")[2] else (endpoint, "", "")
    variables = [
        # The endpoint comes first, because the variables of its two parts take precedence.
        (PET_ENDPOINT, "main_process_ip", host.strip("[]")),
        (PET_ENDPOINT, "main_process_port", port),
        *((variable, name, environ.get(variable, "")) for variable, name in PET_VARIABLES.items()),
    ]
    for variable, name, text in variables:
        if name == "nnodes" and has_machines:
            continue
        if text and settings.source(name) != FLAG and not (is_alone and name in _RENDEZVOUS):
            settings = settings.replaced(variable, **{name: all_options()[name].read(text, variable)})
    settings = _apply_nnodes(settings)
    text = environ.get(PET_PROCESSES, "")
    if not text or FLAG in (settings.source("num_processes"), settings.source("processes_per_machine")):
        return settings
    if text in _ON_EACH_DEVICE:
        return settings.replaced(PET_PROCESSES, num_processes=None)
    count = os.cpu_count() or 1 if text == "cpu" else all_options()["num_processes"].read(text, PET_PROCESSES)
    if count < 1:
        raise wrong_value(PET_PROCESSES, text, "at least one process is needed", "Use 1 or more")
    return settings.replaced(PET_PROCESSES, num_processes=count * settings[LaunchSection].num_machines)


def _apply_nnodes(settings: Settings) -> Settings:
    """Returns settings whose number of machines is that of `--nnodes`, of a range the largest."""
    from accelerate.settings.layers import FLAG

    text, source = settings.values["nnodes"], settings.source("nnodes")
    if not text:
        return settings
    name = "--nnodes" if source == FLAG else source
    least, most = nodes_of(text, name)
    given = settings.values["num_machines"]
    if settings.source("num_machines") == FLAG and given != most:
        reason = f"--num_machines is {given}, and the largest number is {most}"
        raise wrong_value(name, text, reason, "Make them agree, or leave one out")
    return settings.replaced(source, num_machines=most)


def nodes_of(text: str, name: str = "--nnodes") -> tuple[int, int]:
    """Returns the smallest and the largest number of machines of `--nnodes`."""
    first, colon, second = text.partition(":")
    try:
        least, most = whole_number(first), whole_number(second if colon else first)
    except ValueError:
        least, most = 0, 0
    if not 1 <= least <= most:
        reason = "it is neither a number of machines, from 1 on, nor a smallest and a largest one"
        raise wrong_value(name, text, reason, "Write for example 4, or 2:4")
    return least, most
