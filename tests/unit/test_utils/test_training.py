"""A line that a model learns."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.test_utils import (
    RegressionDataset,
    RegressionModel,
    mocked_dataloaders,
    mocked_dataloaders_for_autoregressive_models,
)


def test_points_are_near_the_line_and_follow_the_seed() -> None:
    points, same, other = (RegressionDataset(length=50, seed=seed) for seed in (1, 1, 2))
    assert len(points) == 50
    assert points[3] == same[3] != other[3]
    assert abs(points.y - (2 * points.x + 3)).max() < 0.5
    assert points[0]["x"].dtype == "float32"


@pytest.mark.usefixtures("states")
def test_the_model_learns_the_line() -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = RegressionModel(), DataLoader(RegressionDataset(seed=0), batch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(30):
        for batch in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]))
            optimizer.step()
            optimizer.zero_grad()
    assert model.a.item() == pytest.approx(2, abs=0.1)
    assert model.b.item() == pytest.approx(3, abs=0.1)


def test_a_model_without_input_raises_an_error() -> None:
    with pytest.raises(ValueError, match="the model has no input"):
        RegressionModel()(None)


def test_loaders_of_texts() -> None:
    train, evaluation = mocked_dataloaders(None, batch_size=4)
    batch, larger = next(iter(train)), next(iter(evaluation))
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, 16)
    assert (batch["labels"].shape, larger["labels"].shape) == ((4,), (8,))
    _, words = mocked_dataloaders_for_autoregressive_models(None)
    batch = next(iter(words))
    assert torch.equal(batch["labels"], batch["input_ids"])
