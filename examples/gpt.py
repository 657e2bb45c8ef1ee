"""Train a small GPT on the Python documentation; the launch command selects the parallel layout.

One process, replicas (DDP), sharded parameters (FSDP 2), FSDP 2 with tensor parallelism, context parallelism,
a pipeline, a pipeline of stages that FSDP 2 shards, and a mixture of experts on several ranks:

    python examples/gpt.py
    accelerate launch --cpu --num_processes 2 examples/gpt.py
    accelerate launch --cpu --num_processes 2 --use_fsdp --fsdp_version 2 examples/gpt.py
    accelerate launch --cpu --num_processes 4 --use_fsdp --fsdp_version 2 --use_parallelism_config \\
        --parallelism_config_dp_shard_size 2 --parallelism_config_tp_size 2 examples/gpt.py
    accelerate launch --cpu --num_processes 2 --use_parallelism_config \\
        --parallelism_config_cp_size 2 examples/gpt.py
    accelerate launch --cpu --num_processes 2 --use_parallelism_config \\
        --parallelism_config_pp_size 2 --parallelism_config_pp_schedule zbvzerobubble examples/gpt.py
    accelerate launch --cpu --num_processes 4 --use_fsdp --fsdp_version 2 --use_parallelism_config \\
        --parallelism_config_pp_size 2 --parallelism_config_dp_shard_size 2 examples/gpt.py
    accelerate launch --cpu --num_processes 2 --use_parallelism_config \\
        --parallelism_config_ep_size 2 examples/gpt.py --experts 4

With --diloco 30 the replicas exchange weights every 30 steps only, after 120 steps of DDP:

    accelerate launch --cpu --num_processes 2 examples/gpt.py --steps 960 --diloco 30

All others print the same losses (with --experts another one): the global batch size does not depend on the
number of processes.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from itertools import chain, islice, repeat
from pydoc_data.topics import topics
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration, DiLoCo
from accelerate.utils import set_seed

LENGTH = 64
HEAD = 16
WARM_UP = 120


def pieces() -> torch.Tensor:
    """Python's help texts as bytes, in chunks of one byte more than the model reads."""
    text = "\n".join(topics[topic] for topic in sorted(topics)).encode()
    return torch.tensor(list(text[: len(text) // (LENGTH + 1) * (LENGTH + 1)])).view(-1, LENGTH + 1)


class Experts(nn.Module):
    """Two linear layers for each expert."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(len(self.up)):  # those of this rank
            rows, choices = torch.where(chosen == expert)
            hidden = gelu(tokens[rows] @ self.up[expert]) @ self.down[expert]
            output = output.index_add(0, rows, hidden * weights[rows, choices, None])
        return output


class Mixture(nn.Module):
    """Layer that sends each token to two experts."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, count, bias=False), Experts(width, count)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        return self.experts(tokens, chosen, weights).view_as(hidden)


class Block(nn.Module):
    """Causal attention, and two linear layers or a mixture of experts."""

    def __init__(self, width: int, experts: int = 0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.join = nn.Linear(width, width)
        self.mixture = Mixture(width, experts) if experts else None
        if not experts:
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(hidden)
        # The number of heads on this rank: with tensor parallelism it has some of them.
        heads = [layer(normed).unflatten(-1, (-1, HEAD)) for layer in (self.query, self.key, self.value)]
        attended = scaled_dot_product_attention(*(part.transpose(1, 2) for part in heads), is_causal=True)
        hidden = hidden + self.join(attended.transpose(1, 2).flatten(-2))
        normed = self.norm2(hidden)
        return hidden + (self.mixture(normed) if self.mixture else self.down(gelu(self.up(normed))))


class GPT(nn.Module):
    """Predicts each byte from those before it."""

    _no_split_modules: ClassVar = ["Block"]  # a unit of FSDP
    tp_plan: ClassVar = {
        **dict.fromkeys(("blocks.*.query", "blocks.*.key", "blocks.*.value", "blocks.*.up"), "colwise"),
        **dict.fromkeys(("blocks.*.join", "blocks.*.down"), "rowwise"),
    }

    def __init__(self, width: int = 64, depth: int = 4, experts: int = 0) -> None:
        super().__init__()
        self.ep_plan = {"blocks.*.mixture.experts": "ep_dispatch_experts"} if experts else {}
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, experts) for _ in range(depth))
        self.norm, self.guess = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        hidden = self.bytes(tokens) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.guess(self.norm(hidden))


def mean_loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the loss of each byte, on average."""
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def train(steps: int, batch_size: int, experts: int = 0, inner_steps: int = 0) -> list[float]:
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    )
    set_seed(0)
    model = GPT(experts=experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(pieces(), batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    diloco, block = None, ExitStack()
    for step, batch in enumerate(islice(chain.from_iterable(repeat(loader)), steps)):
        if inner_steps and step == WARM_UP:
            diloco = block.enter_context(DiLoCo(accelerator, model, inner_steps))
        tokens, labels = batch[:, :-1].clone(), batch[:, 1:].clone()
        places = torch.arange(LENGTH, device=batch.device).repeat(len(batch), 1)
        buffers = [tokens, labels, places]
        inputs = {"tokens": tokens, "places": places, "labels": labels}
        with accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
            loss = accelerator.forward_backward(model, inputs, mean_loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if diloco is not None:
            diloco.step()
        losses.append(accelerator.reduce(loss, "mean").item())
        if step % 10 == 0 or step == steps - 1:
            accelerator.print(f"step {step:3}: loss {losses[-1]:.4f}")
    block.close()
    last = losses[-100:]
    accelerator.print(f"mean of the last {len(last)} losses: {sum(last) / len(last):.4f}")
    accelerator.end_training()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on the Python documentation.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=16, help="of all processes together")
    parser.add_argument("--experts", type=int, default=0, help="of each layer, or 0 for one linear network")
    parser.add_argument("--diloco", type=int, default=0, help="steps between two exchanges, or 0 for DDP")
    options = parser.parse_args()
    train(options.steps, options.batch_size, options.experts, options.diloco)


if __name__ == "__main__":
    main()
