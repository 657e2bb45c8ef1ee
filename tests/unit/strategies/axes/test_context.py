"""What context parallelism does to a model, without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.state import PartialState
from accelerate.strategies.axes import ContextAxis


class Attention(nn.Module):
    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return kwargs


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = Attention(), Attention()


@pytest.mark.usefixtures("states")
def test_masks_are_dropped_where_attention_is_causal(caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    model, hidden, mask = Model(), torch.ones(1), torch.ones(2)
    ContextAxis(None, None).transform([model])
    assert model.self_attn(hidden, other=1) == {"other": 1}
    assert model.self_attn(hidden, attention_mask=None) == {"attention_mask": None, "is_causal": True}
    assert not caplog.records
    assert model.self_attn(hidden, attention_mask=mask) == {"attention_mask": None, "is_causal": True}
    assert "attention_mask of the model is not looked at" in caplog.text
    assert model.cross_attn(hidden, attention_mask=mask)["attention_mask"] is mask
