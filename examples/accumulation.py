"""Train a tiny language model on the Python documentation, with gradients of the mean over all tokens.

Paragraphs have different lengths, so batches hold different numbers of tokens. Gradient accumulation without
`num_items` averages the means of the batches, which is not the mean over all tokens. The script first
measures the difference: it compares the gradients of some windows with those of one large batch. Then it
trains.

    python examples/accumulation.py
    accelerate launch --cpu --num_processes 2 examples/accumulation.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

PADDING = 0
LONGEST = 160
STEPS = 4  # micro-batches of one optimizer step


def paragraphs(number: int) -> list[torch.Tensor]:
    """The first paragraphs of Python's help texts, as bytes; 2 to 160 of them in each."""
    texts = (text.strip() for topic in sorted(topics) for text in topics[topic].split("\n\n"))
    usable = (text.encode()[:LONGEST] for text in texts if len(text) > 1)
    return [torch.tensor(list(text)) for text in islice(usable, number)]


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PADDING)


def num_tokens(batch: torch.Tensor) -> torch.Tensor:
    """How many tokens of a batch are predicted: all but the first of each paragraph, without padding."""
    return (batch[:, 1:] != PADDING).sum()


class LanguageModel(nn.Module):
    """Predicts each byte from those before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


def loss_of(model: nn.Module, batch: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    logits = model(batch[:, :-1])
    return cross_entropy(
        logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PADDING, reduction=reduction
    )


def rounds(
    accelerator: Accelerator, way: str, model: nn.Module, loader: DataLoader
) -> Iterator[torch.Tensor]:
    """Yield the batches of a loader, each inside `accumulate`."""
    if way == "windows":
        for window in accelerator.windows(loader, num_items=num_tokens):
            yield from window
        return
    for batch in loader:
        num_items = num_tokens(batch) if way == "num_items" else None
        with accelerator.accumulate(model, num_items=num_items):
            yield batch


def big_batch(accelerator: Accelerator, model: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    """The gradient of the mean over all tokens of all processes' batches, computed in one pass."""
    longest = [nn.functional.pad(batch, (0, LONGEST - batch.shape[1])) for batch in batches]
    everything = accelerator.gather(torch.cat(longest))
    reference = LanguageModel().to(accelerator.device)
    reference.load_state_dict(accelerator.unwrap_model(model).state_dict())
    (loss_of(reference, everything) / num_tokens(everything)).backward()
    return torch.cat([p.grad.flatten() for p in reference.parameters()])


def compare(accelerator: Accelerator, model: nn.Module, loader: DataLoader, way: str) -> list[float]:
    """Return, for each window, the difference to the gradient of the large batch, relative to its norm."""
    differences, batches = [], []
    for batch in rounds(accelerator, way, model, loader):
        accelerator.backward(loss_of(model, batch, "mean" if way == "means" else "sum"))
        batches.append(batch)
        if accelerator.sync_gradients:
            expected = big_batch(accelerator, model, batches)
            found = torch.cat([p.grad.flatten() for p in model.parameters()])
            differences.append(((found - expected).norm() / expected.norm()).item())
            model.zero_grad()
            batches.clear()
    return differences


def main(epochs: int, samples: int) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=STEPS)
    set_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts = paragraphs(samples)
    loader = DataLoader(texts, batch_size=8, shuffle=True, collate_fn=pad)
    few = DataLoader(texts[:100], batch_size=4, collate_fn=pad)
    model, optimizer, loader, few = accelerator.prepare(model, optimizer, loader, few)

    accelerator.print("difference to the gradient of the big batch, relative to its norm:")
    for way in ("means", "num_items", "windows"):
        *full, last = compare(accelerator, model, few, way)
        accelerator.print(f"  {way}: {max(full):.1e} in full windows, {last:.1e} in the last, short one")

    for epoch in range(epochs):
        total, tokens = torch.zeros((), device=accelerator.device), 0
        for window in accelerator.windows(loader, num_items=num_tokens):
            for batch in window:
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                total += loss.detach()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            tokens += window.num_items
        mean = accelerator.reduce(total).item() / tokens
        accelerator.print(f"epoch {epoch}: {mean:.3f} nats for each of {tokens} tokens")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1500, help="paragraphs that are read")
    main(**vars(parser.parse_args()))
