"""The metadata of a batch, saved and restored."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from accelerate.data_loader import get_batch_metadata, prepare_data_loader, set_batch_metadata

pytestmark = pytest.mark.usefixtures("states")


def test_batch_metadata_can_be_restored() -> None:
    loader = prepare_data_loader(DataLoader(list(range(3)), batch_size=2))
    rows = []
    for _ in loader:
        rows.append((loader.end_of_dataloader, loader.remainder, get_batch_metadata(loader)))
    assert [ended for ended, _, _ in rows] == [False, True]
    for ended, remainder, metadata in rows:
        set_batch_metadata(loader, metadata)
        assert (loader.end_of_dataloader, loader.remainder) == (ended, remainder)
        assert loader.position.is_over is ended


def test_batch_metadata_without_a_loader_is_empty() -> None:
    assert get_batch_metadata(None) == {}
    set_batch_metadata(None, {})
