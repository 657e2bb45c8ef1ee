"""Parameters that have taken the places of others are found by identity, in copies and pickles too."""

from __future__ import annotations

import gc
import pickle

import torch

from accelerate.strategies import ReplacedParameters


def test_pairs_are_found_by_identity_as_long_as_the_old_one_is_held() -> None:
    first, second, new = (torch.ones(1) for _ in range(3))
    replaced = ReplacedParameters()
    replaced[first] = new
    assert replaced.get(first) is new  # type: ignore[no-untyped-call]
    assert second not in replaced
    del first
    gc.collect()
    assert len(replaced) == 0


def test_a_pickle_holds_the_pairs_of_what_is_pickled_beside_it() -> None:
    held, let_go, new = torch.ones(1), torch.zeros(1), torch.full((1,), 2.0)
    replaced = ReplacedParameters()
    replaced[held] = new
    replaced[let_go] = new
    copied, copied_held = pickle.loads(pickle.dumps((replaced, held)))
    gc.collect()
    assert [(old is copied_held, value.item()) for old, value in copied.items()] == [(True, 2.0)]
