"""Inputs that are divided, heads that are repeated, and the number of batches of transformers' Trainer."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn

from accelerate import ParallelismConfig
from accelerate.base import ConfigurationError, PreparationError
from accelerate.planning import Layout
from accelerate.strategies.axes import ContextAxis, SequenceAxis
from accelerate.strategies.axes.head_exchange import repeats_of
from accelerate.strategies.axes.sequence_inputs import beginning, inputs_of, length_of, sharded
from accelerate.strategies.axes.sequence_models import check_model
from accelerate.strategies.axes.sequence_shards import SequenceRanks, divide
from accelerate.strategies.axes.trainer_batches import count_whole_batches
from accelerate.strategies.axes.whole_losses import named_arguments


class Group:
    """Process group of a rank."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Mesh:
    """Device mesh with one dimension."""

    def __init__(self, size: int, rank: int) -> None:
        self._group = Group(size, rank)

    def size(self) -> int:
        return self._group.size()

    def get_group(self) -> Group:
        return self._group


def ranks_of(heads: int, keys: int = 1, rank: int = 0) -> SequenceRanks:
    """Returns the ranks of a run that exchange heads, and keys and values."""
    exchange = Group(heads, rank % heads)
    ring = Mesh(keys, rank // heads) if keys > 1 else None
    return SequenceRanks(Group(heads * keys, rank), exchange, ring)


@pytest.mark.parametrize(
    ("length", "ranks", "sizes"), [(8, 2, (4, 4)), (9, 2, (5, 4)), (5, 4, (2, 1, 1, 1)), (4, 4, (1,) * 4)]
)
def test_shards_differ_by_one_position(length: int, ranks: int, sizes: tuple[int, ...]) -> None:
    shards = [divide(length, ranks_of(ranks, rank=rank)) for rank in range(ranks)]
    assert shards[0].sizes == sizes
    whole = torch.arange(length)
    assert torch.cat([each.shard(whole, 0) for each in shards]).equal(whole)
    assert shards[0].exchange is shards[0]
    assert shards[0].blocks is None


@pytest.mark.parametrize(
    ("length", "heads", "keys", "positions"),
    [
        (8, 2, 2, [[0, 1], [6, 7], [2, 3], [4, 5]]),
        (7, 2, 2, [[0, 1], [6], [2, 3], [4, 5]]),
        (10, 2, 2, [[0, 1], [2, 9], [3, 4, 5], [6, 7, 8]]),
        (12, 1, 3, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        (3, 2, 2, [[0], [], [1], [2]]),
    ],
)
def test_ranks_of_a_ring_have_a_chunk_from_each_end(
    length: int, heads: int, keys: int, positions: list[list[int]]
) -> None:
    whole = torch.arange(length).unsqueeze(0)
    ranks = range(heads * keys)
    shards = [divide(length, ranks_of(heads, keys, rank)) for rank in ranks]
    parts = [each.shard(whole, 1) for each in shards]
    assert [part[0].tolist() for part in parts] == positions
    assert [shards[0].shard(whole, 1, rank)[0].tolist() for rank in ranks] == positions
    assert all(each.length == length and each.own == len(positions[each.rank]) for each in shards)
    if all(positions):
        assert shards[0].assemble(parts, 1).equal(whole)
    for each in shards:
        block = [n for part in positions[each.rank // heads * heads :][:heads] for n in part]
        assert each.exchange.length == len(block)
        assert each.exchange.own == each.own
        assert each.blocks is not None
        assert each.blocks.shard(whole, 1)[0].tolist() == block


def test_ranks_of_a_ring_have_the_heads_of_their_exchange() -> None:
    heads = [divide(8, ranks_of(2, 2, rank)).heads(torch.arange(4), 0).tolist() for rank in range(4)]
    assert heads == [[0, 1], [2, 3], [0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("queries", "keys", "ranks", "repeats"),
    [(8, 8, 4, 1), (8, 2, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8), (6, 3, 2, 2), (12, 4, 6, 3)],
)
def test_each_rank_has_the_keys_of_its_queries(queries: int, keys: int, ranks: int, repeats: int) -> None:
    assert repeats_of(queries, keys, ranks) == repeats
    keys_of_queries = torch.arange(keys).repeat_interleave(queries // keys)
    repeated = torch.arange(keys).repeat_interleave(repeats)
    groups = queries // len(repeated)
    for own, mine in zip(keys_of_queries.chunk(ranks), repeated.chunk(ranks), strict=True):
        assert mine.repeat_interleave(groups).equal(own)


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="6 heads .* sp_size=4 does not divide"):
        repeats_of(6, 3, 4)


class Model(nn.Module):
    """Takes inputs of many kinds."""

    def forward(self, x: Any, position_ids: Any = None, attention_mask: Any = None, bias: Any = None) -> None:
        """Does nothing."""


def shapes(dims: dict[str, int | None], **tensors: torch.Tensor) -> dict[str, list[int]]:
    shards = divide(5, ranks_of(2))
    divided = sharded(inputs_of(Model(), (), tensors), shards, dims)
    return {name: list(tensor.shape) for name, tensor in divided.tensors()}


def test_inputs_are_divided_by_their_names_and_shapes() -> None:
    found = shapes(
        {"bias": None},
        x=torch.zeros(4, 5, 2),
        position_ids=torch.zeros(3, 4, 5),
        attention_mask=torch.zeros(4, 5),
        bias=torch.zeros(4, 5),
        matrix=torch.zeros(1, 5, 5),
        square=torch.zeros(5, 5, dtype=torch.long),
        other=torch.zeros(4, 7),
        vector=torch.zeros(5),
    )
    assert found == {
        "x": [4, 3, 2],
        "position_ids": [3, 4, 3],
        "attention_mask": [4, 5],
        "bias": [4, 5],
        "matrix": [1, 5, 5],
        "square": [5, 3],
        "other": [4, 7],
        "vector": [5],
    }


def test_inputs_in_mappings_and_sequences_are_divided() -> None:
    shards = divide(5, ranks_of(2, rank=1))
    inputs = inputs_of(Model(), ({"x": torch.zeros(4, 5), "mask": torch.zeros(4, 5)}, [torch.ones(4, 5)]), {})
    divided = sharded(inputs, shards, {})
    assert [(name, list(tensor.shape)) for name, tensor in divided.tensors()] == [
        ("x", [4, 2]),
        ("mask", [4, 5]),
        ("position_ids", [4, 2]),
    ]


def test_the_beginning_of_inputs_has_whole_masks() -> None:
    inputs = inputs_of(
        Model(),
        (torch.zeros(4, 6),),
        {"attention_mask": torch.zeros(4, 1, 6, 6), "cu_seq_lens": torch.arange(7)},
    )
    cut = {name: list(tensor.shape) for name, tensor in beginning(inputs, 6, 4, {}).tensors()}
    assert cut == {"x": [4, 4], "attention_mask": [4, 1, 4, 4], "cu_seq_lens": [5]}


def test_a_forward_without_sequences_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Model gets no tensor of shape"):
        length_of(inputs_of(Model(), (torch.zeros(3),), {}), "Model")


def test_plans_divide_activations_by_the_ranks_of_sequences() -> None:
    sizes = ParallelismConfig(cp_size=2, sp_size=2, sp_backend="torch")
    request = SimpleNamespace(parallelism=sizes)
    context = SimpleNamespace(mesh={"cp": Mesh(2, 0)}, request=request, mixed_precision="no")
    strategy = SimpleNamespace(context=context)
    both = SequenceAxis(strategy).memory_layout(Layout(shards=8))
    assert (both.name, both.samples_per_batch) == ("ddp + cp 2 + sp 2", 2)
    assert ContextAxis(strategy).memory_layout(Layout(shards=8)).name == "ddp + cp 2"


class MambaMixer(nn.Module):
    """Layer that is named like a recurrent one."""


def with_config(**fields: Any) -> nn.Module:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(**fields)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(MambaMixer()), r"Sequential.0 \(MambaMixer\) carries a state"),
        (nn.Sequential(nn.LSTM(1, 1)), "LSTM.* carries a state"),
        (nn.Sequential(nn.Conv1d(1, 1, 3)), "convolution over time"),
        (with_config(is_encoder_decoder=True), "an encoder and a decoder"),
        (with_config(layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (with_config(num_attention_heads=6), "6 attention heads, which sp_size=2 with tp_size=2"),
    ],
)
def test_models_that_combine_positions_are_refused(model: nn.Module, reason: str) -> None:
    with pytest.raises(PreparationError, match=reason):
        check_model(model, 2, 2)


def test_models_with_attention_only_are_taken() -> None:
    check_model(nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(1, 1)), 2, 1)
    check_model(with_config(num_attention_heads=8, layer_types=["sliding_attention", "full_attention"]), 2, 2)
    check_model(with_config(_attn_implementation="flash_attention_2"), 2, 1)
    check_model(with_config(_attn_implementation="eager"), 2, 1, ring=2)


def test_attention_that_takes_keys_of_the_queries_only_is_refused() -> None:
    with pytest.raises(PreparationError, match="'flash_attention_2'.* cp_size=2 with sp_size=2 gives"):
        check_model(with_config(_attn_implementation="flash_attention_2"), 2, 1, ring=2)


class Trainer:
    """Counts as transformers' Trainer does."""

    def __init__(self, backend: Literal["deepspeed", "torch"], cp_size: int = 1) -> None:
        parallelism = ParallelismConfig(sp_size=2, sp_backend=backend, cp_size=cp_size)
        self.accelerator = SimpleNamespace(parallelism_config=parallelism)

    def get_sp_size(self) -> int:
        return int(self.accelerator.parallelism_config.sp_size)

    def get_cp_size(self) -> int:
        return int(self.accelerator.parallelism_config.cp_size)

    def get_total_train_batch_size(self, args: Any) -> int:
        return 8 // self.get_sp_size() // self.get_cp_size()


def test_the_trainer_counts_whole_batches_with_torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(Trainer):
        """Class that is changed."""

    monkeypatch.setitem(sys.modules, "transformers.trainer", SimpleNamespace(Trainer=Counted))
    for _ in range(2):
        count_whole_batches()
    sizes = {
        backend: (Counted(backend).get_sp_size(), Counted(backend).get_total_train_batch_size(None))
        for backend in ("torch", "deepspeed")
    }
    assert sizes == {"torch": (1, 4), "deepspeed": (2, 4)}
    both = Counted("torch", cp_size=2)
    assert (both.get_sp_size(), both.get_cp_size(), both.get_total_train_batch_size(None)) == (1, 1, 2)


def test_positional_arguments_of_cross_entropy_are_named() -> None:
    args = (torch.zeros(2, 3), torch.zeros(2), None, None, -100, None, "mean", 0.1)
    named = named_arguments(args, {})
    assert named["reduction"] == "mean"
    assert named["label_smoothing"] == 0.1
