from __future__ import annotations

import torch
from torch import nn

from accelerate.weights import find_blocks, has_forward


class Layer(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.up = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        if experts:
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Body(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList(Layer(experts) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Net(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.stem = Layer()
        self.body = Body(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def spell(model: nn.Module, **kwargs: object) -> list[str]:
    return [f"{name}{'+' * inner}" for name, _, inner in find_blocks(model, **kwargs)]  # type: ignore[arg-type]


LEAVES = ["stem.attention", "stem.attention.out_proj", "stem.up.0+"]


def test_what_stands_in_a_list_is_a_block_and_the_rest_goes_tensor_by_tensor() -> None:
    assert spell(Net()) == ["", *LEAVES, "body.norm", "body.layers.0+", "body.layers.1+"]


def test_a_list_inside_opens_its_block() -> None:
    layer = ["attention+", "up+", "experts.0+", "experts.1+"]
    expected = [f"body.layers.{index}.{name}" for index in range(2) for name in layer]
    assert spell(Net(experts=2))[5:] == expected


def test_named_classes_are_blocks() -> None:
    assert spell(Net(2), whole=["Layer"]) == ["", "stem+", "body.norm", "body.layers.0+", "body.layers.1+"]


def test_every_tensor_is_in_one_block() -> None:
    for net in (Net(), Net(3), nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))):
        found = [
            f"{path}.{name}".strip(".")
            for path, module, inner in find_blocks(net)
            for name, _ in module.named_parameters(recurse=inner)
        ]
        assert sorted(found) == sorted(name for name, _ in net.named_parameters())


def test_lists_cannot_be_called() -> None:
    assert not has_forward(nn.ModuleList())
    assert not has_forward(nn.Module())
    assert has_forward(nn.Sequential())
