"""Copies for a writer that works while training goes on."""

from __future__ import annotations

import torch

from accelerate.checkpointing import Payload, StagingArea


def test_copies_hold_while_the_originals_change() -> None:
    weight = torch.ones(3)
    state = {"weight": weight, "same": weight, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "step": 3}
    (staged,) = StagingArea().stage([Payload("x", state)])
    weight.zero_()
    state["groups"][0]["lr"] = 9.0  # type: ignore[index]
    assert staged.content["weight"].tolist() == [1.0, 1.0, 1.0]
    assert staged.content["weight"] is staged.content["same"]
    assert staged.content["groups"] == [{"lr": 0.1, "betas": (0.9, 0.99)}]


def test_memory_is_used_again() -> None:
    area = StagingArea()
    first = area.stage([Payload("x", {"weight": torch.ones(3)})])[0].content["weight"]
    again = area.stage([Payload("x", {"weight": torch.zeros(3)})])[0].content["weight"]
    other = area.stage([Payload("x", {"weight": torch.zeros(5)})])[0].content["weight"]
    assert again is first
    assert other.shape == (5,)


def test_strided_and_sparse_tensors() -> None:
    tensors = {"t": torch.arange(6.0).view(2, 3).t(), "s": torch.eye(2).to_sparse()}
    (staged,) = StagingArea().stage([Payload("x", tensors)])
    assert torch.equal(staged.content["t"], tensors["t"])
    assert torch.equal(staged.content["s"].to_dense(), torch.eye(2))
