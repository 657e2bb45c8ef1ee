"""What a model that is spread over processes refuses; how it is filled is tested with processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import ConfigurationError
from accelerate.big_modeling import LoadOptions, check_options, is_sharded, own_part


def test_a_plain_model_is_not_sharded() -> None:
    model = nn.Linear(2, 2)
    assert not is_sharded(model)
    assert own_part(model.weight) is model.weight


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        (LoadOptions({"": "disk"}), "device_map=.*stay where they are"),
        (LoadOptions({"": "cpu", "weight": "meta"}), "device_map=.*stay where they are"),
        (LoadOptions(dtype=torch.float16), "dtype=torch.float16: parameters of this model are torch.float32"),
    ],
)
def test_what_cannot_be_done(wishes: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_options(nn.Linear(2, 2), wishes)


def test_what_changes_nothing_is_allowed() -> None:
    check_options(nn.Linear(2, 2), LoadOptions({"": "cpu"}, torch.float32))
