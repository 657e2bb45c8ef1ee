"""The fields of the handler of activation checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.base import ConfigurationError
from accelerate.plugins import ActivationCheckpointing

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"every": 0}, "every=0: it is not a count of blocks"),
        ({"every": True}, "every=True: it is not a count"),
        ({"every": 1.5}, "every=1.5: it is not a count"),
        ({"blocks": []}, "blocks=.*no names of classes"),
        ({"blocks": ""}, "blocks=.*no names of classes"),
        ({"blocks": [torch.nn.Linear]}, "blocks=.*no names of classes"),
        ({"save_operators": "attention"}, "save_operators='attention': it is neither 'matmul' nor a list"),
        ({"save_operators": []}, "save_operators=.*neither"),
        ({"save_operators": [aten.mm]}, "save_operators=.*aten.mm.*not an overload"),
        ({"save_operators": ["mm"]}, "save_operators='mm'.*not an overload"),
        ({"save_operators": [aten.native_dropout.default]}, "draws random numbers"),
        ({"budget": "much"}, "size='much'"),
        ({"budget": 0}, "budget=0: it is not a number of bytes"),
        ({"budget": True}, "budget=True: it is not a number"),
        ({"budget": "1GB", "every": 2}, "budget='1GB': every already says"),
        ({"budget": "1GB", "every": 2, "offload": True}, "every, offload already say"),
    ],
)
def test_a_wrong_value_raises_an_error(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        ActivationCheckpointing(**fields)


def test_one_name_is_a_list_of_one_name() -> None:
    assert ActivationCheckpointing(blocks="Layer").blocks == ["Layer"]
    assert ActivationCheckpointing(blocks=("Layer", "Block")).blocks == ["Layer", "Block"]


def test_attention_may_be_saved() -> None:
    operator = aten._scaled_dot_product_flash_attention.default
    assert ActivationCheckpointing(save_operators=[operator]).save_operators == [operator]


@pytest.mark.parametrize(
    ("handler", "summary"),
    [
        (ActivationCheckpointing(), "every block"),
        (ActivationCheckpointing(3), "the first of each 3 blocks"),
        (ActivationCheckpointing(save_operators="matmul"), "every block, except for outputs of matmul"),
        (
            ActivationCheckpointing(2, save_operators=[aten.mm.default]),
            "the first of each 2 blocks, except for outputs of aten.mm.default",
        ),
    ],
)
def test_a_summary_lists_the_recomputed_modules(handler: ActivationCheckpointing, summary: str) -> None:
    assert handler.summary == summary
