"""Tests of which parameters a loss depends on."""

from __future__ import annotations

import torch

from accelerate.strategies.deepspeed import leaves_of


def test_leaves_are_found_and_those_of_other_models_are_not():
    one, two = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    found = {id(leaf) for leaf in leaves_of(one(torch.ones(1, 2)).sum())}
    assert found == {id(p) for p in one.parameters()}
    assert not found & {id(p) for p in two.parameters()}
