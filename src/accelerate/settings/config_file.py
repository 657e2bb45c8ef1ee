"""Configuration files, which are found, read, checked and written, and the classes of their contents."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from accelerate.base import (
    SAGEMAKER_PYTHON_VERSION,
    SAGEMAKER_PYTORCH_VERSION,
    SAGEMAKER_TRANSFORMERS_VERSION,
    ComputeEnvironment,
    ConfigurationError,
    DistributedType,
    SageMakerDistributedType,
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

SCHEMA_FILE = Path(__file__).with_name("config.schema.json")
"""JSON Schema of the file for editors, written by `make reference`."""

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
    """Returns the path of the default file from the current environment."""
    return Path(_cache_home(), "accelerate", "default_config.yaml")


def find_config_file(argument: str | None) -> Path | None:
    """Returns the file of ``--config_file``, or the default file (YAML, then JSON) if it exists."""
    if argument is not None:
        return existing_file("--config_file", argument)
    default = default_config_path()
    try:
        return next((path for path in (default, default.with_suffix(".json")) if is_file(path)), None)
    except OSError as error:
        reason = f"the default configuration file below it cannot be looked at ({error.strerror})"
        fix = "Correct or unset HF_HOME and XDG_CACHE_HOME, or pass --config_file"
        raise wrong_value("HF_HOME", _cache_home(), reason, fix) from error


def existing_file(name: str, text: str) -> Path:
    """Returns the path of an existing file from the flag `name`, with a leading `~` expanded."""
    path = expanded(text)
    try:
        if is_file(path):
            return path
    except OSError as error:
        reason = f"it cannot be looked at ({error.strerror})"
        raise wrong_value(name, text, reason, "Check the path") from error
    if os.path.isdir(path):
        raise wrong_value(name, text, "it is a folder", "Check the path", IsADirectoryError)
    raise wrong_value(name, text, "there is no such file", "Check the path", FileNotFoundError)


def to_text(mapping: Mapping[str, Any], suffix: str = ".yaml") -> str:
    """Formats settings as the text of a file, sorted by key, as JSON for the suffix ``.json`` or YAML."""
    if suffix == ".json":
        return json.dumps(mapping, indent=2, sort_keys=True) + "\n"
    import yaml

    return yaml.safe_dump(mapping, sort_keys=True)


def write_mapping(path: Path, mapping: Mapping[str, Any], suffix: str | None = None) -> None:
    """Writes a configuration file and creates its parent folders.

    `suffix` overrides that of the path.
    """
    text = to_text(mapping, path.suffix if suffix is None else suffix)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = f"it cannot be written ({getattr(error, 'strerror', error)})"
        fix = "Choose another path with --config_file, or correct HF_HOME"
        raise wrong_value("--config_file", str(path), reason, fix) from error


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a YAML or JSON file without migrating it."""
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
    """Reads a configuration file of any version as a layer of settings with the name `source`."""
    mapping, notes = migrate(read_mapping(path))
    values = check(mapping, path)
    return Layer(source, {**_paradigm(mapping, path), **values}, tuple(f"{path}: {note}" for note in notes))


def check(mapping: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Checks every key and value of a file in the current format, and returns the values by option name.

    Empty entries (null) count as not set.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for group, key, value in _entries(mapping, problems):
        row = known_keys(group).get(key)
        if row is None:
            known = known_keys(group) if group else [*GROUPS, *known_keys("")]
            close = difflib.get_close_matches(key, known, n=1)
            hint = "Remove it, or check the version that wrote the file."
            hint = f"Did you mean {close[0]}?" if close else hint
            problems.append(f"{_dotted(group, shortened(key))}: there is no such setting. {hint}")
        elif value is not None:
            try:
                values[row.name] = row.read(value, _dotted(group, key))
            except ValueError as error:
                problems.append(str(error))
    refuse_all([f"{path}: {problem}" for problem in problems])
    return values


def _entries(mapping: Mapping[str, Any], problems: list[str]) -> Iterator[tuple[str, str, Any]]:
    """Yields the group ("" at the top level), key and value of every entry of a file."""
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
    """Returns options by their keys in a group ("" at the top level), and in a group also by their names."""
    sections = (section for section in SECTIONS if (section.file_key or "") == group)
    rows = [row for section in sections for row in section.options() if row.key]
    names = {row.name: row for row in rows} if group else {}
    return {**names, **{str(row.key): row for row in rows}}


def _dotted(group: str, key: str) -> str:
    return f"{group}.{key}" if group else key


def _paradigm(mapping: Mapping[str, Any], path: Path) -> dict[str, bool]:
    """Returns the strategy of `distributed_type` and the presence of `parallelism_config`."""
    switches = {"use_parallelism_config": True} if mapping.get("parallelism_config") else {}
    written = mapping.get("distributed_type")
    if written is None or is_sagemaker(mapping):
        return switches
    word = "NO" if isinstance(written, bool) else str(written).upper()
    if word not in PARADIGM_OF_TYPE:
        fix = f"Use one of {', '.join(PARADIGM_OF_TYPE)}"
        raise wrong_value(f"{path}: distributed_type", written, "there is no such strategy", fix)
    return {**switches, **{name: name == PARADIGM_OF_TYPE[word] for name in EXCLUSIVE}}


def is_sagemaker(mapping: Mapping[str, Any]) -> bool:
    """Returns whether a file describes a job on Amazon SageMaker."""
    return mapping.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER.value


Config = TypeVar("Config", bound="BaseConfig")


def load_config_from_file(config_file: str | None) -> BaseConfig:
    """Loads a configuration file.

    Args:
        config_file: its path; ``None`` for the default file.

    Returns:
        A `ClusterConfig`, or a `SageMakerConfig` where the file says so.

    Raises:
        ConfigurationError: there is no such file, or its content is wrong.
    """
    path = find_config_file(config_file)
    if path is None:
        raise ConfigurationError(
            f"There is no configuration file at {default_config_path()}. "
            f"Run `accelerate config default` or pass --config_file."
        )
    kind = SageMakerConfig if is_sagemaker(read_mapping(path)) else ClusterConfig
    return kind.from_yaml_file(str(path))  # which reads JSON too, by the suffix


@dataclass
class BaseConfig:
    """Settings that all configuration files have in common."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        """Converts strings to enumeration members, and unset groups to empty ones."""
        self.compute_environment = _member(
            ComputeEnvironment, "compute_environment", self.compute_environment
        )
        amazon = self.compute_environment == ComputeEnvironment.AMAZON_SAGEMAKER
        kinds: type[Enum] = SageMakerDistributedType if amazon else DistributedType
        self.distributed_type = _member(kinds, "distributed_type", self.distributed_type)
        for field in fields(self):
            if field.name.endswith("_config") and getattr(self, field.name) is None:
                setattr(self, field.name, {})

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as plain values, without ``None`` and empty groups."""
        values = {name: _plain(value) for name, value in vars(self).items()}
        return {name: value for name, value in values.items() if value is not None and value != {}}

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the mapping of a file in the current format, with keys that older versions did not write.

        Args:
            config_dict: as read from a file.

        Raises:
            ConfigurationError: unknown keys or wrong values; all of them are named.
        """
        return _in_form(config_dict, Path("configuration"))

    @classmethod
    def from_json_file(cls: type[Config], json_file: str | None = None) -> Config:
        """Loads a JSON file, by default the default file."""
        return cls._from_file(Path(json_file or default_config_path().with_suffix(".json")))

    @classmethod
    def from_yaml_file(cls: type[Config], yaml_file: str | None = None) -> Config:
        """Loads a YAML file, by default the default file."""
        return cls._from_file(Path(yaml_file or default_config_path()))

    @classmethod
    def _from_file(cls: type[Config], path: Path) -> Config:
        mapping = _in_form(read_mapping(path), path)
        given = {key: value for key, value in mapping.items() if value is not None}
        needed = (field.name for field in fields(cls) if field.default is MISSING)
        refuse_all([f"{path}: {name} is missing. Add it." for name in needed if name not in given])
        return make_config(cls, given)

    def to_json_file(self, json_file: str) -> None:
        """Writes the settings as JSON."""
        write_mapping(Path(json_file), self.to_dict(), ".json")

    def to_yaml_file(self, yaml_file: str) -> None:
        """Writes the settings as YAML."""
        write_mapping(Path(yaml_file), self.to_dict(), ".yaml")


def make_config(kind: type[Config], mapping: Mapping[str, Any]) -> Config:
    """Returns an object with the settings of a mapping, also those for which its class has no field."""
    names = {field.name for field in fields(kind)}
    config = kind(**{name: value for name, value in mapping.items() if name in names})
    vars(config).update({name: value for name, value in mapping.items() if name not in names})
    return config


def _in_form(mapping: dict[str, Any], path: Path) -> dict[str, Any]:
    mapping, _ = migrate(mapping)
    usual = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"}
    values = check(mapping, path)
    rows = {key: row for key, row in known_keys("").items() if row.kind in (bool, int, tuple)}
    typed = {key: values[row.name] for key, row in rows.items() if row.name in values}
    lists = {key: list(value) for key, value in typed.items() if isinstance(value, tuple)}
    mapping = {**usual, **mapping, **typed, **lists}
    mapping["mixed_precision"] = str(mapping.get("mixed_precision") or "no")
    return {**mapping, **{name: bool(mapping.get(name)) for name in ("use_cpu", "debug")}}


def _member(kind: type[Enum], name: str, value: object) -> Any:
    word = "NO" if value is False else value
    word = "XLA" if word == "TPU" else word
    try:
        return kind(word.upper() if type(word) is str else word)
    except ValueError:
        fix = f"Use one of {', '.join(str(member.value) for member in kind)}"
        raise wrong_value(name, value, "there is no such value", fix) from None


def _plain(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return value.value if isinstance(value, Enum) else value


@dataclass
class ClusterConfig(BaseConfig):
    """Settings for one machine or a cluster."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None
    slurm_config: dict[str, Any] | None = None


@dataclass
class SageMakerConfig(BaseConfig):
    """Settings for a job on Amazon SageMaker."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = SAGEMAKER_PYTORCH_VERSION
    transformers_version: str = SAGEMAKER_TRANSFORMERS_VERSION
    py_version: str = SAGEMAKER_PYTHON_VERSION
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False
