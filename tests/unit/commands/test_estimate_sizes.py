from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accelerate.base import ConfigurationError
from accelerate.commands.estimate import (
    estimate_command,
    estimate_command_parser,
    parse_memory,
    plan_device_map,
)
from accelerate.commands.estimate_sizes import (
    OPTIMIZERS,
    estimate_training_usage,
    largest_layer,
    size_of,
    training_bytes,
)
from accelerate.commands.model_tensors import Weight

MODEL = (
    Weight("embed.weight", (100, 8), "F32"),
    Weight("layers.0.up.weight", (32, 8), "F32"),
    Weight("layers.0.down.weight", (8, 32), "BF16"),
    Weight("layers.1.up.weight", (32, 8), "F32"),
    Weight("layers.1.down.weight", (8, 32), "F32"),
    Weight("positions", (4,), "I64"),
)
NUMBERS = 800 + 4 * 256


@pytest.mark.parametrize(
    ("dtype", "factor"), [("float32", 4), ("float16", 2), ("bfloat16", 2), ("int8", 1), ("int4", 0.5)]
)
def test_floats_are_counted_in_the_format_and_indices_in_their_own(dtype: str, factor: float) -> None:
    assert size_of(MODEL, dtype) == NUMBERS * factor + 32
    assert largest_layer(MODEL, dtype) == ("embed", 800 * factor)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", torch.optim.AdamW),
        ("adam", torch.optim.Adam),
        ("sgd", torch.optim.SGD),
        ("sgd_momentum", lambda p: torch.optim.SGD(p, momentum=0.9)),
        ("adagrad", torch.optim.Adagrad),
        ("rmsprop", torch.optim.RMSprop),
        ("adafactor", torch.optim.Adafactor),
    ],
)
def test_the_optimizers_are_those_of_torch(name: str, make: object) -> None:
    parameter = torch.nn.Parameter(torch.randn(48, 32))
    optimizer = make([parameter])  # type: ignore[operator]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value) and value.dim()]
    assert OPTIMIZERS[name]([Weight("w", (48, 32), "F32")]) == sum(value.nbytes for value in held)


@pytest.mark.parametrize(
    ("dtype", "sharding", "processes", "wanted"),
    [
        ("float32", "none", 1, (4, 4, 8)),
        ("float16", "none", 1, (6, 4, 8)),
        ("float32", "zero1", 4, (4, 4, 2)),
        ("float16", "zero1", 4, (2, 2, 3)),
        ("float16", "zero2", 4, (2, 0.5, 3)),
        ("float32", "zero2", 4, (4, 1, 2)),
        ("bfloat16", "shard_grad_op", 4, (1 + 2, 1, 2)),
    ],
)
def test_training_bytes_match_the_calculation(
    dtype: str, sharding: str, processes: int, wanted: tuple[float, ...]
) -> None:
    model = [Weight("a.weight", (16, 16), "F32"), Weight("b.weight", (16, 16), "F32")]
    found = training_bytes(model, dtype, "adamw", sharding, processes)
    assert found is not None
    parts = [found[name] / 512 for name in ("weights", "gradients", "optimizer")]
    assert parts == list(wanted)
    assert found["total"] == 512 * sum(wanted)


@pytest.mark.parametrize(("sharding", "kept"), [("full_shard", 4), ("zero3", 2)])
def test_full_sharding_gathers_the_largest_layer(sharding: str, kept: int) -> None:
    model = [Weight("a.weight", (16, 16), "F32"), Weight("b.weight", (16, 16), "F32")]
    found = training_bytes(model, "bfloat16", "sgd", sharding, 2)
    assert found is not None
    assert found["weights"] == 512 * kept // 2 + 256 * 2


def test_formats_for_inference_are_not_trained_in() -> None:
    assert training_bytes(MODEL, "int8", "adamw", "none", 1) is None
    assert set(estimate_training_usage(400, "int8").values()) == {-1}


def test_training_usage_is_estimated_from_the_model_size() -> None:
    wanted = {"model": 400, "gradients": 400, "optimizer": 800, "step": 1600}
    assert estimate_training_usage(400, "float32") == wanted
    assert estimate_training_usage(400, "float16")["model"] == 600
    assert estimate_training_usage(400, "float16", "O2")["optimizer"] == 300
    with pytest.raises(ConfigurationError, match="msamp_config='O9'"):
        estimate_training_usage(400, "float16", "O9")


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
    device_map, table = plan_device_map(WEIGHTS, "float32", {0: 5 * LAYER, "cpu": 10**6})
    assert device_map["layers.0"] == 0
    assert [device_map[f"layers.{index}"] for index in (1, 2, 11)] == [0, "cpu", "cpu"]
    assert "layers.2-11" in table
    small, _ = plan_device_map(WEIGHTS, "int4", {0: 5 * LAYER, "cpu": 10**6})
    assert small == {"": 0}
    (size,) = {
        line.split()[1] for line in plan_device_map(WEIGHTS[-1:], "int4", {0: 100})[1].splitlines()[1:]
    }
    assert size == "56", "integers are as they are"


def test_the_command_prints_a_device_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {f"layers.{index}.weight": torch.zeros(8, 8) for index in range(4)}
    save_file(state, tmp_path / "model.safetensors")
    words = [str(tmp_path), "--dtypes", "float32", "--device_map", "0=800", "cpu=1KB"]
    estimate_command(estimate_command_parser().parse_args(words))
    text = capsys.readouterr().out
    assert "Device map in float32" in text
    assert "of limit" in text
    estimate_command(estimate_command_parser().parse_args([*words, "--json"]))
    found = json.loads(capsys.readouterr().out)["device_maps"]["float32"]
    assert found == {"layers.0": 0, "layers.1": "cpu", "layers.2": "cpu", "layers.3": "cpu"}
    estimate_command(estimate_command_parser().parse_args([*words[:4]]))
    assert "Device map" in capsys.readouterr().out
