"""The configuration file: where it is, how it is read, checked against the sections, and written."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from accelerate.base import (
    ComputeEnvironment,
    ConfigurationError,
    as_builtin,
    environ,
    expanded,
    is_file,
    like,
    shortened,
    wrong_value,
)
from accelerate.settings import parsing
from accelerate.settings.layers import SECTIONS, Layer
from accelerate.settings.migrations import migrate
from accelerate.settings.option import Option, refuse_all
from accelerate.settings.sections import EXCLUSIVE, PARADIGM_OF_TYPE

GROUPS = tuple(dict.fromkeys(section.file_key for section in SECTIONS if section.file_key))
"""Keys of a file that hold the settings of sections."""


def _cache_home() -> str:
    variables = environ.current()
    base = variables.get("XDG_CACHE_HOME") or "~/.cache"
    return str(expanded(variables.get("HF_HOME") or f"{base}/huggingface"))


hf_cache_home = _cache_home()
cache_dir = str(Path(hf_cache_home, "accelerate"))
default_json_config_file = str(Path(cache_dir, "default_config.yaml"))
default_yaml_config_file = str(Path(cache_dir, "default_config.yaml"))
default_config_file = default_yaml_config_file


def default_config_path() -> Path:
    """Return the path of the default file, by the environment at this time."""
    return Path(_cache_home(), "accelerate", "default_config.yaml")


def find_config_file(given: str | None) -> Path | None:
    """Find the file to read.

    Args:
        given: what ``--config_file`` says.

    Returns:
        That file, else the default file (YAML, then JSON) if there is one, else ``None``.

    Raises:
        ConfigurationError: there is no such file, or the folder of the default one cannot be read.
    """
    if given is not None:
        return existing_file("--config_file", given)
    default = default_config_path()
    try:
        return next((path for path in (default, default.with_suffix(".json")) if is_file(path)), None)
    except OSError as error:
        reason = f"the default configuration file below it cannot be looked at ({error.strerror})"
        fix = "Correct or unset HF_HOME and XDG_CACHE_HOME, or pass --config_file"
        raise wrong_value("HF_HOME", _cache_home(), reason, fix) from error


def existing_file(name: str, given: str) -> Path:
    """Return the path of a file that the user named.

    Args:
        name: the flag that names it.
        given: its path; a leading `~` is replaced.

    Raises:
        ConfigurationError: there is no such file, or it cannot be looked at.
    """
    path = expanded(given)
    try:
        if is_file(path):
            return path
    except OSError as error:
        reason = f"it cannot be looked at ({error.strerror})"
        raise wrong_value(name, given, reason, "Check the path") from error
    if os.path.isdir(path):
        raise wrong_value(name, given, "it is a folder", "Check the path", IsADirectoryError)
    raise wrong_value(name, given, "there is no such file", "Check the path", FileNotFoundError)


def to_text(mapping: Mapping[str, Any], suffix: str = ".yaml") -> str:
    """Return settings as the text of a file, sorted by key: JSON for the suffix ``.json``, else YAML."""
    if suffix == ".json":
        return json.dumps(mapping, indent=2, sort_keys=True) + "\n"
    import yaml

    return yaml.safe_dump(mapping, sort_keys=True)


def write_mapping(path: Path, mapping: Mapping[str, Any], suffix: str | None = None) -> None:
    """Write a configuration file, and make the folders above it.

    Args:
        path: of the file.
        mapping: its settings.
        suffix: says whether it is JSON or YAML; default: that of the path.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    text = to_text(mapping, path.suffix if suffix is None else suffix)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = f"it cannot be written ({getattr(error, 'strerror', error)})"
        fix = "Choose another place with --config_file, or correct HF_HOME"
        raise wrong_value("--config_file", str(path), reason, fix) from error


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file as it is.

    Raises:
        ConfigurationError: it cannot be read, is not valid, or is not a mapping.
    """
    try:
        text = parsing.read_text(path)
        content = parsing.parse_json(text) if path.suffix == ".json" else parsing.parse_yaml(text)
    except (OSError, UnicodeDecodeError) as error:
        text = f"The configuration file {path} cannot be read: {error}."
        raise like(ConfigurationError(text), error) from error
    except ValueError as error:
        first = " ".join(str(error).split())
        raise ConfigurationError(f"The configuration file {path} is not valid: {first}.") from error
    if not isinstance(content, dict):
        text = f"The configuration file {path} holds no settings (name: value)."
        raise as_builtin(ConfigurationError(text), AttributeError)
    return content


def read_layer(path: Path, source: str) -> Layer:
    """Read a configuration file as a layer of settings.

    Args:
        path: YAML or JSON, of any version.
        source: how the user knows this file.

    Raises:
        ConfigurationError: unknown keys or wrong values; all of them are named.
    """
    mapping, notes = migrate(read_mapping(path))
    values = check(mapping, path)
    return Layer(source, {**_paradigm(mapping, path), **values}, tuple(f"{path}: {note}" for note in notes))


def check(mapping: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Check every key and value of a file in today's form.

    Returns:
        Option name -> value for what the file sets; empty entries (null) count as not set.

    Raises:
        ConfigurationError: unknown keys or wrong values; all of them are named.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for group, key, value in _entries(mapping, problems):
        row = known_keys(group).get(key)
        if row is None:
            problems.append(_unknown(group, key))
        elif value is not None:
            try:
                values[row.name] = row.read(value, _dotted(group, key))
            except ValueError as error:
                problems.append(str(error))
    refuse_all([f"{path}: {problem}" for problem in problems])
    return values


def _entries(mapping: Mapping[str, Any], problems: list[str]) -> Iterator[tuple[str, str, Any]]:
    """Every (group, or "" at the top level; key; value) of a file."""
    for key, value in mapping.items():
        if key not in GROUPS:
            yield "", key, value
        elif isinstance(value, dict):
            yield from ((key, inner, held) for inner, held in value.items())
        elif value is not None:
            fix = "Indent its settings under it"
            problems.append(str(wrong_value(key, value, "this must be a group of settings", fix)))


@cache
def known_keys(group: str) -> dict[str, Option]:
    """Options by their keys in a group, or at the top level (""); in a group by their names too."""
    sections = (section for section in SECTIONS if (section.file_key or "") == group)
    rows = [row for section in sections for row in section.options() if row.key]
    names = {row.name: row for row in rows} if group else {}
    return {**names, **{str(row.key): row for row in rows}}


def _dotted(group: str, key: str) -> str:
    return f"{group}.{key}" if group else key


def _unknown(group: str, key: str) -> str:
    known = known_keys(group) if group else [*GROUPS, *known_keys("")]
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"Did you mean {close[0]}?" if close else "Remove it, or check the version that wrote the file."
    return f"{_dotted(group, shortened(key))}: there is no such setting. {hint}"


def _paradigm(mapping: Mapping[str, Any], path: Path) -> dict[str, bool]:
    """The way of training that `distributed_type` and the presence of `parallelism_config` stand for."""
    switches = {"use_parallelism_config": True} if mapping.get("parallelism_config") else {}
    written = mapping.get("distributed_type")
    if written is None or is_sagemaker(mapping):
        return switches
    word = "NO" if isinstance(written, bool) else str(written).upper()
    if word not in PARADIGM_OF_TYPE:
        fix = f"Use one of {', '.join(PARADIGM_OF_TYPE)}"
        raise wrong_value(f"{path}: distributed_type", written, "there is no such way of training", fix)
    return {**switches, **{name: name == PARADIGM_OF_TYPE[word] for name in EXCLUSIVE}}


def is_sagemaker(mapping: Mapping[str, Any]) -> bool:
    """Whether a file describes a job on Amazon SageMaker."""
    return mapping.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER.value
