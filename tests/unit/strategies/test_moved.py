"""What has taken the place of a parameter is found by identity, in copies and pickles too."""

from __future__ import annotations

import gc
import pickle

import torch

from accelerate.strategies import Moved


def test_pairs_are_found_by_identity_as_long_as_the_old_one_is_held() -> None:
    first, second, new = (torch.ones(1) for _ in range(3))
    moved = Moved()
    moved[first] = new
    assert moved.get(first) is new  # type: ignore[no-untyped-call]
    assert second not in moved
    del first
    gc.collect()
    assert len(moved) == 0


def test_a_pickle_holds_the_pairs_of_what_is_pickled_beside_it() -> None:
    held, let_go, new = torch.ones(1), torch.zeros(1), torch.full((1,), 2.0)
    moved = Moved()
    moved[held] = new
    moved[let_go] = new
    twin, twin_held = pickle.loads(pickle.dumps((moved, held)))
    gc.collect()
    assert [(old is twin_held, found.item()) for old, found in twin.pairs()] == [(True, 2.0)]
