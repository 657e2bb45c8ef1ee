"""Models of plain PyTorch; this file imports nothing of the package."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT-2."""

    vocabulary: int = 50257
    context: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12


TINY = Shape(vocabulary=96, context=16, width=32, layers=2, heads=2)
SMALL = Shape(vocabulary=8192, context=256, width=512, layers=4, heads=8)


class Block(nn.Module):
    """Attention and two linear layers, each after a norm and around which the input is added."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attend = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(functional.gelu(self.widen(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """GPT-2 without dropout; returns the loss of predicting each next token. 124M parameters by default."""

    def __init__(self, shape: Shape = Shape()) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tokens_for(shape: Shape, batches: int, rows: int, device: str, seed: int = 0) -> list[Tensor]:
    """Return batches of random tokens, of full context, on a device."""
    generator = torch.Generator().manual_seed(seed)
    size = (batches, rows, shape.context)
    return list(torch.randint(shape.vocabulary, size, generator=generator).to(device))


class Layers(nn.Module):
    """One block of a model that is too large: linear layers of one width, 2 bytes an element."""

    def __init__(self, width: int, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.layer_norm(layer(x), x.shape[-1:])
        return x


class Stack(nn.Module):
    """Blocks of linear layers, which take much memory and compute little."""

    def __init__(self, width: int, count: int, blocks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layers(width, count, dtype) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make_stack(width: int, count: int, blocks: int, dtype: torch.dtype) -> Stack:
    """Return a stack on the CPU whose layers all differ; drawing billions of numbers would take a minute."""
    with torch.device("meta"):
        model = Stack(width, count, blocks, dtype)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(width, width, generator=generator).div_(width**0.5).to(dtype)
    with torch.no_grad():
        for index, weight in enumerate(model.parameters()):
            weight.copy_(drawn.roll(index))
    return model.eval()
