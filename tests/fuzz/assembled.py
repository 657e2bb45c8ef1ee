"""Small models that are assembled from random parts, for the trials of layouts.

A model embeds tokens, calls layers one after another, and has a head. The parts of a `Recipe` say what the
layers compute, in which order they are called, and what they hand over besides their outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, TOKENS, CLASSES = 8, 11, 3
LAYERS = ("linear", "mlp", "attention", "gru", "conv", "scaled", "cumulative")
ORDERS = ("forward", "backward", "twice", "shuffled", "two inputs", "nested", "odd tokens", "last first")
PASSED = (
    "attribute",
    "list",
    "dict",
    "hook",
    "global",
    "buffer",
    "slices",
    "view",
    "first output",
    "tuple",
    "number",
    "none",
    "penalty",
    "configuration",
)
COUPLED = ("center", "size", "neighbor", "batch maximum")
LOSSES = ("mean", "tokens", "sum", "weights", "rows", "masked", "classes", "regression", "penalty")
STORE: dict[str, Any] = {}


@dataclass(frozen=True)
class Recipe:
    """What a model computes."""

    seed: int
    layers: tuple[str, ...]
    order: str = "forward"
    passed: str = ""  # what layers hand over besides their outputs
    coupled: str = ""  # how samples of a batch depend on each other
    tie: str = ""  # "head": with the embedding; "layers": the first and the last layer
    loss: str = "tokens"
    by_model: bool = False  # the model computes the loss

    @property
    def is_causal(self) -> bool:
        return not {"gru", "conv", "cumulative"} & set(self.layers)


def draw(random: Random, seed: int) -> Recipe:
    kinds = LAYERS if random.random() < 0.4 else LAYERS[:3]
    count = random.choice([2, 3, 4, 4, 5, 6])
    same = random.random() < 0.6
    layers = tuple([random.choice(kinds)] * count if same else random.choices(kinds, k=count))
    tie = random.choice(["", "", "", "head", "layers"])
    if tie == "layers" and layers[0] != layers[-1]:
        tie = ""
    return Recipe(
        seed,
        layers,
        order=random.choice(ORDERS) if random.random() < 0.4 else "forward",
        passed=random.choice(PASSED) if random.random() < 0.5 else "",
        coupled=random.choice(COUPLED) if random.random() < 0.1 else "",
        tie=tie,
        loss=random.choice(LOSSES),
        by_model=random.random() < 0.5,
    )


class Layer(nn.Module):
    """Adds what its part computes to a hidden state of shape [samples, tokens, WIDTH]."""

    def __init__(self, kind: str, passed: str) -> None:
        super().__init__()
        self.kind, self.passed = kind, passed
        self.norm = nn.LayerNorm(WIDTH)
        if kind == "linear":
            self.part: Any = nn.Linear(WIDTH, WIDTH)
        elif kind == "mlp":
            self.part = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        elif kind == "attention":
            self.part, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        elif kind == "gru":
            self.part = nn.GRU(WIDTH, WIDTH, batch_first=True)
        elif kind == "conv":
            self.part = nn.Conv1d(WIDTH, WIDTH, 3)
        else:
            self.part = nn.Linear(WIDTH, WIDTH, bias=False)
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.3))
        self.penalty: Any = 0.0
        if passed == "buffer":
            self.register_buffer("seen", torch.zeros(()))

    def compute(self, hidden: Tensor) -> Tensor:
        inner = self.norm(hidden)
        if self.kind == "attention":
            heads = self.part(inner).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
            inner = self.out(mixed.transpose(1, 2).flatten(-2))
        elif self.kind == "gru":
            inner = self.part(inner)[0]
        elif self.kind == "conv":
            inner = self.part(F.pad(inner.transpose(1, 2), (2, 0))).transpose(1, 2)
        elif self.kind == "cumulative":
            inner = self.part(inner.cumsum(1) / 8) * self.scale
        elif self.kind == "scaled":
            inner = self.part(inner) * self.scale
        else:
            inner = self.part(inner)
        return hidden + torch.tanh(inner)

    def forward(self, hidden: Tensor, extra: Any = None) -> Any:
        before = hidden
        if self.passed == "configuration" and extra is not None:
            hidden = hidden * extra["scale"]
        hidden = self.compute(hidden)
        if self.passed == "attribute":
            self.penalty = hidden.mean(-1, keepdim=True)
        elif self.passed == "penalty":
            self.penalty = hidden.pow(2).mean()
        elif self.passed == "list":
            extra.append(hidden)
        elif self.passed == "dict":
            extra["total"] = extra.get("total", 0.0) + hidden
        elif self.passed == "global":
            STORE["hidden"] = STORE.get("hidden", 0.0) + hidden
        elif self.passed == "buffer":
            self.seen.copy_(hidden.detach().mean())
        elif self.passed == "view":
            extra[..., :2] += hidden[..., 2:4]
        elif self.passed == "tuple":
            return hidden, before.mean(-1, keepdim=True)
        elif self.passed == "number":
            return hidden, 0.1 * len(self.kind)
        elif self.passed == "none":
            return hidden, None
        return hidden


class Net(nn.Module):
    """A model of a recipe, which returns logits, or a loss and logits."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        outputs = {"classes": CLASSES, "regression": 1}.get(recipe.loss, TOKENS)
        layers = [Layer(kind, recipe.passed) for kind in recipe.layers]
        self.embed = nn.Embedding(TOKENS, WIDTH)
        if recipe.order == "last first":
            self.head = nn.Linear(WIDTH, outputs)
        if recipe.order == "nested":
            half = len(layers) // 2
            self.layers: Any = nn.ModuleList([nn.ModuleList(layers[:half]), nn.ModuleList(layers[half:])])
        else:
            self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, outputs)
        if recipe.tie == "layers":
            layers[-1].part = layers[0].part
        if recipe.tie == "head" and outputs == TOKENS:
            self.head.weight = self.embed.weight
        if recipe.passed == "hook":
            for layer in layers:
                layer.register_forward_hook(self.collect)
        self.register_buffer("class_weights", 1 + torch.arange(float(outputs)), persistent=False)
        self.collected: list[Tensor] = []

    def collect(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.collected.append(output)

    def ordered(self, tokens: Tensor) -> list[Layer]:
        layers = list(self.layers)
        if self.recipe.order == "nested":
            return [layer for part in layers for layer in part]
        if self.recipe.order == "backward":
            return layers[::-1]
        if self.recipe.order == "twice":
            return [layer for layer in layers for _ in range(2)]
        if self.recipe.order == "shuffled":
            return sorted(layers, key=lambda layer: -len(layer.kind) + layers.index(layer) % 2)
        if self.recipe.order == "odd tokens" and int(tokens.sum()) % 2:
            return layers[:1] + layers
        return layers

    def encode(self, tokens: Tensor) -> Tensor:
        passed, layers = self.recipe.passed, self.ordered(tokens)
        hidden: Any = self.embed(tokens)
        if self.recipe.coupled == "center":
            hidden = hidden - hidden.mean(0)
        elif self.recipe.coupled == "size":
            hidden = hidden / len(hidden)
        extra: Any = {
            "list": [],
            "dict": {},
            "view": torch.zeros_like(hidden),
            "configuration": {"scale": 0.5},
        }.get(passed)
        self.collected.clear()
        STORE.clear()
        written = hidden.new_zeros(len(layers), *hidden.shape)
        total: Any = 0.0
        for number, layer in enumerate(layers):
            output = layer(hidden) if extra is None else layer(hidden, extra)
            hidden = output[0] if isinstance(output, tuple) else output
            if passed in ("tuple", "number"):
                total = total + output[1]
            elif passed == "none":
                total = total + (0.0 if output[1] is None else 1.0)
            elif passed == "attribute":
                total = total + layer.penalty
            elif passed == "slices":
                written[number] = hidden
            elif passed == "buffer":
                total = total + layer.seen
            elif passed == "first output" and number == 0:
                total = hidden
        if passed in ("list", "hook"):
            total = sum(extra if passed == "list" else self.collected)
        elif passed == "dict":
            total = extra["total"]
        elif passed == "global":
            total = STORE["hidden"]
        elif passed == "view":
            total = extra
        elif passed == "slices":
            total = written.mean(0)
        hidden = hidden + 0.1 * total
        if self.recipe.coupled == "neighbor":
            hidden = hidden + 0.1 * hidden.roll(1, 0)
        elif self.recipe.coupled == "batch maximum":
            hidden = hidden + 0.1 * hidden[..., :1].max()
        return self.norm(hidden)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        hidden = self.encode(tokens)
        if self.recipe.order == "two inputs":
            hidden = hidden + self.encode(tokens.flip(1))
        if self.recipe.loss in ("classes", "regression"):
            hidden = hidden.mean(1)
        logits = self.head(hidden)
        if not self.recipe.by_model or labels is None:
            return logits
        loss = loss_of(self.recipe, logits, labels, mask, self.class_weights)
        if self.recipe.passed == "penalty":
            loss = loss + sum(layer.penalty for layer in self.ordered(tokens))
        return {"loss": loss, "logits": logits}


def loss_of(recipe: Recipe, logits: Tensor, labels: Tensor, mask: Tensor | None, weights: Tensor) -> Tensor:
    """Returns the loss of a batch. `mask` has a value for each token."""
    if recipe.loss == "regression":
        return F.mse_loss(logits[:, 0], labels.to(logits.dtype))
    if recipe.loss == "classes":
        return F.cross_entropy(logits, labels)
    logits, labels = logits.flatten(0, 1), labels.flatten()
    if recipe.loss == "tokens":
        return F.cross_entropy(logits, labels, ignore_index=-100)
    if recipe.loss == "sum":
        return F.cross_entropy(logits, labels.clamp(min=0), reduction="sum")
    if recipe.loss == "weights":
        return F.cross_entropy(logits, labels.clamp(min=0), weight=weights)
    losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
    if recipe.loss == "masked" and mask is not None:
        return (losses * mask.flatten()).sum() / mask.sum()
    if recipe.loss == "rows" and mask is not None:
        rows = losses.view(mask.shape)
        return ((rows * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    return losses.mean()


def make_batches(recipe: Recipe, count: int, samples: int, length: int) -> list[dict[str, Tensor]]:
    """Returns batches, of which some samples have no labels or no mask."""
    generator = torch.Generator().manual_seed(recipe.seed)
    batches = []
    for _ in range(count):
        tokens = torch.randint(TOKENS, (samples, length), generator=generator)
        mask = (torch.rand(samples, length, generator=generator) < 0.7).double()
        mask[:, 0] = 1.0
        if recipe.loss in ("classes", "regression"):
            labels = torch.randint(CLASSES, (samples,), generator=generator)
            if recipe.loss == "classes" and recipe.seed % 3 == 0:
                labels[::3] = -100
        else:
            labels = torch.where(mask > 0, tokens.roll(-1, 1), -100)
            if recipe.seed % 4 == 0:
                labels[0] = -100
        batches.append({"tokens": tokens, "labels": labels, "mask": mask})
    return batches
