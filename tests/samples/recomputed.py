"""Models with recomputed blocks, and ways to train them, for tests of the offload of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, ROWS, LAYERS = 48, 40, 5


class Block(nn.Module):
    """Block with dropout, whose hidden states may be a keyword argument, with states for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden: Tensor, *, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        mixed = self.norm(hidden if memory is None else hidden + memory)
        if mask is not None:
            mixed = mixed * mask
        out: Tensor = hidden + self.drop(self.narrow(nn.functional.gelu(self.widen(mixed))))
        return out


class Net(nn.Module):
    """Blocks that get hidden states in one of several ways.

    Args:
        way: "plain", "keywords", "shared" (all blocks get the same states), "skip" (a late block gets the
            input of an early one), "views" (hidden states are transposed, and parts of a tensor), "repeated"
            (all blocks run twice), or "parameter" (a block gets a parameter).
    """

    tp_plan = {"layers.*.widen": "colwise", "layers.*.narrow": "rowwise"}

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        self.way = way
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.memory = nn.Parameter(torch.randn(ROWS, WIDTH)) if way == "parameter" else None
        self.register_buffer("mask", (torch.arange(WIDTH) % 3 > 0).float().expand(ROWS, WIDTH).contiguous())
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        first = hidden
        for _ in range(2 if self.way == "repeated" else 1):
            for index, layer in enumerate(self.layers):
                hidden = self._call(layer, hidden, index, first)
        logits: Tensor = self.head(hidden).tanh()
        return logits

    def _call(self, layer: nn.Module, hidden: Tensor, index: int, first: Tensor) -> Tensor:
        if self.way == "keywords":
            return layer(hidden=hidden, mask=self.mask)  # type: ignore[no-any-return]
        if self.way == "shared":
            return layer(hidden, memory=first)  # type: ignore[no-any-return]
        if self.way == "parameter":
            return layer(hidden, memory=self.memory)  # type: ignore[no-any-return]
        if self.way == "skip" and index == LAYERS - 1:
            return layer(hidden, memory=first)  # type: ignore[no-any-return]
        if self.way == "views" and index % 2:
            halves = torch.cat([hidden, hidden]).chunk(2)  # parts of a tensor
            return layer(halves[1].t().contiguous().t())  # type: ignore[no-any-return]
        return layer(hidden)  # type: ignore[no-any-return]


WAYS = ("plain", "keywords", "shared", "skip", "views", "repeated", "parameter")
Backward = Callable[[Tensor], None]


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Returns copies of all gradients, which are then cleared."""
    found = [p.grad.detach().cpu().clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def take_step(model: nn.Module, batches: Tensor) -> None:
    for batch in batches:
        model(batch).square().sum().backward()


def two_forwards(model: nn.Module, batches: Tensor) -> None:
    losses = [model(batch).square().sum() for batch in batches[:2]]
    torch.stack(losses).sum().backward()
    first, second = model(batches[0]).sum(), model(batches[1]).sum()
    first.backward()  # in the order of the forwards, as in a pipeline
    second.backward()


def retained_graph(model: nn.Module, batches: Tensor) -> None:
    loss = model(batches[0]).square().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    del loss
    take_step(model, batches[1:])


def gradient_penalty(model: nn.Module, batches: Tensor) -> None:
    loss = model(batches[0]).square().sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    (loss + sum(grad.square().sum() for grad in grads if grad is not None)).backward()


def partial_backward(model: nn.Module, batches: Tensor) -> None:
    loss = model(batches[0]).square().sum()
    torch.autograd.grad(loss, list(model.layers[-1].parameters()), retain_graph=True)  # type: ignore[index]
    torch.autograd.grad(loss, list(model.layers[-2].parameters()))  # type: ignore[index]
    del loss
    take_step(model, batches)


def without_backward(model: nn.Module, batches: Tensor) -> None:
    outputs = [model(batch) for batch in batches]  # evaluation with a graph
    del outputs
    with torch.no_grad():
        model(batches[0])
    take_step(model, batches)


class Stop(Exception):
    pass


def interrupted(model: nn.Module, batches: Tensor) -> None:
    def stop(*_: Any) -> None:
        raise Stop

    for register in (
        model.layers[3].register_forward_pre_hook,  # type: ignore[index]
        model.layers[3].norm.register_full_backward_hook,  # type: ignore[index, union-attr]
    ):
        handle = register(stop)
        try:
            model(batches[0]).square().sum().backward()
        except Stop:
            pass
        finally:
            handle.remove()
        model.zero_grad()
    take_step(model, batches)


PROGRAMS: dict[str, Callable[[nn.Module, Tensor], None]] = {
    program.__name__: program
    for program in (
        take_step,
        two_forwards,
        retained_graph,
        gradient_penalty,
        partial_backward,
        without_backward,
        interrupted,
    )
}


def batches_of(device: Any = "cpu", count: int = 3) -> Tensor:
    return torch.randn(count, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


def built(way: str = "plain", device: Any = "cpu") -> Net:
    torch.manual_seed(0)
    return Net(way).to(device)
