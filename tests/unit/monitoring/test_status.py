"""Status files of ranks: written as a whole, read in order, damaged ones left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.monitoring import RankStatus, read_statuses


def test_the_last_status_of_each_rank_is_read(tmp_path: Path) -> None:
    for rank, step in ((1, 3), (0, 4), (1, 5)):
        RankStatus(rank=rank, world_size=2, time=1.0, step=step, values={"loss": 0.5}).write(tmp_path)
    (tmp_path / "rank-00002.json").write_text('{"rank": 2, "wor')
    (tmp_path / "rank-00003.json").write_text('{"rank": 3, "world_size": 4, "time": 1.0, "new": 1}')
    statuses = read_statuses(tmp_path)
    assert [(status.rank, status.step) for status in statuses] == [(0, 4), (1, 5), (3, 0)]
    assert statuses[0].values == {"loss": 0.5}


def test_a_folder_that_is_gone_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RankStatus(rank=0, world_size=1, time=1.0).write(tmp_path / "gone")
    assert list(tmp_path.iterdir()) == []
    assert read_statuses(tmp_path / "gone") == []
