"""What dies with the last reference to an `Accelerator` and its loader."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize("is_open", [False, True])
def test_an_accelerator_its_loader_and_its_gradient_state_are_freed(is_open: bool) -> None:
    def make() -> list[weakref.ref[Any]]:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(torch.arange(8), batch_size=2))  # type: ignore[arg-type]
        iterator = iter(loader)
        if is_open:
            next(iterator)
        return [weakref.ref(each) for each in (accelerator, loader, accelerator.gradient_state)]

    references = make()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
