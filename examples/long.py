"""Train a language model on long sequences of packed documents: the help texts of Python.

Two ranks have a part of each sequence, and exchange heads of attention for it (Ulysses):

    accelerate launch --cpu --num_processes 2 --use_parallelism_config \\
        --parallelism_config_sp_size 2 --parallelism_config_sp_backend torch examples/long.py
    python examples/long.py

Both print the same losses. Positions restart where a document begins, so that documents do not attend to each
other, which is checked for the first batch. The loss is computed without logits. Blocks are
recomputed, and their inputs are offloaded to host memory on a GPU. Needs transformers.
"""

from __future__ import annotations

import argparse
from itertools import cycle, islice
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaModel

from accelerate import Accelerator
from accelerate.utils import ActivationCheckpointing, set_seed

IGNORED = -100


def pack_documents(length: int) -> TensorDataset:
    """Returns bytes, positions and next bytes of all documents, in rows of a length."""
    tokens: list[int] = []
    positions: list[int] = []
    labels: list[int] = []
    for text in topics.values():
        document = list(text.encode())
        tokens += document
        positions += range(len(document))
        labels += [*document[1:], IGNORED]
    num_rows = len(tokens) // length
    columns = [torch.tensor(column[: num_rows * length]) for column in (tokens, positions, labels)]
    rows = [column.view(num_rows, length) for column in columns]
    # A document that continues in the next row begins again there.
    begins = torch.cummax(torch.where(rows[1] == 0, torch.arange(length), 0), dim=1).values
    rows[1] = torch.arange(length) - begins
    rows[2][:, -1] = IGNORED
    return TensorDataset(*rows)


class LanguageModel(nn.Module):
    """Decoder of transformers that returns hidden states, and its head."""

    def __init__(self, length: int) -> None:
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        config = LlamaConfig(
            vocab_size=256, num_attention_heads=4, max_position_embeddings=length, use_cache=False, **sizes
        )
        self.body = LlamaModel(config)
        self.head = nn.Linear(64, 256, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.body(input_ids=input_ids, position_ids=position_ids).last_hidden_state


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a language model on packed documents.")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=61)
    arguments = parser.parse_args()

    accelerator = Accelerator(kwargs_handlers=[ActivationCheckpointing(offload=True)])
    set_seed(0)
    model = LanguageModel(arguments.length)
    head = model.head
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(pack_documents(arguments.length), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, batch in enumerate(islice(cycle(loader), arguments.steps)):
        # Each rank of a sequence has a part of it in this block.
        with accelerator.maybe_context_parallel(batch, [1, 1, 1], set(batch)):
            tokens, positions, labels = batch
            hidden = model(tokens, positions)
            loss = accelerator.lm_loss(hidden, head, labels, shift=False)
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            mean = accelerator.reduce(loss.detach(), "mean")  # of the parts of all ranks
            accelerator.print(f"step {step:3}: loss {mean.item():.4f}")


if __name__ == "__main__":
    main()
