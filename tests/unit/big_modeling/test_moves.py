from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.big_modeling import LoadOptions, plan_moves
from accelerate.weights import StoredWeights


def test_all_moves_are_planned_before_a_change(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    path = tmp_path / "x.safetensors"
    save_file({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(3), "more": torch.ones(1)}, path)
    load_options = LoadOptions({"": "cpu", "0.weight": "disk"}, torch.float16)
    plan = plan_moves(model, StoredWeights.open([path]), load_options, [])
    assert [(move.name, move.on_disk, move.dtype) for move in plan.moves] == [
        ("0.weight", True, torch.float16),
        ("0.bias", False, torch.float16),
    ]
    assert plan.missing == ["1.weight", "1.bias"]
    assert plan.unexpected == ["more"]
    assert plan.mismatched == ["0.bias is (3,) and not (2,)"]


class Params4bit(nn.Parameter):
    """Named as that of bitsandbytes."""


def packed(shape: list[int]) -> dict[str, torch.Tensor]:
    outline = json.dumps({"quant_type": "nf4", "shape": shape}).encode()
    return {
        "0.weight": torch.zeros(2, 1, dtype=torch.uint8),
        "0.weight.absmax": torch.ones(1),
        "0.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(outline), dtype=torch.uint8),
    }


@pytest.mark.parametrize(
    ("shape", "kind", "mismatched"),
    [
        ([2, 2], Params4bit, []),
        ([2, 4], Params4bit, ["0.weight is (2, 4) and not (2, 2)"]),
        ([2, 2], nn.Parameter, ["0.weight is stored in 4 bits, and its layer is not"]),
    ],
)
def test_weights_in_4_bits_are_loaded_with_their_scales(
    tmp_path: Path, shape: list[int], kind: type[nn.Parameter], mismatched: list[str]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model[0].weight = kind(torch.zeros(2, 2))
    save_file(packed(shape), tmp_path / "x.safetensors")
    plan = plan_moves(model, StoredWeights.open([tmp_path / "x.safetensors"]), LoadOptions(), [])
    assert (plan.missing, plan.unexpected) == ([], [])
    assert [text.partition(" (load")[0] for text in plan.mismatched] == mismatched
    assert plan.moves[0].parts == ("0.weight.absmax", "0.weight.quant_state.bitsandbytes__nf4")


def test_weights_in_8_bits_do_not_load_into_a_plain_parameter(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    stored = {
        "0.weight": torch.zeros(2, 2, dtype=torch.int8),
        "0.SCB": torch.ones(2),
        "0.weight_format": torch.zeros((), dtype=torch.uint8),
    }
    save_file(stored, tmp_path / "x.safetensors")
    plan = plan_moves(model, StoredWeights.open([tmp_path / "x.safetensors"]), LoadOptions(), [])
    assert plan.unexpected == []
    assert "0.weight is stored in 8 bits" in plan.mismatched[0]
