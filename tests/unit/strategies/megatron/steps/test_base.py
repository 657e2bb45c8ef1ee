"""What train steps have in common."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from accelerate.strategies.megatron import steps
from accelerate.strategies.megatron.steps import (
    BertTrainStep,
    GPTTrainStep,
    StepOutput,
    T5TrainStep,
    output_class,
    sum_over_tokens,
)

from .conftest import accelerator, arguments


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


@pytest.mark.parametrize("kind", [BertTrainStep, GPTTrainStep, T5TrainStep])
def test_functions_of_the_user_replace_those_of_a_train_step(kind: Any) -> None:
    def get_batch(iterator: Any) -> Any: ...
    def loss(mask: Any, output: Any) -> Any: ...

    step = kind(accelerator(custom_get_batch_function=get_batch, custom_loss_function=loss), arguments())
    assert (step.get_batch, step.loss_func) == (get_batch, loss)
    assert step.name == kind.__name__
