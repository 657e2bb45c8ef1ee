"""A part as a chunk of bytes, and back."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from accelerate.data_loader import GlobalBatch, PackedPart, ReaderFailure, pack, unpack

DTYPES = [torch.bool, torch.int8, torch.uint8, torch.bfloat16, torch.float64, torch.complex64, torch.int32]


def rebuild(piece: PackedPart) -> Any:
    return unpack(pickle.loads(piece.spec), piece.chunk)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (5, 2), (16, 4)], ids=str)
def test_a_part_is_received_as_it_was_sent(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 9).to(dtype)
    sparse = torch.eye(2).to_sparse()
    turned = torch.arange(6.0).reshape(2, 3).T
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    batch = GlobalBatch(
        [{"x": tensor, "name": ["a", 1]}, (tensor + tensor, sparse, turned, None), conjugate, tensor],
        False,
        (1, 0, 1, 1),
    )
    first, second, third, fourth = (rebuild(pack(batch, group)) for group in range(4))
    assert first["name"] == ["a", 1]
    assert first["x"].dtype == dtype
    assert torch.equal(first["x"], tensor)
    assert torch.equal(second[0], tensor + tensor)
    assert torch.equal(second[1].to_dense(), torch.eye(2))
    assert torch.equal(second[2], turned)
    assert second[3] is None
    assert torch.equal(third, conjugate)
    assert fourth.dtype == dtype
    assert torch.equal(fourth, tensor)


def test_the_spec_has_outline_counts_and_size() -> None:
    spec = pickle.loads(pack(GlobalBatch(["a", "b"], True, (1, 0)), 1).spec)
    assert (spec.outline, spec.counts, spec.size) == ("b", (1, 0), 0)


def test_one_large_tensor_is_not_copied() -> None:
    tensor = torch.rand(64, 64)
    piece = pack(GlobalBatch([tensor], False), 0)
    assert piece.chunk.data_ptr() == tensor.data_ptr()
    assert len(piece.chunk) == tensor.nbytes


def test_equal_structures_have_equal_specs() -> None:
    def spec(scale: float, size: int = 4) -> bytes:
        return pack(GlobalBatch([{"x": torch.rand(size) * scale, "y": [torch.ones(2)]}], False), 0).spec

    assert spec(1.0) == spec(2.0)
    assert spec(1.0) != spec(1.0, 5)


def test_a_received_failure_is_raised_with_its_traceback() -> None:
    try:
        raise KeyError("gone")
    except KeyError as error:
        failure = ReaderFailure.of(error)
    with pytest.raises(KeyError, match="gone") as caught:
        failure.raise_here()
    assert "rank 0" in str(caught.value.__cause__)
    assert "raise KeyError" in str(caught.value.__cause__)
    assert "KeyError: 'gone'" in str(caught.value.__cause__)


class Unpicklable(Exception):
    """Cannot be made again from its pickle."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} has no {number}")


def test_a_failure_that_cannot_be_pickled_is_raised_as_text() -> None:
    failure = ReaderFailure.of(Unpicklable("dataset", 3))
    assert failure.error is None
    with pytest.raises(RuntimeError, match=r"rank 0(.|\n)*Unpicklable: dataset has no 3"):
        failure.raise_here()
