"""What train steps have in common."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.strategies.megatron import steps
from accelerate.strategies.megatron.steps import (
    BertTrainStep,
    GPTTrainStep,
    StepOutput,
    T5TrainStep,
    output_class,
)

from .conftest import accelerator, arguments


def test_outputs_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "is_transformers_available", lambda: False)
    output = output_class("Any")(loss=1, logits=None)
    assert (output.loss, output["loss"], output[0], output[:1]) == (1, 1, 1, [1])
    assert isinstance(output, StepOutput)
    with pytest.raises(AttributeError):
        output.other  # noqa: B018


@pytest.mark.parametrize("kind", [BertTrainStep, GPTTrainStep, T5TrainStep])
def test_functions_of_the_user_replace_those_of_a_train_step(kind: Any) -> None:
    def get_batch(iterator: Any) -> Any: ...
    def loss(mask: Any, output: Any) -> Any: ...

    step = kind(accelerator(custom_get_batch_function=get_batch, custom_loss_function=loss), arguments())
    assert (step.get_batch, step.loss_func) == (get_batch, loss)
    assert step.name == kind.__name__
