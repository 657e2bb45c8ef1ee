from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from accelerate.base import ConfigurationError
from accelerate.settings import SCHEMA_FILE, config_file, load_config_from_file

SAMPLES = sorted((Path(__file__).parents[2] / "samples" / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_shipped_schema_is_up_to_date(reference: Any) -> None:
    assert SCHEMA_FILE.read_text() == reference.schema_text(), "run `make reference`"


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_sample_files_are_valid_before_and_after_rewriting(
    validator: Any, path: Path, tmp_path: Path
) -> None:
    validator.validate(yaml.safe_load(path.read_text()))
    config = load_config_from_file(str(path))
    config.to_yaml_file(str(tmp_path / "again.yaml"))
    validator.validate(yaml.safe_load((tmp_path / "again.yaml").read_text()))


@pytest.mark.parametrize(
    "text",
    [
        "fp16: true\ndistributed_type: TPU",
        "distributed_type: NO",
        "num_processes: '2'\nuse_cpu: 'no'\nmixed_precision: BF16",
        "dynamo_config: {backend: INDUCTOR, dynamo_mode: default}",
        "dynamo_backend: inductor",
        "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}",
        "fsdp_config: {fsdp_backward_prefetch_policy: BACKWARD_PRE}",
        "fp8_config: {backend: TE, override_linear_precision: [true, false, true]}",
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\nadditional_args: {a: 1}",
        "num_processes:\nfsdp_config:",
        "ipex_config: {}",
    ],
)
def test_files_that_load_are_valid(validator: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    config_file.read_layer(path, "file")
    validator.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    [
        "num_proceses: 2",
        "num_processes: many",
        "mixed_precision: fp32",
        "use_cpu: perhaps",
        "fsdp_config: 3",
        "fsdp_config: {fsdp_versoin: 2}",
        "distributed_type: MANY",
    ],
)
def test_files_that_are_refused_are_not_valid(validator: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError):
        config_file.read_layer(path, "file")
    assert not validator.is_valid(yaml.safe_load(text))


def test_every_key_that_loads_is_described(reference: Any) -> None:
    properties = reference.make_schema()["properties"]
    assert set(config_file.known_keys("")) <= set(properties)
    for group in (key for key, value in properties.items() if "properties" in value):
        assert set(config_file.known_keys(group)) <= set(properties[group]["properties"])
    assert properties["mixed_precision"]["description"].endswith("fp8.")
    assert properties["fp16"]["deprecated"] is True
