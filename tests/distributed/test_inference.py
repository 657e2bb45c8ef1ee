"""Pipelines: outputs equal those of the plain model for any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import PartialState, prepare_pippy

Run = Callable[..., list[Any]]

pytestmark = pytest.mark.usefixtures("states")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.b(torch.relu(self.a(x)))
        return out


class Net(nn.Module):
    """A skip connection over all stages, tied weights, and a mask as a keyword argument."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        first = x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x + first)
        return logits if mask is None else logits * mask.unsqueeze(-1)


def build() -> Net:
    torch.manual_seed(3)
    return Net().eval()


def go_through(points: Any, gather: bool, sizes: list[int]) -> dict[str, Any]:
    state = PartialState()
    model, plain = build(), build()
    tokens = torch.arange(4 * 3).view(4, 3) % 11
    mask = torch.ones(4, 3)
    prepared = prepare_pippy(
        model,
        points,
        example_args=(tokens,),
        example_kwargs={"mask": mask},
        num_chunks=2,
        gather_output=gather,
    )
    assert prepared is model
    found = []
    with torch.no_grad():
        for size in sizes:
            x = (torch.arange(size * 3).view(size, 3) * 7) % 11
            weight = torch.rand(size, 3, generator=torch.Generator().manual_seed(size))
            output = model(x, mask=weight)
            found.append(
                None if output is None else torch.allclose(output.cpu(), plain(x, weight), atol=1e-6)
            )
        with pytest.raises(ValueError, match=r"the example was.*int64\[3\]"):
            model(x[:, :2], mask=weight[:, :2])
    return {"rank": state.process_index, "equal": found, "points": model.hf_split_points}


@pytest.mark.parametrize(
    ("points", "gather"), [("auto", True), pytest.param(["layers.1"], False, marks=pytest.mark.slow)]
)
def test_outputs_equal_the_plain_model_s(run: Run, points: Any, gather: bool) -> None:
    first, last = run(go_through, points, gather, [4, 3, 9, 1], processes=2, timeout=120)
    assert last["equal"] == [True] * 4
    assert first["equal"] == ([True] * 4 if gather else [None] * 4)
    assert first["points"] == last["points"] == (["layers.2"] if points == "auto" else points)


@pytest.mark.slow
def test_three_stages(run: Run) -> None:
    found = run(go_through, "auto", True, [6, 5], processes=3, timeout=120)
    assert [each["equal"] for each in found] == [[True, True]] * 3


class Expanding(nn.Module):
    """Its stages hand on a mask that is expanded, and what is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x[:, :1] > 0).expand(x.shape[0], 4, 4)
        turned = self.first(x).transpose(1, 2)
        out = self.second(turned).masked_fill(mask, 0.0) + turned
        return out + turned.transpose(1, 2).view(-1, 16).view(-1, 4, 4)  # no view of other memory


def send_views() -> bool:
    PartialState()
    torch.manual_seed(3)
    model, plain = Expanding().eval(), Expanding().eval()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 4, 4)
    prepare_pippy(model, ["second"], example_args=(x,), gather_output=True)
    with torch.no_grad():
        return torch.allclose(model(x).cpu(), plain(x))


@pytest.mark.slow
def test_views_cross_the_border_of_a_stage(run: Run) -> None:
    assert run(send_views, processes=2, timeout=120) == [True, True]


def go_wrong() -> list[str]:
    PartialState()
    texts = []
    for points, example in (
        (["layer"], (torch.ones(4, 3).long(),)),
        ([], (torch.ones(4, 3).long(),)),
        ("auto", ()),
    ):
        try:
            prepare_pippy(build(), points, example_args=example)
        except ValueError as error:
            texts.append(str(error))
    return texts


@pytest.mark.slow
def test_mistakes_are_named_on_all_ranks(run: Run) -> None:
    first, second = run(go_wrong, processes=2, timeout=120)
    assert first == second
    assert "there is no module layer" in first[0]
    assert "they make 1 stages for 2 processes" in first[1]
    assert "needs an example" in first[2]
