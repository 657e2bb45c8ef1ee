"""Collectives of the accelerator on one process: every input is returned as it is."""

from __future__ import annotations

import pytest
import torch

from accelerate import Accelerator

pytestmark = pytest.mark.usefixtures("states")


def test_collectives_of_one_process_return_their_input() -> None:
    accelerator = Accelerator(cpu=True)
    data = {"a": torch.arange(3), "b": [torch.tensor(1.0)]}
    assert accelerator.gather(data) is data
    assert accelerator.gather_for_metrics(data) is data
    assert accelerator.gather_for_metrics(["x", "y"]) == ["x", "y"]
    assert accelerator.gather_for_metrics(data, use_gather_object=True) is data
    assert accelerator.pad_across_processes(data["a"], dim=0, pad_index=-1) is data["a"]
