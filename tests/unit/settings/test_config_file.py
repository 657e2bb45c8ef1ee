from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelerate.base import ComputeEnvironment, ConfigurationError, DistributedType, patch_environment
from accelerate.settings import (
    SECTIONS,
    ClusterConfig,
    Option,
    SageMakerConfig,
    config_file,
    load_config_from_file,
    merge_layers,
)

SAMPLES = sorted((Path(__file__).parents[2] / "samples" / "configs").glob("*.yaml"))


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_files_shipped_by_other_projects_load_and_write_back(path: Path, tmp_path: Path) -> None:
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    written = yaml.safe_load(path.read_text())
    for key in ("num_processes", "mixed_precision", "distributed_type", "use_cpu"):
        assert config.to_dict()[key] == written[key]
    config.to_yaml_file(str(tmp_path / "again.yaml"))
    assert load_config_from_file(str(tmp_path / "again.yaml")) == config
    config.to_json_file(str(tmp_path / "again.json"))
    assert load_config_from_file(str(tmp_path / "again.json")) == config


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_the_distributed_type_of_a_file_selects_the_training_method(path: Path) -> None:
    settings = merge_layers(config_file.read_layer(path, "file"))
    kind = yaml.safe_load(path.read_text())["distributed_type"]
    assert settings.values["use_fsdp"] == (kind == "FSDP")
    assert settings.values["use_deepspeed"] == (kind == "DEEPSPEED")
    assert settings.values["multi_gpu"] == (kind == "MULTI_GPU")
    assert settings.source("num_processes") == "file"


def test_nested_values_reach_their_options(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        mixed_precision: fp8
        use_cpu: true
        fp8_config: {backend: TE, margin: 2, override_linear_precision: [true, false, true]}
        fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}
        dynamo_config: {dynamo_backend: INDUCTOR}
        parallelism_config: {parallelism_config_tp_size: 2}
        """,
    )
    values = config_file.read_layer(path, "file").values
    assert values["cpu"] is True
    assert values["fp8_backend"] == "te"
    assert values["fp8_margin"] == 2
    assert values["fp8_override_linear_precision"] == (True, False, True)
    assert values["fsdp_version"] == 2
    assert values["fsdp_reshard_after_forward"] == "true"
    assert values["dynamo_backend"] == "inductor"
    assert values["parallelism_config_tp_size"] == 2
    assert values["use_parallelism_config"] is True


def test_no_without_quotes_is_the_value_no(tmp_path: Path) -> None:
    path = write(tmp_path, "mixed_precision: no\ndynamo_config: {dynamo_backend: NO}\n")
    values = config_file.read_layer(path, "file").values
    assert dict(values) == {"mixed_precision": "no", "dynamo_backend": "no"}


def test_empty_entries_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path, "num_processes:\nfsdp_config:\nmixed_precision: bf16\n")
    assert dict(config_file.read_layer(path, "file").values) == {"mixed_precision": "bf16"}


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"HF_HOME": "/a", "XDG_CACHE_HOME": "/b"}, "/a/accelerate/default_config.yaml"),
        ({"HF_HOME": "", "XDG_CACHE_HOME": "/b"}, "/b/huggingface/accelerate/default_config.yaml"),
        (
            {"HF_HOME": "", "XDG_CACHE_HOME": "", "HOME": "/c"},
            "/c/.cache/huggingface/accelerate/default_config.yaml",
        ),
    ],
)
def test_the_default_place_follows_the_variables(variables: dict[str, str], wanted: str) -> None:
    with patch_environment(**variables):
        assert str(config_file.default_config_path()) == wanted


def test_a_default_file_is_found_and_a_missing_given_one_is_an_error(tmp_path: Path) -> None:
    with patch_environment(HF_HOME=tmp_path):
        assert config_file.find_config_file(None) is None
        with pytest.raises(ConfigurationError, match="There is no configuration file at"):
            load_config_from_file(None)
        (tmp_path / "accelerate").mkdir()
        path = write(tmp_path / "accelerate", json.dumps({"num_processes": 3}), "default_config.json")
        assert config_file.find_config_file(None) == path
        assert load_config_from_file(None).num_processes == 3  # type: ignore[attr-defined]
        preferred = write(tmp_path / "accelerate", "num_processes: 4\n", "default_config.yaml")
        assert config_file.find_config_file(None) == preferred
        assert config_file.find_config_file(str(path)) == path
    with pytest.raises(ConfigurationError, match="--config_file='nowhere.yaml': there is no such file"):
        config_file.find_config_file("nowhere.yaml")


def test_text_becomes_enum_members_and_missing_groups_are_empty() -> None:
    config = ClusterConfig("LOCAL_MACHINE", "fsdp", "no", False, False)  # type: ignore[arg-type]
    assert config.compute_environment is ComputeEnvironment.LOCAL_MACHINE
    assert config.distributed_type is DistributedType.FSDP
    assert config.fsdp_config == {}
    assert "fsdp_config" not in config.to_dict()
    assert config.to_dict()["distributed_type"] == "FSDP"


def test_a_value_that_is_no_enum_member_is_named() -> None:
    with pytest.raises(ConfigurationError, match="distributed_type='MANY'"):
        ClusterConfig("LOCAL_MACHINE", "MANY", "no", False, False)  # type: ignore[arg-type]


def test_a_file_for_sagemaker_loads_as_such(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        compute_environment: AMAZON_SAGEMAKER
        distributed_type: DATA_PARALLEL
        mixed_precision: fp16
        ec2_instance_type: ml.p3.2xlarge
        iam_role_name: trainer
        region: eu-west-1
        """,
    )
    config = load_config_from_file(str(path))
    assert isinstance(config, SageMakerConfig)
    assert config.region == "eu-west-1"
    assert config.use_cpu is False
    settings = merge_layers(config_file.read_layer(path, "file"))
    assert settings.values["compute_environment"] == "AMAZON_SAGEMAKER"


def test_missing_keys_of_a_sagemaker_job_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "compute_environment: AMAZON_SAGEMAKER\niam_role_name: trainer\n")
    with pytest.raises(ConfigurationError, match="ec2_instance_type is missing"):
        load_config_from_file(str(path))


def test_every_field_of_the_classes_is_a_key_that_files_may_have() -> None:
    known = {*config_file.known_keys(""), *config_file.GROUPS}
    for kind in (ClusterConfig, SageMakerConfig):
        assert {field.name for field in fields(kind)} <= known


def mapping_with_every_key() -> dict[str, Any]:
    """A file that sets every key that a cluster's file may have to something else than the built-in value."""
    cluster = {field.name for field in fields(ClusterConfig)}
    mapping: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "fp8",
    }
    for section in SECTIONS:
        for row in section.options():
            if row.key is None or (section.file_key is None and row.key not in cluster):
                continue
            place = mapping.setdefault(section.file_key, {}) if section.file_key else mapping
            place.setdefault(row.key, other_value(row))
    return mapping


def other_value(row: Option) -> Any:
    if choices := row.choices or row.words:
        return choices[-1]
    if row.kind is tuple:
        return [True, False, True] if isinstance(row.default, tuple) else ["a", "b"]
    return {bool: not row.default, int: row.limits[1] if row.limits else 7, float: 0.5, str: "other"}[
        row.kind
    ]


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_file_to_settings_to_file_is_the_identity(tmp_path: Path, suffix: str) -> None:
    first, second = tmp_path / f"first.{suffix}", tmp_path / f"second.{suffix}"
    mapping = mapping_with_every_key()
    first.write_text(json.dumps(mapping) if suffix == "json" else yaml.safe_dump(mapping))
    config = load_config_from_file(str(first))
    (config.to_json_file if suffix == "json" else config.to_yaml_file)(str(second))
    values = dict(config_file.read_layer(first, "file").values)
    assert dict(config_file.read_layer(second, "file").values) == values
    assert load_config_from_file(str(second)) == config
    for section in SECTIONS:
        for row in section.options():
            place = mapping.get(section.file_key, {}) if section.file_key else mapping
            if row.key in place and row.name != "distributed_type":
                assert values[row.name] == row.read(place[row.key], row.name)


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = ClusterConfig("LOCAL_MACHINE", "NO", "no", use_cpu=True, debug=False)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"below\.yaml.*cannot be written.*Choose another path"):
        config.to_yaml_file(str(tmp_path / "file" / "below.yaml"))
