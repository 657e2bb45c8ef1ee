"""Each size of the mesh that is larger than 1 has its axis."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from accelerate.parallelism_config import ParallelismConfig
from accelerate.strategies.axes import Axis, ContextAxis, ExpertAxis, TensorAxis, UlyssesAxis
from accelerate.strategies.composition import resolve_axes


class Mesh(dict[str, Any]):
    """Sizes of the dimensions of a device mesh."""

    def __missing__(self, name: str) -> Any:
        return SimpleNamespace(size=lambda: 2)


@pytest.mark.parametrize(
    ("sizes", "tensor", "sequence"),
    [
        (None, Axis, Axis),
        ({}, Axis, Axis),
        ({"dp_replicate_size": 2}, Axis, Axis),
        ({"tp_size": 2}, TensorAxis, Axis),
        ({"cp_size": 2}, Axis, ContextAxis),
        ({"tp_size": 2, "cp_size": 2}, TensorAxis, ContextAxis),
        ({"sp_size": 2}, Axis, UlyssesAxis),
    ],
)
def test_axes_follow_the_sizes(
    sizes: dict[str, int] | None, tensor: type[Axis], sequence: type[Axis]
) -> None:
    axes = resolve_axes(None if sizes is None else ParallelismConfig(**sizes), Mesh())
    assert (type(axes.tensor), type(axes.sequence)) == (tensor, sequence)
    assert axes.tensor.size == (2 if tensor is TensorAxis else 1)


def test_experts_have_an_axis_of_their_own() -> None:
    axes = resolve_axes(ParallelismConfig(ep_size=2), Mesh())
    assert (type(axes.tensor), type(axes.sequence), type(axes.expert)) == (Axis, Axis, ExpertAxis)
    assert axes.expert.size == 2
    assert type(resolve_axes(ParallelismConfig(tp_size=2), Mesh()).expert) is Axis


def test_an_axis_of_size_one_changes_nothing() -> None:
    model = nn.Linear(1, 1)
    assert Axis().transform_model(model) is model
    assert Axis().transform_loader("loader", model) == "loader"
