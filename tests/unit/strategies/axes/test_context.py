"""The attention that context parallelism computes or refuses, without processes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import ConfigurationError
from accelerate.strategies.axes import ContextAxis
from accelerate.strategies.axes.masks import attend, causal_arguments, checks_enabled, window_of


class Attention(nn.Module):
    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return kwargs


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = Attention(), Attention()


class Language(nn.Module):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None) -> None:
        pass


HIDDEN, LENGTH = torch.ones(1), 16
CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()


@pytest.fixture
def whole() -> Iterator[torch.Tensor]:
    """A buffer, in whose block sequences are sharded."""
    buffer = torch.arange(LENGTH).expand(2, -1).clone()
    with checks_enabled([buffer], [1]):
        yield buffer


def transformed(model: nn.Module) -> Any:
    request = SimpleNamespace(parallelism=SimpleNamespace(cp_handler=None))
    context = SimpleNamespace(mesh=None, mixed_precision="no", request=request)
    ContextAxis(SimpleNamespace(context=context)).transform_model(model)
    return model


def test_causal_masks_are_dropped_inside_the_block(whole: torch.Tensor) -> None:
    model = transformed(Model())
    assert model.self_attn(HIDDEN, other=1) == {"other": 1}
    for mask in (None, CAUSAL[None, None], CAUSAL.float().log()):
        assert model.self_attn(HIDDEN, attention_mask=mask) == {"attention_mask": None, "is_causal": True}
    assert model.cross_attn(HIDDEN, attention_mask=CAUSAL)["attention_mask"] is CAUSAL


def test_masks_stay_outside_of_the_block() -> None:
    model = transformed(Model())
    assert model.self_attn(HIDDEN, attention_mask=CAUSAL)["attention_mask"] is CAUSAL


def test_prepared_models_are_copied_and_pickled(whole: torch.Tensor) -> None:
    for copied in (copy.deepcopy(transformed(Model())), pickle.loads(pickle.dumps(transformed(Model())))):
        with pytest.raises(ConfigurationError, match="self_attn"):
            copied.self_attn(HIDDEN, attention_mask=torch.ones(4, 4, dtype=torch.bool))


def test_layers_that_attend_to_later_positions_are_refused(whole: torch.Tensor) -> None:
    model = transformed(Model())
    prefix = CAUSAL.clone()
    prefix[:2, :2] = True
    with pytest.raises(ConfigurationError, match="self_attn gets a mask that lets positions attend to later"):
        model.self_attn(HIDDEN, attention_mask=prefix)
    model.self_attn.is_causal = False
    with pytest.raises(ConfigurationError, match=r"self_attn .*is_causal=False"):
        model.self_attn(HIDDEN, attention_mask=None)


def test_a_bias_in_a_mask_raises_an_error(whole: torch.Tensor) -> None:
    model = Model()
    model.config = config(alibi=True)  # type: ignore[assignment]
    transformed(model)
    alibi = torch.arange(4.0).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)
    with pytest.raises(ConfigurationError, match="self_attn adds a bias .* by alibi=True of SimpleNamespace"):
        model.self_attn(HIDDEN, attention_mask=alibi[None, None])
    per_key = torch.arange(4.0)[None, None, None]
    with pytest.raises(ConfigurationError, match="self_attn adds a bias"):
        model.self_attn(HIDDEN, attention_mask=per_key)


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("of_layer", "of_config", "expected"),
    [
        ({}, None, None),
        ({}, config(sliding_window=8), "sliding_window=8"),
        ({}, config(sliding_window=None), None),
        ({"sliding_window": None}, config(sliding_window=8), None),
        ({"sliding_window": 4}, config(sliding_window=8), "sliding_window=4"),
        ({"is_sliding": False}, config(sliding_window=8), None),
        ({"layer_idx": 1}, config(sliding_window=8, layer_types=[SLIDING, FULL]), None),
        ({"layer_idx": 0}, config(sliding_window=8, layer_types=[SLIDING, FULL]), "sliding_window=8"),
        ({"layer_idx": 0}, config(attention_chunk_size=4, layer_types=["chunked_attention"]), "chunk_size=4"),
        ({"layer_idx": 0}, config(layer_types=["compressed_sparse_attention"]), "layer_types"),
        ({}, config(attention_chunk_size=4), "attention_chunk_size=4"),
        ({"layer_idx": 0}, config(sliding_window=8, use_sliding_window=False), None),
        ({"layer_idx": 0}, config(sliding_window=8, use_sliding_window=True, max_window_layers=1), None),
        ({"layer_idx": 1}, config(sliding_window=8, use_sliding_window=True, max_window_layers=1), "=8"),
    ],
)
def test_windows_of_layers(of_layer: dict[str, Any], of_config: Any, expected: str | None) -> None:
    layer = Attention()
    for name, value in of_layer.items():
        setattr(layer, name, value)
    window = window_of(layer, of_config)
    assert (window is None) if expected is None else (window is not None and expected in window[0])


@pytest.mark.parametrize(("size", "is_refused"), [(LENGTH - 1, True), (LENGTH, False)])
def test_windows_shorter_than_the_sequence_are_refused(
    whole: torch.Tensor, size: int, is_refused: bool
) -> None:
    model = Model()
    model.config = config(sliding_window=size)  # type: ignore[assignment]
    transformed(model)
    if is_refused:
        with pytest.raises(ConfigurationError, match=r"self_attn .*16 by sliding_window=15"):
            model.self_attn(HIDDEN, attention_mask=None)
    else:
        assert model.self_attn(HIDDEN, attention_mask=None)["is_causal"]


def test_attention_that_does_not_reach_over_ranks_is_refused(whole: torch.Tensor) -> None:
    model = Model()
    model.config = config(_attn_implementation="eager")  # type: ignore[assignment]
    transformed(model)
    with pytest.raises(ConfigurationError, match="'eager'.*attn_implementation='sdpa'"):
        model.self_attn(HIDDEN, attention_mask=None)


ROW = list(range(LENGTH))
REAL, PADDED = [1] * LENGTH, [1] * 12 + [0] * 4


@pytest.mark.parametrize(
    ("positions", "mask", "error"),
    [
        (ROW, None, None),
        ([*range(3, 3 + LENGTH)], None, None),
        (ROW, REAL, None),
        (ROW, PADDED, None),
        ([*range(12), 0, 0, 0, 0], PADDED, None),
        ([*range(12), 0, 0, 0, 0], None, "position_ids that restart"),
        ([*range(8), *range(8)], None, "position_ids that restart"),
        ([*range(8), *range(8)], REAL, "position_ids that restart"),
        (ROW, PADDED[::-1], "padding before tokens"),
        (ROW, [1] * 8 + [2] * 8, "numbers packed sequences"),
        (None, REAL, "no position_ids"),
    ],
)
def test_inputs_of_models(positions: list[int] | None, mask: list[int] | None, error: str | None) -> None:
    model = transformed(Language())
    given = [
        None if row is None else torch.tensor([ROW if row is None else row]) for row in (positions, mask)
    ]
    buffers = [torch.zeros(1, LENGTH), *(tensor for tensor in given if tensor is not None)]
    with checks_enabled(buffers, [1] * len(buffers)):
        for buffer in buffers:  # as torch does
            buffer.resize_(1, LENGTH // 2)
        if error is None:
            model(buffers[0], given[1], position_ids=given[0])
            return
        with pytest.raises(ConfigurationError, match=error):
            model(buffers[0], given[1], position_ids=given[0])
    model(buffers[0])  # outside of the block nothing is checked


class PreTrainedModel(nn.Module):
    """Base class of models, with the name of that of transformers."""


class Decoder(nn.Module):
    """Model that counts positions itself, with an embedding that has position_ids as an option."""

    def __init__(self, embedding: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> None:
        pass


class Embedding(nn.Module):
    def forward(self, input_ids: Any, position_ids: Any = None) -> None:
        pass


class PreTrainedDecoder(Decoder, PreTrainedModel):
    pass


@pytest.mark.parametrize("part", [None, Embedding(), Decoder()])
def test_transformers_models_without_position_ids_raise_an_error(
    whole: torch.Tensor, part: nn.Module | None
) -> None:
    model = transformed(PreTrainedDecoder(part))
    for given in ({}, {"position_ids": whole}):
        with pytest.raises(ConfigurationError, match="PreTrainedDecoder takes no position_ids"):
            model(whole, **given)


def test_models_that_may_read_position_ids_from_kwargs_work(whole: torch.Tensor) -> None:
    transformed(PreTrainedDecoder(Language()))(whole, position_ids=whole)
    transformed(Decoder())(whole, position_ids=whole)


def test_layers_of_other_kinds_are_refused(whole: torch.Tensor) -> None:
    model = Language()
    model.config = config(layer_types=["linear_attention", FULL])  # type: ignore[assignment]
    transformed(model)
    with pytest.raises(ConfigurationError, match=r"layer_types .*linear_attention"):
        model(whole, None, whole)


def test_calls_with_causal_masks_become_causal() -> None:
    heads = (HIDDEN, HIDDEN, HIDDEN)
    assert causal_arguments(heads, {"is_causal": True})["is_causal"]
    for mask in (CAUSAL, CAUSAL[None].float().log()):
        given = causal_arguments((*heads, mask, 0.0), {"scale": 2.0})
        assert "attn_mask" not in given
        assert (given["is_causal"], given["dropout_p"], given["scale"]) == (True, 0.0, 2.0)
    for mask in (~CAUSAL, CAUSAL.float(), torch.ones(4, 8, dtype=torch.bool).tril()):
        with pytest.raises(ConfigurationError, match="attn_mask"):
            causal_arguments(heads, {"attn_mask": mask})
    with pytest.raises(ConfigurationError, match="is_causal=False"):
        causal_arguments(heads, {})


class Dropping(Attention):
    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> Any:
        return causal_arguments((hidden, hidden, hidden), {"is_causal": True, "dropout_p": 0.1})


@pytest.mark.parametrize(
    ("field", "source"), [("attn_pdrop", "attn_pdrop=0.1 of SimpleNamespace"), ("dropout", "dropout_p=0.1")]
)
def test_dropout_of_attention_raises_an_error_that_names_it(
    whole: torch.Tensor, field: str, source: str
) -> None:
    model = Model()
    model.self_attn = Dropping()
    model.config = config(**{field: 0.1})  # type: ignore[assignment]
    transformed(model)
    with pytest.raises(ConfigurationError, match=f"self_attn drops attention weights by {source}"):
        model.self_attn(HIDDEN)


def test_errors_outside_of_attention_layers_name_the_function(whole: torch.Tensor) -> None:
    transformed(Model()).self_attn(HIDDEN)
    with pytest.raises(ConfigurationError, match="scaled_dot_product_attention is called with is_causal=Fal"):
        causal_arguments((HIDDEN, HIDDEN, HIDDEN), {})


def compute(shapes: tuple[tuple[int, ...], ...], **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    query = query.mT.contiguous().mT  # with another stride in the last dimension
    expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    computed = attend(fused, (query, key, value), {"is_causal": True, **options})
    assert torch.allclose(computed, expected, atol=1e-6)
    return computed


def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """Computes attention with a kernel, and fails as in torch's context where there is none."""
    if torch._fused_sdp_choice(query, key, value, **options) == 0:
        raise RuntimeError("aten.add.Tensor got mixed torch.Tensor and DTensor")
    return nn.functional.scaled_dot_product_attention(query, key, value, **options)


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_kernel_computes_heads_of_other_sizes(size: int, kv_heads: int, options: dict[str, Any]) -> None:
    shapes = ((2, 4, 6, 8), (2, kv_heads, 6, 8), (2, kv_heads, 6, size))
    assert compute(shapes, **options).shape == (2, 4, 6, size)


def test_shapes_and_dtypes_without_a_kernel_raise_an_error() -> None:
    heads = [torch.zeros(2, 6, 8)] * 3
    with pytest.raises(ConfigurationError, match=r"shapes \[2, 6, 8\].*\[batch, heads, sequence, size\]"):
        attend(fused, tuple(heads), {"is_causal": True})
    rows = [torch.zeros(2, 1, 6, 8), torch.zeros(1, 1, 6, 8), torch.zeros(1, 1, 6, 8)]
    with pytest.raises(ConfigurationError, match="torch has no kernel here"):
        attend(fused, tuple(rows), {"is_causal": True})

    def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        attend(fail, tuple(rows), {"is_causal": True})
