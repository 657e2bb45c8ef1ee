"""What train steps have in common."""

from __future__ import annotations

import sys

import pytest
import torch

from accelerate.strategies.megatron import steps
from accelerate.strategies.megatron.steps import StepOutput, output_class, sum_over_tokens


def test_sums_and_numbers() -> None:
    losses = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    total, number, report = sum_over_tokens(torch.tensor([[1, 0], [1, 1]]), losses, "lm loss")
    assert (float(total.detach()), int(number), number.dtype) == (8.0, 3, torch.int)
    assert report["lm loss"].tolist() == [8.0, 3.0]
    assert total.requires_grad
    assert not report["lm loss"].requires_grad


def test_outputs_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "is_transformers_available", lambda: False)
    output = output_class("Any")(loss=1, logits=None)
    assert (output.loss, output["loss"], output[0], output[:1]) == (1, 1, 1, [1])
    assert isinstance(output, StepOutput)
    with pytest.raises(AttributeError):
        output.other  # noqa: B018


def test_outputs_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        pass

    module = type(sys)("transformers.modeling_outputs")
    module.Known = Known  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", type(sys)("transformers"))
    monkeypatch.setitem(sys.modules, "transformers.modeling_outputs", module)
    monkeypatch.setattr(steps, "is_transformers_available", lambda: True)
    assert output_class("Known") is Known
