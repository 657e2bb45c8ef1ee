"""Units of both versions of FSDP synchronize gradients inside the block, and not after it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from accelerate.strategies.dtensors import gradient_sync


class Wrapper(nn.Module):
    _sync_gradients = False


class InPlace(nn.Module):
    syncs = False

    def set_requires_gradient_sync(self, flag: bool, recurse: bool = True) -> None:
        assert not recurse
        self.syncs = flag


def states(model: Any) -> list[bool]:
    return [model[0]._sync_gradients, model[1].syncs]


def test_sync_of_units_is_set_and_reset() -> None:
    model = nn.Sequential(Wrapper(), InPlace(), nn.Linear(1, 1))
    with gradient_sync(model):
        assert states(model) == [True, True]
    assert states(model) == [False, False]
    with pytest.raises(KeyError), gradient_sync(model):
        raise KeyError
    assert states(model) == [False, False]
