"""The part of one process of inputs that all processes have."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import TensorDataset

from accelerate.base import ConfigurationError
from accelerate.state import plan_split, split_for_rank


@given(st.integers(0, 40), st.integers(1, 7), st.booleans())
def test_each_element_is_in_one_share_and_the_first_shares_are_larger(
    length: int, size: int, apply_padding: bool
) -> None:
    shares = [plan_split(length, size, rank, apply_padding) for rank in range(size)]
    assert [index for start, end, _ in shares for index in range(start, end)] == list(range(length))
    taken = [end - start for start, end, _ in shares]
    assert taken == sorted(taken, reverse=True)
    assert max(taken) - min(taken) <= 1
    padded = {end - start + padding for start, end, padding in shares}
    assert padded == ({max(taken)} if apply_padding else set(taken))


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([1, 2, 3, 4, 5], [[1, 2], [3, 4], [5]]),
        ((1, 2, 3, 4), [(1, 2), (3,), (4,)]),
        ("abcd", ["ab", "c", "d"]),
        (range(4), [range(2), range(2, 3), range(3, 4)]),
        ([1, 2], [[1], [2], []]),
        ([], [[], [], []]),
        (
            {"a": [1, 2, 3, 4], "b": (5, 6, 7, 8)},
            [{"a": [1, 2], "b": (5, 6)}, {"a": [3], "b": (7,)}, {"a": [4], "b": (8,)}],
        ),
        ({"a": {"b": [1, 2, 3]}}, [{"a": {"b": [1]}}, {"a": {"b": [2]}}, {"a": {"b": [3]}}]),
    ],
)
def test_without_padding(inputs: Any, expected: list[Any]) -> None:
    assert [split_for_rank(inputs, 3, rank) for rank in range(3)] == expected


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([1, 2, 3, 4, 5], [[1, 2], [3, 4], [5, 5]]),
        ((1, 2, 3, 4), [(1, 2), (3, 3), (4, 4)]),
        ("abcd", ["ab", "cc", "dd"]),
        (range(4), [range(2), [2, 2], [3, 3]]),
        ([1], [[1], [1], [1]]),
        ([], [[], [], []]),
        ({"a": [1, 2], "b": "xy"}, [{"a": [1], "b": "x"}, {"a": [2], "b": "y"}, {"a": [2], "b": "y"}]),
    ],
)
def test_with_padding(inputs: Any, expected: list[Any]) -> None:
    assert [split_for_rank(inputs, 3, rank, apply_padding=True) for rank in range(3)] == expected


def test_tensors_and_arrays() -> None:
    rows = torch.arange(8).reshape(4, 2)
    assert split_for_rank(rows, 3, 0).tolist() == [[0, 1], [2, 3]]
    assert split_for_rank(rows, 3, 2, apply_padding=True).tolist() == [[6, 7], [6, 7]]
    array = np.arange(2)
    last = split_for_rank(array, 3, 2, apply_padding=True)
    assert isinstance(last, np.ndarray)
    assert last.tolist() == [1]
    assert split_for_rank(array, 3, 2).tolist() == []


def test_mappings_keep_their_kind() -> None:
    counted = defaultdict(list, a=[1, 2, 3])
    share = split_for_rank(counted, 3, 1)
    assert type(share) is defaultdict
    assert share["new"] == []
    assert counted == {"a": [1, 2, 3]}
    ordered = split_for_rank(OrderedDict(b=[1, 2], a=[3, 4]), 2, 1)
    assert ordered == OrderedDict(b=[2], a=[4])
    encoded = UserDict(ids=torch.arange(4))
    share = split_for_rank(encoded, 2, 1)
    assert type(share) is UserDict
    assert share["ids"].tolist() == [2, 3]
    assert encoded["ids"].tolist() == [0, 1, 2, 3]


class Rows:
    """Replaces `datasets.Dataset`, which is recognised by its module and selects by index."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Any) -> Rows:
        if isinstance(indices, range) and self.rows and indices.start >= len(self.rows):
            raise IndexError(indices.start)
        return Rows([self.rows[index] for index in indices])


Rows.__module__ = "datasets.arrow_dataset"


def test_datasets_are_selected_from() -> None:
    rows = Rows([10, 11, 12, 13])
    assert [split_for_rank(rows, 3, rank).rows for rank in range(3)] == [[10, 11], [12], [13]]
    padded = [split_for_rank(rows, 3, rank, apply_padding=True).rows for rank in range(3)]
    assert padded == [[10, 11], [12, 12], [13, 13]]
    assert split_for_rank(Rows([7]), 2, 1, apply_padding=True).rows == [7]
    for padding, expected in ((False, [[7], [], []]), (True, [[7]] * 3)):
        assert [split_for_rank(Rows([7]), 3, rank, padding).rows for rank in range(3)] == expected
        assert [split_for_rank(Rows([]), 3, rank, padding).rows for rank in range(3)] == [[]] * 3
        named = [split_for_rank({"a": Rows([7])}, 3, rank, padding)["a"].rows for rank in range(3)]
        assert named == expected


class Frame:
    """Replaces a data frame of pandas, which iterates over its columns, and whose `iloc` selects rows."""

    def __init__(self, rows: list[int]) -> None:
        self.rows, self.iloc = rows, self

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __getitem__(self, key: Any) -> Frame:
        return Frame(self.rows[key] if isinstance(key, slice) else [self.rows[index] for index in key])


def test_data_frames_and_datasets_of_torch_are_split_by_rows() -> None:
    frame = Frame([10, 11, 12, 13])
    pairs = TensorDataset(torch.arange(4), torch.arange(10, 14))
    for padding, expected in ((False, [[10, 11], [12], [13]]), (True, [[10, 11], [12, 12], [13, 13]])):
        shards = [split_for_rank(frame, 3, rank, padding) for rank in range(3)]
        assert [shard.rows for shard in shards] == expected
        subsets = [split_for_rank(pairs, 3, rank, padding) for rank in range(3)]
        assert [[int(label) for _, label in subset] for subset in subsets] == expected


def test_entries_of_different_length_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'a': 2, 'b': 3.*must be of one length"):
        split_for_rank({"a": [1, 2], "b": [1, 2, 3]}, 2, 0)


@pytest.mark.parametrize("inputs", [3, iter([1]), {"a": 3}])
def test_inputs_without_a_length_are_refused(inputs: Any) -> None:
    with pytest.raises(ConfigurationError, match="has no length"):
        split_for_rank(inputs, 2, 0)


@pytest.mark.parametrize("inputs", [{1, 2, 3}, deque([1, 2, 3])])
def test_inputs_that_cannot_be_sliced_are_refused(inputs: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be sliced"):
        split_for_rank(inputs, 2, 0)


def test_a_tensor_without_dimensions_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no length"):
        split_for_rank(torch.tensor(3.0), 2, 0)
