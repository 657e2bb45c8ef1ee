"""Training programs for long sequences, with losses without logits and offload: `long_sequences.py NAME`.

The last ones have a fault, and train something else if ranks divide the sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.losses import use_lm_loss
from accelerate.utils import ActivationCheckpointing

VOCABULARY, WIDTH, LENGTH, ROWS, BATCH = 61, 32, 16, 48, 4
PROGRAMS: dict[str, Callable[[], None]] = {}
Batch = list[Tensor]


def program(function: Callable[[], None]) -> Callable[[], None]:
    PROGRAMS[function.__name__] = function
    return function


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.mix(self.norm(hidden)).unflatten(-1, (4, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, dim=-1), is_causal=True)
        return hidden + self.out(mixed.transpose(1, 2).flatten(2)).tanh()


class LanguageModel(nn.Module):
    """Decoder that returns hidden states, or with labels the loss that `Accelerator.lm_loss` computes."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self.loss = accelerator.lm_loss
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden if labels is None else self.loss(hidden, self.head, labels, z_loss=1e-3)


def batches(*, packs: bool = False) -> DataLoader[Any]:
    """Returns a loader of tokens, positions and the label of each position."""
    tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    if packs:  # documents of 6 and 10 tokens
        positions = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)]).expand(ROWS, -1)
        labels[:, 5] = -100
    return DataLoader(TensorDataset(tokens, positions.clone(), labels), batch_size=BATCH, shuffle=True)


def offloading() -> Accelerator:
    return Accelerator(kwargs_handlers=[ActivationCheckpointing(offload=True)])


def train(accelerator: Accelerator, model: Any, loader: Any, loss_of: Callable[[Any, Batch], Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def train_on_shards(
    change: Callable[[Batch, Batch, int, int], Any] = lambda *_: None, divides_loss: bool = False
) -> None:
    """Trains in the block that shards sequences.

    Args:
        change: Changes the shards in a faulty program. It also gets the whole batch, the number of ranks and
            the rank.
        divides_loss: Whether a faulty program divides the loss by the number of ranks.
    """
    accelerator = offloading()
    model: Any = LanguageModel(accelerator)
    head, size, rank = model.head, accelerator.num_processes, accelerator.process_index
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader: Any = batches()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        whole = [tensor.clone() for tensor in batch]
        with accelerator.maybe_context_parallel(batch, [1, 1, 1], set(batch)):
            change(batch, whole, size, rank)
            tokens, positions, labels = batch
            loss = accelerator.lm_loss(model(tokens, positions), head, labels)
            accelerator.backward(loss / size if divides_loss else loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@program
def loss_in_the_forward() -> None:
    accelerator = offloading()
    train(accelerator, LanguageModel(accelerator), batches(), lambda model, batch: model(*batch))


@program
def loss_of_shards() -> None:
    train_on_shards()


@program
def packed_documents() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    config.use_cache = False

    def loss_of(model: Any, batch: Batch) -> Tensor:
        tokens, positions, labels = batch
        output = model(input_ids=tokens, position_ids=positions, labels=labels, shift_labels=labels)
        return output.loss  # type: ignore[no-any-return]

    train(offloading(), use_lm_loss(LlamaForCausalLM(config)), batches(packs=True), loss_of)


@program
def labels_are_shifted_on_each_rank() -> None:
    def change(batch: Batch, *_: Any) -> None:
        batch[2] = F.pad(batch[0][:, 1:], (0, 1), value=-100)

    train_on_shards(change)


@program
def labels_are_those_of_another_rank() -> None:
    def change(batch: Batch, whole: Batch, size: int, rank: int) -> None:
        batch[2] = whole[2].chunk(size, dim=1)[(rank + 1) % size]

    train_on_shards(change)


@program
def positions_begin_on_each_rank() -> None:
    def change(batch: Batch, *_: Any) -> None:
        batch[1] = torch.arange(batch[1].shape[1]).expand_as(batch[1])

    train_on_shards(change)


@program
def the_loss_is_divided_by_the_number_of_ranks() -> None:
    train_on_shards(divides_loss=True)


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
