from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.big_modeling.moves import Wishes, plan_moves
from accelerate.weights.reading import Weights


def test_everything_is_decided_before_anything_changes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    path = tmp_path / "x.safetensors"
    save_file({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(3), "more": torch.ones(1)}, path)
    wishes = Wishes({"": "cpu", "0.weight": "disk"}, torch.float16)
    plan = plan_moves(model, Weights.open([path]), wishes, [])
    assert [(move.name, move.on_disk, move.dtype) for move in plan.moves] == [
        ("0.weight", True, torch.float16),
        ("0.bias", False, torch.float16),
    ]
    assert plan.missing == ["1.weight", "1.bias"]
    assert plan.unexpected == ["more"]
    assert plan.misshapen == ["0.bias is (3,) and not (2,)"]
