"""Structures of tensors: applied to, moved, measured, sliced and joined."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple

import pytest
import torch
from hypothesis import given, strategies as st

from accelerate import nested
from accelerate.base import ConfigurationError

Point = namedtuple("Point", ["x", "y"])


class Encoding(UserDict):
    """Like a tokenizer's output: a mapping with its own `to`, without `non_blocking`."""

    moved_to = None

    def to(self, device):
        self.moved_to = device
        return self


class Movable:
    """An object that can be moved and takes every argument."""

    def to(self, *args, **kwargs):
        return (args, kwargs)


def structure():
    return {
        "a": torch.arange(6).reshape(3, 2),
        "b": [torch.ones(3), (torch.zeros(3, dtype=torch.bool), "text", None)],
        "c": Point(torch.ones(3, 1), 5),
        "d": OrderedDict(e=torch.zeros(())),
    }


leaves = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.integers(0, 4).map(torch.arange))
structures = st.recursive(
    leaves,
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.lists(below, max_size=3).map(tuple),
        st.tuples(below, below).map(lambda pair: Point(*pair)),
        st.dictionaries(st.text(max_size=3), below, max_size=3),
    ),
)


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    return first == second


@given(structures)
def test_applying_the_identity_rebuilds_the_structure(data):
    assert equal(nested.recursively_apply(lambda tensor: tensor, data), data)
    assert equal(nested.send_to_device(data, "cpu"), data)


def test_recursively_apply_passes_arguments_on():
    result = nested.recursively_apply(lambda t, a, b=0: t + a + b, structure(), 1, b=2)
    assert result["a"].tolist() == [[3, 4], [5, 6], [7, 8]]
    assert result["b"][1][1:] == ("text", None)
    assert isinstance(result["c"], Point)
    assert result["c"].y == 5
    assert isinstance(result["d"], OrderedDict)


def test_recursively_apply_on_other_leaves():
    assert nested.recursively_apply(str.upper, ["a", 1], test_type=lambda leaf: isinstance(leaf, str)) == [
        "A",
        1,
    ]
    with pytest.raises(TypeError, match="was passed a str"):
        nested.recursively_apply(torch.neg, [torch.ones(1), "text"], error_on_other_type=True)


def test_mappings_keep_their_type():
    data = defaultdict(list, a=torch.ones(2))
    assert nested.recursively_apply(torch.neg, data)["missing"] == []
    assert isinstance(nested.recursively_apply(torch.neg, UserDict(a=torch.ones(2))), UserDict)


@pytest.mark.parametrize(
    ("data", "is_one"), [(Point(1, 2), True), ((1, 2), False), ([1, 2], False), (torch.ones(2), False)]
)
def test_named_tuples_are_recognized(data, is_one):
    assert nested.is_namedtuple(data) is is_one


def test_tensors_are_recognised_by_type():
    assert nested.is_torch_tensor(torch.ones(1))
    assert not nested.is_torch_tensor([1])
    assert not nested.is_torch_xpu_tensor(torch.ones(1))
    assert nested.is_tensor_information(nested.TensorInformation(torch.Size([1]), torch.float32))


def test_moving_a_tensor_and_a_structure():
    moved = nested.send_to_device(structure(), "meta")
    assert moved["a"].device.type == moved["b"][1][0].device.type == moved["d"]["e"].device.type == "meta"
    assert moved["b"][1][1:] == ("text", None)
    tensor = torch.ones(2)
    assert nested.send_to_device(tensor, "cpu") is tensor


def test_a_move_waits_for_its_copies_by_default():
    class Recording:
        def to(self, device, non_blocking=None):
            return device, non_blocking

    assert nested.send_to_device(Recording(), "cpu") == ("cpu", False)
    assert nested.send_to_device([Recording()], "cpu", non_blocking=True) == [("cpu", True)]


def test_skipped_keys_stay():
    data = {"a": torch.ones(1), "b": {"a": torch.ones(1), "c": torch.ones(1)}}
    moved = nested.send_to_device(data, "meta", skip_keys="a")
    assert moved["a"] is data["a"]
    assert moved["b"]["a"] is data["b"]["a"]
    assert moved["b"]["c"].device.type == "meta"
    assert nested.send_to_device(data, "meta", skip_keys=["a", "b"])["b"] is data["b"]


def test_objects_that_move_themselves():
    encoding = Encoding(ids=torch.ones(1))
    assert nested.send_to_device([encoding], "meta", non_blocking=True)[0].moved_to == "meta"
    assert nested.send_to_device(Movable(), "meta", non_blocking=True) == (("meta",), {"non_blocking": True})


def test_errors_of_an_object_that_moves_itself_are_not_hidden():
    class Broken:
        def to(self, device, non_blocking=False):
            raise TypeError("broken")

    with pytest.raises(TypeError, match="broken"):
        nested.send_to_device(Broken(), "cpu")


def test_outlines_round_trip():
    data = structure()
    built = nested.initialize_tensors(nested.get_data_structure(data))
    assert nested.get_shape(built) == nested.get_shape(data)
    assert built["b"][1][0].dtype == torch.bool
    assert nested.get_shape(data)["a"] == [3, 2]


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (torch.ones(4, 2), 4),
        ({"text": ["a", "b"], "ids": torch.ones(2, 3)}, 2),
        ([torch.tensor(1.0), torch.ones(5)], 5),
        (Point(None, [torch.ones(0)]), 0),
    ],
)
def test_batch_size_is_that_of_the_first_tensor(data, size):
    assert nested.find_batch_size(data) == size
    assert nested.ignorant_find_batch_size(data) == size


def test_data_without_a_batch_size_is_refused():
    with pytest.raises(ConfigurationError, match="empty"):
        nested.find_batch_size([])
    for data in ("text", ["text"], torch.tensor(1)):
        with pytest.raises(TypeError, match="batch size"):
            nested.find_batch_size(data)
    assert nested.ignorant_find_batch_size([]) is None
    assert nested.ignorant_find_batch_size({"text": ["a"]}) is None


def test_finding_tensors_and_devices():
    assert nested.contains_tensor(structure())
    assert not nested.contains_tensor({"a": ["text", 1]})
    assert nested.find_device([1, {"a": torch.ones(1, device="meta")}]) == torch.device("meta")
    assert nested.find_device(["text"]) is None


def test_listify_returns_nested_lists_of_numbers():
    assert nested.listify({"a": torch.ones(2), "b": (torch.ones(1, dtype=torch.bfloat16),)}) == {
        "a": [1.0, 1.0],
        "b": ([1.0],),
    }


def test_slices_cut_all_tensors_of_a_structure():
    part = nested.slice_tensors(structure(), slice(1, 3), process_index=0, num_processes=2)
    assert part["a"].tolist() == [[2, 3], [4, 5]]
    assert part["c"].x.shape == (2, 1)
    assert part["d"]["e"].ndim == 0


@given(st.integers(1, 4), st.integers(1, 5))
def test_slices_join_to_the_original_data(parts, length):
    data = {
        "a": torch.arange(length),
        "b": [torch.ones(length, 2)],
        "c": Point(torch.zeros(length), torch.ones(length)),
    }
    bounds = [length * part // parts for part in range(parts + 1)]
    slices = [nested.slice_tensors(data, slice(*pair)) for pair in zip(bounds, bounds[1:], strict=False)]
    assert equal(nested.concatenate(slices), data)


def test_joining_plain_objects_and_other_dimensions():
    first = {"text": ["a", "b"], "x": torch.ones(1, 2)}
    second = {"text": ["c"], "x": torch.ones(1, 1)}
    assert nested.concatenate([first, second], dim=1)["text"] == ["a", "b", "c"]
    assert nested.concatenate([first, second], dim=1)["x"].shape == (1, 3)
    with pytest.raises(TypeError, match="this is a str"):
        nested.concatenate(["a", "b"])
    with pytest.raises(TypeError, match="this is a int"):
        nested.concatenate([{"a": 5}, {"a": 6}])


def test_a_single_leaf_of_any_type_is_itself():
    leaf = object()
    assert nested.concatenate([leaf]) is leaf
    assert nested.concatenate([None]) is None
    assert nested.concatenate([{"a": 5, "b": ("x", torch.ones(1))}]) == {"a": 5, "b": ("x", torch.ones(1))}


def test_codes_of_dtypes_are_the_interface():
    assert nested.TENSOR_TYPE_TO_INT[torch.float32] == 1
    assert nested.TENSOR_TYPE_TO_INT[torch.bool] == 10
    assert all(nested.TENSOR_INT_TO_DTYPE[code] == dtype for dtype, code in nested.TENSOR_TYPE_TO_INT.items())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:.*prototype")
def test_nested_tensors_are_measured_cut_and_joined(layout: torch.layout) -> None:
    rows = [torch.ones(2, 3), torch.zeros(1, 3), torch.ones(3, 3)]
    batch = {"x": torch.nested.nested_tensor(rows, layout=layout)}
    assert nested.find_batch_size(batch) == 3
    first, rest = nested.slice_tensors(batch, slice(0, 1)), nested.slice_tensors(batch, slice(1, None))
    assert [part.tolist() for part in rest["x"].unbind()] == [row.tolist() for row in rows[1:]]
    joined = nested.concatenate([first, rest])
    assert joined["x"].layout is layout
    assert nested.listify(joined) == {"x": [row.tolist() for row in rows]}


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:.*(beta|Sparse)")
def test_sparse_tensors_are_measured_cut_and_joined(layout: torch.layout) -> None:
    dense = torch.arange(8.0).view(4, 2)
    batch = [dense.to_sparse(layout=layout)]
    assert nested.find_batch_size(batch) == 4
    parts = [nested.slice_tensors(batch, slice(0, 1)), nested.slice_tensors(batch, slice(1, None))]
    assert parts[1][0].layout is layout
    joined = nested.concatenate(parts)
    assert joined[0].layout is layout
    assert nested.listify(joined) == [dense.tolist()]


def test_no_structures_are_not_concatenated() -> None:
    with pytest.raises(ConfigurationError, match=r"data=\[\]: there is nothing to concatenate") as raised:
        nested.concatenate([])
    assert isinstance(raised.value, IndexError)
