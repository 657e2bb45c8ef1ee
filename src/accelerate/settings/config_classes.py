"""The configuration classes that users load, edit and write."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import Enum
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
    wrong_value,
)
from accelerate.settings.config_file import (
    cache_dir as cache_dir,
    check,
    default_config_file as default_config_file,
    default_config_path,
    default_json_config_file as default_json_config_file,
    default_yaml_config_file as default_yaml_config_file,
    find_config_file,
    hf_cache_home as hf_cache_home,
    is_sagemaker,
    known_keys,
    read_mapping,
    write_mapping,
)
from accelerate.settings.migrations import migrate
from accelerate.settings.option import refuse_all

Config = TypeVar("Config", bound="BaseConfig")


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
            f"There is no configuration file at {default_config_path()}. "
            f"Run `accelerate config default` or pass --config_file."
        )
    kind = SageMakerConfig if is_sagemaker(read_mapping(path)) else ClusterConfig
    return kind.from_yaml_file(str(path))  # which reads JSON too, by the suffix


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
        return _in_form(config_dict, Path("configuration"))

    @classmethod
    def from_json_file(cls: type[Config], json_file: str | None = None) -> Config:
        """Load a JSON file; default: the default file."""
        return cls._from_file(Path(json_file or default_config_path().with_suffix(".json")))

    @classmethod
    def from_yaml_file(cls: type[Config], yaml_file: str | None = None) -> Config:
        """Load a YAML file; default: the default file."""
        return cls._from_file(Path(yaml_file or default_config_path()))

    @classmethod
    def _from_file(cls: type[Config], path: Path) -> Config:
        mapping = _in_form(read_mapping(path), path)
        accepted = {field.name for field in fields(cls)}
        given = {key: value for key, value in mapping.items() if key in accepted and value is not None}
        needed = (field.name for field in fields(cls) if field.default is MISSING)
        refuse_all([f"{path}: {name} is missing. Add it." for name in needed if name not in given])
        return cls(**given)

    def to_json_file(self, json_file: str) -> None:
        """Write the settings as JSON."""
        write_mapping(Path(json_file), self.to_dict(), ".json")

    def to_yaml_file(self, yaml_file: str) -> None:
        """Write the settings as YAML."""
        write_mapping(Path(yaml_file), self.to_dict(), ".yaml")


def _in_form(mapping: dict[str, Any], path: Path) -> dict[str, Any]:
    mapping, _ = migrate(mapping)
    usual = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"}
    mapping = {**usual, **mapping, **_typed(check(mapping, path))}
    mapping["mixed_precision"] = str(mapping.get("mixed_precision") or "no")
    return {**mapping, **{name: bool(mapping.get(name)) for name in ("use_cpu", "debug")}}


def _typed(values: dict[str, Any]) -> dict[str, Any]:
    """Values of the top level by key, for those options that a file may also write as text."""
    rows = {key: row for key, row in known_keys("").items() if row.kind in (bool, int, tuple)}
    typed = {key: values[row.name] for key, row in rows.items() if row.name in values}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in typed.items()}


def _member(kind: type[Enum], name: str, value: Any) -> Any:
    word = "NO" if value is False else value
    word = "XLA" if word == "TPU" else word
    try:
        return kind(word.upper() if type(word) is str else word)
    except ValueError:
        fix = f"Use one of {', '.join(str(member.value) for member in kind)}"
        raise wrong_value(name, value, "there is no such value", fix) from None


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
    slurm_config: dict[str, Any] | None = None

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
