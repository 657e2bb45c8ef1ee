"""Tests of what the launcher refuses of DeepSpeed's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accelerate.base import ConfigurationError
from accelerate.devices import CPU, CUDA
from accelerate.launch import Machine, check_engine
from accelerate.settings import FLAG, Layer, merge_layers


def check(hardware: Any = CPU, **flags: Any) -> None:
    check_engine(merge_layers(Layer(FLAG, {"use_deepspeed": True, **flags})), Machine(hardware=hardware))


def written(folder: Path, config: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_what_goes_together_passes(tmp_path: Path) -> None:
    check()
    check(zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="/disk")
    check(CUDA, mixed_precision="fp16")
    config = {"zero_optimization": {"stage": "auto", "offload_param": {"device": "auto"}}}
    check(deepspeed_config_file=written(tmp_path, config), mixed_precision="bf16")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"mixed_precision": "fp16"}, "--mixed_precision='fp16': DeepSpeed does not compute in float16"),
        ({"zero_stage": 2, "offload_param_device": "cpu"}, "stage 3 only"),
        ({"zero_stage": 3, "offload_param_device": "nvme"}, "needs offload_param_nvme_path"),
        ({"deepspeed_config_file": "missing.json"}, "--deepspeed_config_file='missing.json': there is no"),
    ],
)
def test_flags_that_each_process_would_refuse(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check(**flags)


def test_all_that_is_wrong_in_a_file_is_said(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "offload_param": "cpu"}, "train_batch_size": "many"}
    with pytest.raises(ConfigurationError, match="offload_param is 'cpu'") as caught:
        check(deepspeed_config_file=written(tmp_path, config))
    assert "train_batch_size is 'many'" in str(caught.value)
    stage = {"zero_optimization": {"stage": 7}}
    with pytest.raises(ConfigurationError, match="zero_stage=7"):
        check(deepspeed_config_file=written(tmp_path, stage))


def test_other_ways_of_training_are_not_looked_at() -> None:
    check_engine(merge_layers(Layer(FLAG, {"deepspeed_config_file": "missing.json"})), Machine())
