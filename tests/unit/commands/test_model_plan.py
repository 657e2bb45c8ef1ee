from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accelerate.base import ConfigurationError
from accelerate.commands.estimate import estimate_command, estimate_command_parser
from accelerate.commands.model_plan import parse_memory, plan_of
from accelerate.commands.model_tensors import Weight

LAYER = 64 * 64 * 4
WEIGHTS = [
    Weight("embed.weight", (10, 64), "F32"),
    *(Weight(f"layers.{index}.{name}.weight", (64, 32), "BF16") for index in range(12) for name in "ab"),
    Weight("head.ids", (7,), "I64"),
]


def test_limits_are_read() -> None:
    assert parse_memory([]) is None
    assert parse_memory(["cpu=1KB", "1=2KiB", "0=5"]) == {0: 5, 1: 2048, "cpu": 1000}
    for word in ("0", "gpu=1GB", "-1=1GB", "=1GB"):
        with pytest.raises(ConfigurationError, match="--device_map"):
            parse_memory([word])


def test_numbered_modules_stay_whole_and_in_order() -> None:
    device_map, table = plan_of(WEIGHTS, "float32", {0: 5 * LAYER, "cpu": 10**6})
    assert device_map["layers.0"] == 0
    assert [device_map[f"layers.{index}"] for index in (1, 2, 11)] == [0, "cpu", "cpu"]
    assert "layers.2-11" in table
    small, _ = plan_of(WEIGHTS, "int4", {0: 5 * LAYER, "cpu": 10**6})
    assert small == {"": 0}
    (size,) = {line.split()[1] for line in plan_of(WEIGHTS[-1:], "int4", {0: 100})[1].splitlines()[1:]}
    assert size == "56", "integers are as they are"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {f"layers.{index}.weight": torch.zeros(8, 8) for index in range(4)}
    save_file(state, tmp_path / "model.safetensors")
    words = [str(tmp_path), "--dtypes", "float32", "--device_map", "0=800", "cpu=1KB"]
    estimate_command(estimate_command_parser().parse_args(words))
    text = capsys.readouterr().out
    assert "Device map in float32" in text
    assert "of its limit" in text
    estimate_command(estimate_command_parser().parse_args([*words, "--json"]))
    found = json.loads(capsys.readouterr().out)["device_maps"]["float32"]
    assert found == {"layers.0": 0, "layers.1": "cpu", "layers.2": "cpu", "layers.3": "cpu"}
    estimate_command(estimate_command_parser().parse_args([*words[:4]]))
    assert "Device map" in capsys.readouterr().out
