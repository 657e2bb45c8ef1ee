"""Small models that several files of tests train, place or save."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    """Experts whose weights are one parameter, called as transformers calls them."""

    def __init__(self, num_experts: int = 4, width: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(num_experts, width, width))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(len(self.weight)):
            token, place = torch.where(chosen == expert)
            part = weights[token, place].unsqueeze(1) * (tokens[token] @ self.weight[expert])
            output = output.index_add(0, token, part)
        return output


class Mixture(nn.Module):
    """Layer whose router chooses two of four experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        output: Tensor = x + self.experts(x, chosen, weights)
        return output


class TiedLayers(nn.Module):
    """Model whose head is its embedding, with four layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
