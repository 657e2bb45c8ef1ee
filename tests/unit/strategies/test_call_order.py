"""The modules of stages are in the order in which the forward of a model calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accelerate.strategies.pipeline.split import split_model


def linear(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(2, 2) for _ in range(count))


class Net(nn.Module):
    """Registers its modules in another order than its subclasses call them."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.norm, self.first = nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)
        self.downs, self.blocks, self.attentions = linear(3), linear(4), linear(4)
        self.rare, self.count = linear(2), 4


class OneLine(Net):
    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.blocks[0](self.first(x))))


class Zipped(Net):
    def forward(self, x: Any) -> Any:
        weight = self.head.weight.float().t()
        for number, (attention, block) in enumerate(zip(self.attentions, self.blocks, strict=True)):
            x = attention(block(x)) + number
        return self.head(x @ weight)


class Indexed(Net):
    def forward(self, x: Any) -> Any:
        for number in range(len(self.attentions)):
            x = self.step(x, number)
        return self.norm(x)

    def step(self, x: Any, number: int) -> Any:
        x = self.blocks[number](self.attentions[number](x))
        return self.downs[number](x) if number < 3 else x


class Rare(Net):
    def forward(self, x: Any) -> Any:
        x, blocks = self.first(x), self.blocks
        for number, block in enumerate(blocks[: self.count]):
            x = block(x)
            if number % 2:
                x = self.rare[number // 2](x)
        return x


class OfMethods(Net):
    def lists(self) -> nn.ModuleList:
        return self.blocks[:2]

    def forward(self, x: Any) -> Any:
        for block in self.lists():
            x = checkpoint(block, x, use_reentrant=False)
        hidden = [down(x) for down in self.downs]
        return checkpoint(self.head, sum(hidden), use_reentrant=False)


class OfBases(OneLine):
    def forward(self, x: Any) -> Any:
        for attention in self.attentions:
            x = attention(x)
        return super().forward(x)


class WithAName(Net):
    """Calls methods of tensors that have names of its modules."""

    def forward(self, x: Any) -> Any:
        x = x / x.norm()
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class OfProperties(Net):
    @property
    def layers(self) -> nn.ModuleList:
        return self.blocks

    def forward(self, x: Any) -> Any:
        for block in self.layers:
            x = block(x)
        return self.head(x)


class OfChildren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(2, 2), OneLine()

    def forward(self, x: Any) -> Any:
        for block in self.body.blocks:
            x = block(x)
        return self.head(x)


class OfInstances(Net):
    def __init__(self) -> None:
        super().__init__()
        self.forward = self.run  # type: ignore[method-assign]

    def run(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Joined(Net):
    def forward(self, x: Any) -> Any:
        for layer in self.blocks + self.downs:
            x = layer(x)
        layers = [self.first, *reversed(self.attentions), self.head]
        for layer in layers:
            x = layer(x)
        return x


class OfTuples(Net):
    def forward(self, x: Any) -> Any:
        for layers in (self.attentions, self.downs):
            for layer in layers:
                x = layer(x)
        for layer in (self.norm, self.first):
            x = layer(x)
        return x


class Reversed(Net):
    def forward(self, x: Any) -> Any:
        for attention, block in zip(reversed(self.attentions), self.blocks[::-1], strict=True):
            x = block(attention(x))
        for number in range(2, -1, -1):
            x = self.downs[number](x)
        return x


class Named(Net):
    def __init__(self) -> None:
        super().__init__()
        self.names = ["norm", "first", "head"]

    def forward(self, x: Any) -> Any:
        layers = self.attentions if self.count else self.blocks
        for layer in layers:
            x = layer(x)
        for name in self.names:
            x = getattr(self, name)(x)
        return x


class Nested(Net):
    def forward(self, x: Any) -> Any:
        blocks = iter(self.blocks)
        x = self.apply_to(next(blocks), self.apply_to(self.first, x))
        for _ in range(3):
            x = next(blocks)(x)
        return self.apply_to(self.head, self.apply_to(self.norm, x))

    @staticmethod
    def apply_to(layer: nn.Module, x: Any) -> Any:
        return layer(x)


class Formatted(Net):
    def __init__(self) -> None:
        super().__init__()
        for number in range(3):
            self.add_module(f"up{number}", nn.Linear(2, 2))
            self.add_module(f"down{number}", nn.Linear(2, 2))

    def forward(self, x: Any) -> Any:
        for number in range(3):
            x = getattr(self, f"down{number}")(x)
        for number in reversed(range(self.count - 1)):
            block = getattr(self, "up" + str(number))
            x = block(x)
        return x


class Permuted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.order = [2, 0, -1, 1]

    def forward(self, x: Any) -> Any:
        for number in self.order:
            x = self.blocks[number](x)
        for number in sorted(range(4), reverse=True):
            x = self.attentions[number](x)
        return x


class OfDicts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: linear(2) for name in ("late", "middle", "early")})

    def forward(self, x: Any) -> Any:
        for name in ("early", "middle"):
            for layer in self.parts[name]:
                x = layer(x)
        for layer in self.parts["late"]:
            x = layer(x)
        return self.head(x)


class OfItems(OfDicts):
    def forward(self, x: Any) -> Any:
        for _, layers in self.parts.items():
            for layer in layers:
                x = layer(x)
        for name in sorted(self.parts.keys(), reverse=True):
            x = self.parts[name][0](x)
        return self.head(x)


KINDS = [OfProperties, OfChildren, OfInstances, OneLine, Zipped, Indexed, Rare, OfMethods, OfBases, WithAName]
KINDS += [Joined, OfTuples, Reversed, Named, Nested, Formatted, Permuted, OfDicts, OfItems]


@pytest.mark.parametrize("kind", KINDS)
def test_modules_are_in_the_order_of_the_calls(kind: type[Net]) -> None:
    model = kind()
    split = split_model(model, 2, "auto")
    calls: dict[str, None] = {}
    for submodule in split.submodules:
        name = submodule.names[0]
        submodule.module.register_forward_hook(lambda *_, name=name: calls.setdefault(name))
    model(torch.ones(1, 2, requires_grad=True))
    called = [each.names[0] for each in split.submodules if each.names[0] in calls]
    assert called == list(calls)
    assert len(called) > 3


class Unnamed(nn.Module):
    """Calls modules whose names its code computes."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(3):
            self.add_module(f"layer{number}", nn.Linear(2, 2))
        self.blocks, self.head = linear(2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(3):
            x = getattr(self, f"layer{number}")(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def test_modules_that_no_code_names_are_in_the_order_of_registration() -> None:
    names = [submodule.names[0] for submodule in split_model(Unnamed(), 2, "auto").submodules]
    assert names == ["layer0", "layer1", "layer2", "blocks.0", "blocks.1", "head"]


def test_a_stage_may_begin_at_a_module_of_lists_that_alternate() -> None:
    split = split_model(Zipped(), 2, ["blocks.2"])
    stages = {name: submodule.stages for submodule in split.submodules for name in submodule.names}
    assert stages["attentions.1"] == {0}
    assert stages["attentions.2"] == {1}
