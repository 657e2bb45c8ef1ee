"""Packed documents are checked on two ranks, under each strategy and under context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

Run = Callable[..., list[Any]]
WIDTH, HEADS, WORDS, LENGTH = 16, 2, 20, 16
UNITS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "bf16": {"mixed_precision": "bf16"},
    "fsdp1": {"fsdp_plugin": {"fsdp_version": 1, "use_orig_params": True, **UNITS}},
    "fsdp2": {"fsdp_plugin": {"fsdp_version": 2, **UNITS}},
    "recomputation": {"fsdp_plugin": {"fsdp_version": 2, "activation_checkpointing": True, **UNITS}},
    "tp": {"parallelism_config": {"tp_size": 2}},
    "sp": {"parallelism_config": {"sp_size": 2, "sp_backend": "torch"}},
    "sp fsdp2": {
        "parallelism_config": {"sp_size": 2, "sp_backend": "torch"},
        "fsdp_plugin": {"fsdp_version": 2, **UNITS},
    },
    "compiled": {"dynamo_backend": "eager"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        heads = [
            each(hidden).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None)
        return hidden + self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    tp_plan = {
        **{f"layers.*.{name}": "colwise" for name in ("query", "key", "value")},
        "layers.*.out": "rowwise",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.head(hidden)  # type: ignore[no-any-return]


class Recomputed(Decoder):
    """Decoder that computes its layers again in the backward pass, and returns a loss only."""

    is_reentrant = False

    def forward(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, mask, use_reentrant=self.is_reentrant)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), input_ids.flatten())


class ReentrantlyRecomputed(Recomputed):
    is_reentrant = True


def batch_of(rank: int, is_masked: bool = False) -> dict[str, Tensor]:
    """Returns a batch with two documents on rank 0, and one on others, with a mask of documents or none."""
    lengths = [LENGTH // 2] * 2 if rank == 0 else [LENGTH]
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1).clone()
    generator = torch.Generator().manual_seed(rank)
    batch = {"input_ids": torch.randint(WORDS, (2, LENGTH), generator=generator), "position_ids": positions}
    if is_masked:
        documents = (positions == 0).cumsum(1)
        same = documents.unsqueeze(2) == documents.unsqueeze(1)
        batch["mask"] = (same & torch.ones_like(same[0]).tril()).unsqueeze(1)
    return batch


def accelerator_of(layout: str) -> Accelerator:
    kinds = {"fsdp_plugin": FullyShardedDataParallelPlugin, "parallelism_config": ParallelismConfig}
    options = LAYOUTS[layout].items()
    given = {name: kinds[name](**value) if name in kinds else value for name, value in options}
    return Accelerator(**given)


def check(is_masked: bool, layout: str) -> list[str]:
    """Checks a batch by a call and in the first forward, trains a step, and returns the errors of both."""
    accelerator, errors = accelerator_of(layout), []
    has_one_batch = "parallelism_config" in LAYOUTS[layout]
    torch.manual_seed(0)
    for is_called in (True, False):
        model = Decoder()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = batch_of(0 if has_one_batch else accelerator.process_index, is_masked)
        try:
            if is_called:
                accelerator.check_isolation(model, batch)
            model(**batch)
        except ValueError as error:
            errors.append(str(error))
        for _ in range(2):
            accelerator.backward(model(**batch).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return errors


@pytest.mark.parametrize(
    "layout",
    [
        name if name in ("ddp", "fsdp2", "sp") else pytest.param(name, marks=pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_documents_that_are_not_apart_are_the_same_error_on_all_ranks(run: Run, layout: str) -> None:
    for apart, leaks in run(call_for_each, check, [(True, layout), (False, layout)], processes=2):
        assert apart == []
        assert len(leaks) == 2
        assert all("`layers.0`" in error for error in leaks)
        assert "check_packing=False" in leaks[1]


def check_shards() -> str:
    """Checks a batch under context parallelism, whose attention is causal over the whole sequence."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **UNITS)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2), fsdp_plugin=plugin)
    model = Decoder()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = batch_of(0)
    before = {name: value.clone() for name, value in batch.items()}
    with pytest.raises(ValueError, match="affect each other") as caught:
        accelerator.check_isolation(model, batch)
    assert all(torch.equal(value, before[name]) for name, value in batch.items())
    return str(caught.value)


def test_context_parallelism_without_masks_is_found(run: Run) -> None:
    assert all("without cp_size" in text for text in run(check_shards, processes=2))


class Placed(nn.Module):
    """A decoder with embeddings of positions, which the batch has or the model counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = Decoder(), nn.Embedding(LENGTH, WIDTH)

    def forward(self, input_ids: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
        counted = torch.arange(input_ids.shape[1]) if positions is None else positions
        hidden = self.inner.embedding(input_ids) + self.table(counted)
        for layer in self.inner.layers:
            hidden = layer(hidden, mask)
        return hidden


def llama(**options: Any) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=2,
        use_cache=False,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def check_parts_of_sequences() -> dict[str, str]:
    """Returns the errors of models on packed documents of which each rank has a part."""
    accelerator, found = accelerator_of("sp"), {}
    batch = batch_of(0, is_masked=True)
    mask, positions = batch.pop("mask"), batch["position_ids"]
    ones = {**batch, "attention_mask": torch.ones_like(positions)}
    given = {"input_ids": batch["input_ids"], "mask": mask}
    counted = torch.arange(LENGTH).expand(2, -1)
    cases: dict[str, tuple[nn.Module, dict[str, Tensor], bool]] = {
        "ones": (llama(), ones, False),
        "ones in a block": (llama(), ones, True),
        "packed": (llama(), batch, False),
        "recomputed": (Recomputed(), {**batch, "mask": mask}, False),
        "reentrant": (ReentrantlyRecomputed(), {**batch, "mask": mask}, False),
        "recomputed without a mask": (Recomputed(), batch, False),
        "packed in a block": (llama(), batch, True),
        "shifted": (Placed(), {**given, "positions": counted}, False),
        "counted": (Placed(), given, False),
        "restarted": (Placed(), {**given, "positions": positions}, False),
    }
    for name, (model, inputs, is_block) in cases.items():
        prepared = accelerator.prepare(model)
        try:
            if is_block:  # by the check of the first batch
                buffers = [tensor.clone() for tensor in inputs.values()]
                with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
                    prepared(**dict(zip(inputs, buffers, strict=True)))
            else:
                accelerator.check_isolation(prepared, inputs, (positions == 0).cumsum(1))
        except ValueError as error:
            found[name] = str(error)
    return found


def test_parts_of_packed_sequences_are_checked(run: Run) -> None:
    for found in run(check_parts_of_sequences, processes=2):
        assert sorted(found) == [
            *("counted", "ones", "ones in a block", "recomputed without a mask", "shifted")
        ]
        assert "attention_mask of ones" in found["ones"]
        assert "check_packing=False" in found["ones in a block"]
        assert "positions of a document depend" in found["shifted"]
        assert "positions of a document depend" in found["counted"]


def check_other_batches() -> list[str]:
    """Checks batches of which one rank has no boundaries, or wrong ones."""
    accelerator, errors = Accelerator(), []
    model = accelerator.prepare(Decoder())
    rank, batch = accelerator.process_index, batch_of(0)
    mask = torch.ones_like(batch["input_ids"])
    mask[:, LENGTH // 2 :] += 1 - rank
    numbered = {"input_ids": batch["input_ids"], "attention_mask": mask}
    for inputs, boundaries in ((numbered, None), (batch, [0, LENGTH, 2 * LENGTH - rank])):
        try:
            accelerator.check_isolation(Wrapped(model), inputs, boundaries)
        except ValueError as error:
            errors.append(str(error))
    return errors


class Wrapped(nn.Module):
    """A model that takes a mask in place of positions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = getattr(model, "module", model)

    def forward(self, input_ids: Tensor, position_ids: Any = None, attention_mask: Any = None) -> Tensor:
        return self.inner(input_ids, torch.zeros_like(input_ids))  # type: ignore[no-any-return]


def test_ranks_with_other_boundaries_end_together(run: Run) -> None:
    for leak, wrong in run(check_other_batches, processes=2):
        assert "affect each other" in leak
        assert "are not cumulative lengths" in wrong
