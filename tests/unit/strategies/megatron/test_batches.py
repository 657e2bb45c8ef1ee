"""Batches are filled up where their shape is fixed, and cut into micro-batches."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from accelerate.base import ConfigurationError
from accelerate.strategies.megatron import BatchShape


def arguments(**given: Any) -> Namespace:
    values = {
        "sequence_parallel": False,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "micro_batch_size": 2,
        "num_micro_batches": 2,
        "seq_length": 4,
        "encoder_seq_length": None,
        "decoder_seq_length": None,
        "model_type_name": "gpt",
    }
    return Namespace(**{**values, **given})


def batch(rows: int, columns: int = 3) -> dict[str, torch.Tensor]:
    tokens = torch.ones(rows, columns, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone(), "kind": torch.ones(rows)}


@pytest.mark.parametrize(
    "fixing", [{"pipeline_model_parallel_size": 2}, {"sequence_parallel": True}, {"context_parallel_size": 2}]
)
def test_fixed_shapes_are_filled_with_what_does_not_count(fixing: dict[str, Any]) -> None:
    filled = BatchShape(arguments(**fixing)).pad(batch(3))
    assert {name: tuple(tensor.shape) for name, tensor in filled.items()} == {
        "input_ids": (4, 4),
        "labels": (4, 4),
        "kind": (4,),
    }
    assert filled["labels"][0].tolist() == [1, 1, 1, -100]
    assert filled["labels"][3].tolist() == [-100] * 4
    assert filled["input_ids"][0].tolist() == [1, 1, 1, 0]


def test_decoders_have_a_length_of_their_own() -> None:
    args = arguments(model_type_name="t5", sequence_parallel=True, encoder_seq_length=6, decoder_seq_length=4)
    filled = BatchShape(args).pad(batch(4))
    assert (filled["input_ids"].shape[1], filled["labels"].shape[1]) == (6, 4)


def test_larger_batches_are_refused() -> None:
    shape = BatchShape(arguments(pipeline_model_parallel_size=2))
    with pytest.raises(
        ConfigurationError, match=r"input_ids=\[4, 5\]: sequences are longer than the 4.*seq_length"
    ):
        shape.pad(batch(4, 5))
    with pytest.raises(ConfigurationError, match="more samples than the 4"):
        shape.pad(batch(5, 4))


@pytest.mark.parametrize(("rows", "sizes"), [(4, [2, 2]), (3, [2, 1]), (1, [1])])
def test_a_batch_is_split_into_micro_batches(rows: int, sizes: list[int]) -> None:
    cut = BatchShape(arguments()).split(batch(rows))
    assert [len(each["input_ids"]) for each in cut] == sizes
