"""Values of copies of the model are averaged and gathered over the copies only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.strategies.megatron import (
    avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups,
)

from .conftest import Fake


@pytest.fixture
def two_copies(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        tensor += 1  # what the other copy has

    def all_gather(gathered: list[torch.Tensor], tensor: torch.Tensor, group: Any) -> None:
        for place, each in enumerate(gathered):
            each.copy_(tensor + place)

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)


@pytest.mark.usefixtures("two_copies")
def test_averages() -> None:
    losses = [torch.tensor(3.0, requires_grad=True), torch.tensor([5.0])]
    averaged = avg_losses_across_data_parallel_group(losses)
    assert averaged.tolist() == [2.0, 3.0]
    assert not averaged.requires_grad


@pytest.mark.usefixtures("two_copies")
def test_gathered() -> None:
    gathered = gather_across_data_parallel_groups({"a": torch.tensor([[1, 2]]), "b": torch.tensor(4)})
    assert gathered["a"].tolist() == [[1, 2], [2, 3]]
    assert gathered["b"].tolist() == [4, 5]
