"""Documents of packed sequences that affect each other are found, with the first layer that leaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.base import ConfigurationError, PreparationError
from accelerate.strategies.documents import NONE, documents_of, has_several

pytestmark = pytest.mark.usefixtures("states")
WIDTH, WORDS = 8, 20
LENGTHS = [5, 4, 3]
DOCUMENTS = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS)).expand(2, -1)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)


class Attention(nn.Module):
    def __init__(self, is_masked: bool, is_causal: bool) -> None:
        super().__init__()
        self.is_masked, self.is_causal = is_masked, is_causal
        self.queries, self.keys, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: Tensor, documents: Tensor) -> Tensor:
        mask = torch.ones(2 * hidden.shape[1:2]).bool()
        mask = mask.tril() if self.is_causal else mask
        if self.is_masked:
            mask = mask & (documents.unsqueeze(2) == documents.unsqueeze(1))
        mixed = F.scaled_dot_product_attention(self.queries(hidden), self.keys(hidden), hidden, mask)
        return self.out(mixed)  # type: ignore[no-any-return]


class Convolution(nn.Module):
    def __init__(self, is_masked: bool) -> None:
        super().__init__()
        self.is_masked = is_masked
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, hidden: Tensor, documents: Tensor) -> Tensor:
        if not self.is_masked:
            return self.conv(hidden.mT)[..., :-2].mT  # type: ignore[no-any-return]
        parts = hidden.split(LENGTHS, dim=1)
        return torch.cat([self.conv(part.mT)[..., :-2].mT for part in parts], 1)


class Recurrence(nn.Module):
    def __init__(self, is_masked: bool, is_bidirectional: bool = False) -> None:
        super().__init__()
        self.is_masked = is_masked
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=is_bidirectional)

    def forward(self, hidden: Tensor, documents: Tensor) -> Tensor:
        parts = hidden.split(LENGTHS, dim=1) if self.is_masked else (hidden,)
        return torch.cat([self.gru(part)[0] for part in parts], 1)[..., :WIDTH]


class Backwards(Recurrence):
    def forward(self, hidden: Tensor, documents: Tensor) -> Tensor:
        return super().forward(hidden.flip(1), documents).flip(1)


class Shift(nn.Module):
    def forward(self, hidden: Tensor, documents: Tensor) -> Tensor:
        return F.pad(hidden[:, :-1], (0, 0, 1, 0))


class Model(nn.Module):
    def __init__(self, *mixers: nn.Module, counts: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.table = nn.Embedding(sum(LENGTHS), WIDTH)
        self.counts = counts
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.mixers = nn.ModuleList(mixers)
        self.head = nn.Linear(WIDTH, WORDS)
        self.num_calls = 0

    def forward(self, input_ids: Tensor, position_ids: Tensor, documents: Tensor) -> Tensor:
        self.num_calls += 1
        hidden = self.embedding(input_ids)
        if self.counts is not None:
            hidden = hidden + self.table(torch.arange(hidden.shape[1]) if self.counts else position_ids)
        for mixer in self.mixers:
            hidden = hidden + mixer(F.dropout(hidden, 0.2), documents)
        return self.head(hidden).softmax(-1)  # type: ignore[no-any-return]


def clean() -> Attention:
    return Attention(is_masked=True, is_causal=True)


def batch() -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(WORDS, (2, sum(LENGTHS))),
        "position_ids": POSITIONS,
        "documents": DOCUMENTS,
    }


CLEAN = [
    Model(clean(), clean()),
    Model(Attention(is_masked=True, is_causal=False)),
    Model(Convolution(is_masked=True)),
    Model(Recurrence(is_masked=True)),
    Model(Recurrence(is_masked=True, is_bidirectional=True)),
    Model(clean(), counts=False),
]
LEAKS = [
    (
        Model(clean(), Attention(is_masked=False, is_causal=True), clean()),
        "`mixers.1` (Attention)",
        "no mask",
    ),
    (Model(clean(), clean(), Attention(is_masked=False, is_causal=False)), "`mixers.2`", "no mask"),
    (
        Model(Convolution(is_masked=False), clean()),
        "`mixers.0` (Convolution)",
        "A convolution over positions",
    ),
    (Model(clean(), Recurrence(is_masked=False)), "`mixers.1.gru` (GRU)", "carries its state"),
    (Model(Backwards(is_masked=False)), "`mixers.0` (Backwards)", ""),
    (Model(Shift(), clean()), "`mixers.0` (Shift)", ""),
    (Model(clean(), counts=True), "the positions of a document depend", "restart at each document"),
]


@pytest.mark.parametrize("model", CLEAN)
def test_documents_that_are_apart_pass(model: nn.Module) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.check_isolation(accelerator.prepare(model), batch())


def test_tokens_that_count_over_documents_are_no_positions() -> None:
    model = Model(clean(), counts=False)
    model.embedding = nn.Embedding(sum(LENGTHS), WIDTH)
    tokens = torch.arange(sum(LENGTHS)).expand(2, -1)
    accelerator = Accelerator(cpu=True)
    accelerator.check_isolation(accelerator.prepare(model), {**batch(), "input_ids": tokens})


@pytest.mark.parametrize(("model", "where", "cause"), LEAKS)
def test_the_first_layer_that_leaks_is_named(model: nn.Module, where: str, cause: str) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PreparationError) as caught:
        accelerator.check_isolation(accelerator.prepare(model), batch())
    assert where in str(caught.value)
    assert cause in str(caught.value)


def test_a_check_does_not_change_the_model() -> None:
    accelerator, model = Accelerator(cpu=True), Model(clean())
    model = accelerator.prepare(model)
    model(**batch()).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    copies = [None if gradient is None else gradient.clone() for gradient in gradients]
    inputs, state = batch(), torch.get_rng_state()
    accelerator.check_isolation(model, inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.num_calls == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for parameter, gradient, copy in zip(model.parameters(), gradients, copies, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, copy)  # type: ignore[arg-type]


def test_a_model_of_features_is_checked() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.GRU(WIDTH, WIDTH, batch_first=True))
    with pytest.raises(PreparationError, match="carries its state"):
        accelerator.check_isolation(model, torch.randn(2, 12, WIDTH), DOCUMENTS)


def test_padding_belongs_to_no_document() -> None:
    documents = DOCUMENTS.masked_fill(DOCUMENTS == 2, NONE)
    assert has_several(documents)
    mask = (DOCUMENTS == 0).long()
    found = documents_of({"input_ids": DOCUMENTS, "position_ids": POSITIONS, "attention_mask": mask})
    assert not has_several(found)
    assert not has_several(documents_of({"input_ids": DOCUMENTS[:0], "attention_mask": mask[:0]}))


@pytest.mark.parametrize(
    ("values", "boundaries"),
    [
        ({"position_ids": POSITIONS}, None),
        ({"position_ids": POSITIONS[:1]}, None),
        ({"seq_idx": DOCUMENTS.int()}, None),
        ({"attention_mask": DOCUMENTS + 1}, None),
        ({}, DOCUMENTS),
        ({}, [0, 5, 9, 12, 17, 21, 24]),
        ({"cu_seqlens": torch.tensor([0, 5, 9, 12, 17, 21, 24])}, None),
    ],
)
def test_boundaries_are_read(values: dict[str, Any], boundaries: Any) -> None:
    documents = documents_of({"input_ids": DOCUMENTS, **values}, boundaries)
    assert documents is not None
    assert torch.equal(documents.diff(dim=1) != 0, DOCUMENTS.diff(dim=1) != 0)


@pytest.mark.parametrize(
    ("inputs", "boundaries", "message"),
    [
        ({"input_ids": DOCUMENTS}, None, "has no boundaries"),
        ({"input_ids": DOCUMENTS}, DOCUMENTS[:, :-1], "boundaries have shape"),
        ({"input_ids": DOCUMENTS}, [0, 5, 9], "not cumulative lengths of 24"),
        ({"input_ids": DOCUMENTS}, [5, 5, 24], "not cumulative lengths of 24"),
        ({"input_ids": DOCUMENTS}, [0.0, 24.0], "boundaries have dtype"),
        ({"input_ids": torch.arange(3)}, [0, 3], "no tensor of shape"),
    ],
)
def test_wrong_boundaries_are_refused(inputs: Any, boundaries: Any, message: str) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match=message):
        accelerator.check_isolation(accelerator.prepare(Model(clean())), inputs, boundaries)


def test_the_first_packed_batch_is_checked() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Model(Attention(is_masked=False, is_causal=True)))
    plain = {**batch(), "position_ids": torch.arange(12).expand(2, -1)}
    with torch.no_grad():
        model(**batch())
    with pytest.raises(PreparationError, match="check_packing=False"):
        model(**batch())
    model(**batch())  # the check is done once
    right = accelerator.prepare(Model(clean()))
    right(**plain)
    assert right.num_calls == 1
    by_position = accelerator.prepare(Model(Attention(is_masked=False, is_causal=True)))
    with pytest.raises(PreparationError, match="check_packing=False"):
        by_position(*batch().values())


def test_the_check_of_the_first_batch_can_be_left_out() -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(check_packing=False))
    accelerator.prepare(Model(Attention(is_masked=False, is_causal=True)))(**batch())


def test_a_model_without_positions_has_no_hook() -> None:
    model = Accelerator(cpu=True).prepare(nn.Linear(2, 2))
    assert not model._forward_pre_hooks
