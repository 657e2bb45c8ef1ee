from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.big_modeling import explain_device_map, shorten


def test_a_row_for_each_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 16, bias=False)
        )
        model[2].weight = model[0].weight
    table = explain_device_map(model, {"0": 0, "2": 0, "1": "cpu"}, {0: 2048, 1: 10, "cpu": 1000})
    assert table.splitlines() == [
        "device  parameters    buffers     in all  of its limit  modules",
        "0           1.0 KB    0 bytes     1.0 KB           50%  0, 2",
        "1          0 bytes    0 bytes    0 bytes            0%",
        "cpu      128 bytes  136 bytes  264 bytes           26%  1",
    ]
    half = explain_device_map(model, {"": "disk"}, dtype="float16").splitlines()[1]
    assert half.split() == ["disk", "576", "bytes", "72", "bytes", "648", "bytes", "all"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["embed", "layers.0", "layers.1", "layers.2", "norm"], "embed, layers.0-2, norm"),
        (["h.0.a", "h.1.a", "h.1.b", "h.3.b"], "h.0-1.a, h.1.b, h.3.b"),
        ([""], "all"),
        ([], ""),
        (
            [f"{chr(97 + index)}{'x' * 9}" for index in range(9)],
            "axxxxxxxxx, bxxxxxxxxx, cxxxxxxxxx, dxxxxxxxxx, exxxxxxx ...",
        ),
    ],
)
def test_names_that_are_counted_become_a_range(names: list[str], text: str) -> None:
    assert shorten(names) == text
