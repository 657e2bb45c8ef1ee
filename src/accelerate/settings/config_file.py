"""Sections <-> YAML or JSON: where the file is, how it is checked, and the classes that users load."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from accelerate.base import environ
from accelerate.base.constants import (
    SAGEMAKER_PYTHON_VERSION,
    SAGEMAKER_PYTORCH_VERSION,
    SAGEMAKER_TRANSFORMERS_VERSION,
)
from accelerate.base.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from accelerate.base.errors import ConfigurationError, wrong_value
from accelerate.settings.merge import Layer
from accelerate.settings.migrations import migrate
from accelerate.settings.option import Option, refuse_all
from accelerate.settings.sections import SECTIONS
from accelerate.settings.sections.launch import EXCLUSIVE, PARADIGM_OF_TYPE

Config = TypeVar("Config", bound="BaseConfig")

FREE_FORM = ("additional_args",)
"""Keys that hold a mapping of the user's own."""


def _cache_home() -> str:
    variables = environ.current()
    base = variables.get("XDG_CACHE_HOME") or str(Path("~", ".cache").expanduser())
    return str(Path(variables.get("HF_HOME") or str(Path(base, "huggingface"))).expanduser())


hf_cache_home = _cache_home()
cache_dir = str(Path(hf_cache_home, "accelerate"))
default_json_config_file = str(Path(cache_dir, "default_config.yaml"))
default_yaml_config_file = str(Path(cache_dir, "default_config.yaml"))
default_config_file = default_yaml_config_file


def default_place() -> Path:
    """Where the default file is, by the environment of now."""
    return Path(_cache_home(), "accelerate", "default_config.yaml")


def find_config_file(given: str | None) -> Path | None:
    """Find the file to read.

    Args:
        given: what ``--config_file`` says.

    Returns:
        That file, else the default file (YAML, then JSON) if there is one, else ``None``.

    Raises:
        ConfigurationError: the given file is not there.
    """
    if given is not None:
        path = Path(given).expanduser()
        if not path.is_file():
            raise wrong_value("--config_file", given, "there is no such file", "Check the path")
        return path
    default = default_place()
    return next((path for path in (default, default.with_suffix(".json")) if path.is_file()), None)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file as it is.

    Raises:
        ConfigurationError: it cannot be read, is not valid, or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else _read_yaml(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The configuration file {path} cannot be read: {error}.") from error
    except ValueError as error:
        first = " ".join(str(error).split())
        raise ConfigurationError(f"The configuration file {path} is not valid: {first}.") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"The configuration file {path} holds no settings (name: value).")
    return content


def _read_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def layer(path: Path, source: str) -> Layer:
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
    for where, key, value in _entries(mapping, problems):
        row = _known(where).get(key)
        if row is None:
            problems.append(_unknown(where, key))
        elif isinstance(row, Option) and value is not None:
            _read(row, value, f"{where}.{key}" if where else key, values, problems)
    refuse_all([f"{path}: {problem}" for problem in problems])
    return values


def _read(row: Option, value: Any, where: str, values: dict[str, Any], problems: list[str]) -> None:
    try:
        values[row.name] = row.read(value, where)
    except ValueError as error:
        problems.append(str(error))


def _entries(mapping: Mapping[str, Any], problems: list[str]) -> Iterator[tuple[str, str, Any]]:
    """Every (nested mapping or "", key, value) of a file."""
    nested = {section.file_key for section in SECTIONS if section.file_key}
    for key, value in mapping.items():
        if key not in nested or value is None:
            yield "", str(key), value
        elif isinstance(value, dict):
            yield from ((str(key), str(inner), held) for inner, held in value.items())
        else:
            problems.append(
                str(
                    wrong_value(
                        key, value, "this must be a group of settings", "Indent its settings under it"
                    )
                )
            )


@cache
def _known(where: str) -> dict[str, Option | None]:
    """Keys of a nested mapping, or of the top level; ``None`` marks those that are no option of their own."""
    own: dict[str, Any] = {}
    for section in SECTIONS:
        if (section.file_key or "") == where:
            own.update({row.key: row for row in section.options() if row.key})
    if where:
        prefixed = {f"{row.name}": row for row in own.values()}
        return {**prefixed, **own}
    others = [section.file_key for section in SECTIONS if section.file_key]
    structure = dict.fromkeys([*others, *FREE_FORM], STRUCTURE)
    return {**structure, **own}


STRUCTURE: Any = "structure"


def _unknown(where: str, key: str) -> str:
    close = difflib.get_close_matches(key, _known(where), n=1)
    hint = f"Did you mean {close[0]}?" if close else "Remove it, or check the version that wrote the file."
    return f"{where + '.' if where else ''}{key}: there is no such setting. {hint}"


def _paradigm(mapping: Mapping[str, Any], path: Path) -> dict[str, bool]:
    """The way of training that `distributed_type` and the presence of `parallelism_config` stand for."""
    chosen: dict[str, bool] = {}
    if mapping.get("parallelism_config"):
        chosen["use_parallelism_config"] = True
    written = mapping.get("distributed_type")
    if written is None or is_sagemaker(mapping):
        return chosen
    word = str(written if not isinstance(written, bool) else "NO").upper()
    if word not in PARADIGM_OF_TYPE:
        mend = f"Use one of {', '.join(PARADIGM_OF_TYPE)}"
        raise wrong_value(f"{path}: distributed_type", written, "there is no such way of training", mend)
    chosen.update(dict.fromkeys(EXCLUSIVE, False))
    name = PARADIGM_OF_TYPE[word]
    return {**chosen, name: True} if name else chosen


def is_sagemaker(mapping: Mapping[str, Any]) -> bool:
    """Whether a file describes a job on Amazon SageMaker."""
    return mapping.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER.value


def load_config_from_file(config_file: str | None) -> BaseConfig:
    """Load a configuration file.

    Args:
        config_file: its path; ``None`` takes the default file.

    Returns:
        A `ClusterConfig`, or a `SageMakerConfig` where the file says so.

    Raises:
        ConfigurationError: there is no such file, or its content is wrong.
    """
    path = find_config_file(config_file)
    if path is None:
        raise ConfigurationError(
            f"There is no configuration file at {default_place()}. "
            f"Run `accelerate config default` or pass --config_file."
        )
    kind = SageMakerConfig if is_sagemaker(read_mapping(path)) else ClusterConfig
    return kind.from_json_file(str(path)) if path.suffix == ".json" else kind.from_yaml_file(str(path))


@dataclass
class BaseConfig:
    """What every configuration file says."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        """Turn words into members of their enumerations."""
        self.compute_environment = _member(
            ComputeEnvironment, "compute_environment", self.compute_environment
        )
        amazon = self.compute_environment == ComputeEnvironment.AMAZON_SAGEMAKER
        kinds: type[Enum] = SageMakerDistributedType if amazon else DistributedType
        self.distributed_type = _member(kinds, "distributed_type", self.distributed_type)
        if getattr(self, "dynamo_config", None) is None:
            self.dynamo_config: dict[str, Any] | None = {}

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, without those that say nothing."""
        held = {name: _plain(value) for name, value in vars(self).items()}
        return {name: value for name, value in held.items() if value is not None and value != {}}

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """Bring a file's mapping to today's form and fill in what older versions did not write.

        Args:
            config_dict: as read from a file.

        Raises:
            ConfigurationError: unknown keys or wrong values; all of them are named.
        """
        mapping, _ = migrate(config_dict)
        check(mapping, Path("configuration"))
        mapping = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", **mapping}
        mapping["mixed_precision"] = str(mapping.get("mixed_precision") or "no")
        for name in ("use_cpu", "debug"):
            mapping[name] = bool(mapping.get(name) or False)
        return mapping

    @classmethod
    def from_json_file(cls: type[Config], json_file: str | None = None) -> Config:
        """Load a JSON file; default: the default place."""
        return cls._from_file(Path(json_file or default_place().with_suffix(".json")))

    @classmethod
    def from_yaml_file(cls: type[Config], yaml_file: str | None = None) -> Config:
        """Load a YAML file; default: the default place."""
        return cls._from_file(Path(yaml_file or default_place()))

    @classmethod
    def _from_file(cls: type[Config], path: Path) -> Config:
        mapping = cls.process_config(read_mapping(path))
        accepted = {field.name for field in fields(cls)}
        given = {key: value for key, value in mapping.items() if key in accepted and value is not None}
        needed = (field.name for field in fields(cls) if field.default is MISSING)
        refuse_all([f"{path}: {name} is missing. Add it." for name in needed if name not in given])
        return cls(**given)

    def to_json_file(self, json_file: str) -> None:
        """Write the settings as JSON."""
        Path(json_file).write_text(
            json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )

    def to_yaml_file(self, yaml_file: str) -> None:
        """Write the settings as YAML."""
        import yaml

        Path(yaml_file).write_text(yaml.safe_dump(self.to_dict(), sort_keys=True), encoding="utf-8")


def _member(kind: type[Enum], name: str, value: Any) -> Any:
    word = "NO" if value is False else value
    word = "XLA" if word == "TPU" else word
    try:
        return kind(word.upper() if type(word) is str else word)
    except ValueError:
        mend = f"Use one of {', '.join(str(member.value) for member in kind)}"
        raise wrong_value(name, value, "there is no such value", mend) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return {key: _plain(held) for key, held in value.items()} if isinstance(value, dict) else value


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

    def __post_init__(self) -> None:
        """Give every group that is not set an empty mapping."""
        for field in fields(self):
            if field.name.endswith("_config") and getattr(self, field.name) is None:
                setattr(self, field.name, {})
        super().__post_init__()


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
