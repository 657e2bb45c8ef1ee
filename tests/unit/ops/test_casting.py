"""Half-precision outputs become float32 and wrapped forwards stay copyable."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from accelerate.ops import ConvertOutputsToFp32, convert_outputs_to_fp32, convert_to_fp32


class Named(NamedTuple):
    logits: torch.Tensor
    name: str


class HalfModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (self.linear(x) * scale).to(torch.bfloat16)


def forward(x: Any) -> Any:
    return x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_tensors_become_float32(dtype: torch.dtype) -> None:
    assert convert_to_fp32(torch.ones(2, dtype=dtype)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_other_tensors_are_the_same_objects(dtype: torch.dtype) -> None:
    tensor = torch.ones(2).to(dtype)
    assert convert_to_fp32(tensor) is tensor


def test_nested_data_keep_their_kind() -> None:
    data = {"out": Named(torch.ones(1, dtype=torch.float16), "a"), "ids": [torch.tensor([1])], "n": None}
    converted = convert_to_fp32(data)
    assert type(converted["out"]) is Named
    assert converted["out"].logits.dtype == torch.float32
    assert converted["out"].name == "a"
    assert converted["ids"][0] is data["ids"][0]
    assert converted["n"] is None


def test_gradients_flow_through() -> None:
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    convert_to_fp32({"x": x * 2})["x"].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


def test_wrapped_forward_shows_the_original() -> None:
    wrapped = convert_outputs_to_fp32(HalfModel().forward)
    assert isinstance(wrapped, ConvertOutputsToFp32)
    assert wrapped.__wrapped__.__name__ == "forward"
    assert list(inspect.signature(wrapped).parameters) == ["x", "scale"]


def test_pickle_and_copy() -> None:
    wrapped = convert_outputs_to_fp32(forward)
    for copied in (pickle.loads(pickle.dumps(wrapped)), copy.deepcopy(wrapped)):
        assert copied(torch.ones(1, dtype=torch.float16)).dtype == torch.float32
        assert copied.__wrapped__ is forward


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_model_with_a_wrapped_forward_is_copied_whole(copy_of: Any) -> None:
    model = HalfModel()
    model.forward = convert_outputs_to_fp32(model.forward)  # type: ignore[method-assign]
    copied = copy_of(model)
    with torch.no_grad():
        copied.linear.weight.zero_()
        copied.linear.bias.fill_(3.0)
    output = copied(torch.ones(1, 2))
    assert output.dtype == torch.float32
    assert output.tolist() == [[3.0, 3.0]]
    assert model(torch.ones(1, 2)).tolist() != [[3.0, 3.0]]


def test_a_converted_forward_compiles_in_one_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it is not there
    model = HalfModel()
    expected = model(torch.ones(1, 2)).float()
    model.forward = convert_outputs_to_fp32(model.forward)  # type: ignore[method-assign]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(1, 2)), expected)
    torch._dynamo.reset()


@dataclass(frozen=True)
class Inner:
    hidden: torch.Tensor
    label: str = "a"


@dataclass
class Outputs:
    loss: torch.Tensor
    inner: Inner
    others: dict[str, Any] = field(default_factory=dict)
    count: torch.Tensor | None = None


def test_tensors_in_fields_of_dataclasses_are_converted_in_a_copy() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    output = Outputs(half.sum(), Inner(half), {"a": [Inner(half), half]}, torch.tensor(3))
    converted = convert_to_fp32((output, [output]))[0]
    assert type(converted) is Outputs
    inner = converted.others["a"]
    dtypes = [converted.loss.dtype, converted.inner.hidden.dtype, inner[0].hidden.dtype, inner[1].dtype]
    assert dtypes == [torch.float32] * 4
    assert converted.count is output.count
    assert converted.inner.label == "a"
    assert output.inner.hidden is half


def test_a_dataclass_without_half_precision_is_the_same_object() -> None:
    output = Outputs(torch.ones(1), Inner(torch.ones(1)), {"a": Inner})
    assert convert_to_fp32(output) is output
