"""What a loader says of a batch, said again later."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from accelerate.data_loader import note_moment, prepare_data_loader, recall_moment

pytestmark = pytest.mark.usefixtures("states")


def test_a_loader_says_again_what_it_said() -> None:
    loader = prepare_data_loader(DataLoader(list(range(3)), batch_size=2))
    moments = []
    for _ in loader:
        moments.append((loader.end_of_dataloader, loader.remainder, note_moment(loader)))
    assert [ended for ended, _, _ in moments] == [False, True]
    for ended, remainder, moment in moments:
        recall_moment(loader, moment)
        assert (loader.end_of_dataloader, loader.remainder) == (ended, remainder)


def test_without_a_loader_there_is_nothing_to_say() -> None:
    assert note_moment(None) == {}
    recall_moment(None, {})
