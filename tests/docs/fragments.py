"""Names that the fragments on the pages use, such as `model` and `loader`: tiny objects of the right kind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

from accelerate import Accelerator

WIDTH = 8
VOCABULARY = 16
LENGTH = 4


class Block(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(hidden).relu())


class Net(nn.Module):
    """Classifies rows of floats."""

    _no_split_modules = ("Block",)

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(inputs))


class LanguageModel(Net):
    """Predicts tokens; `model(**batch)` returns an object with `loss` and `logits`."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: torch.Tensor, positions: Any = None) -> Any:
        hidden = self.tokens(tokens)
        if positions is not None:
            hidden = hidden + self.positions(positions)
            heads = hidden.unflatten(-1, (2, -1)).transpose(1, 2)
            attended = scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            hidden = attended.transpose(1, 2).flatten(2)
        return self.head(self.blocks(hidden)).clone()  # FSDP 2 warns of a view

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens).argmax(-1)


class OutputModel(LanguageModel):
    """A model whose output is an object, as those of transformers."""

    def forward(self, tokens: torch.Tensor, labels: Any = None) -> Any:
        logits = super().forward(tokens)
        loss = None if labels is None else cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def rows() -> list[Any]:
    return [(torch.randn(WIDTH), index % VOCABULARY) for index in range(16)]


def texts() -> list[Any]:
    return [
        {"tokens": tokens, "labels": tokens.roll(-1)}
        for tokens in torch.randint(VOCABULARY, (16, LENGTH)).unbind()
    ]


def loss_of(model_or_outputs: Any, batch_or_labels: Any) -> torch.Tensor:
    """Return the mean loss, from a model and a batch or from outputs and labels."""
    outputs, labels = model_or_outputs, batch_or_labels
    if isinstance(outputs, nn.Module):
        batch = batch_or_labels
        inputs, labels = batch if isinstance(batch, (list, tuple)) else (batch["tokens"], batch["labels"])
        outputs = model_or_outputs(inputs)
    elif isinstance(labels, dict):
        labels = labels["labels"]
    return cross_entropy(outputs.flatten(0, -2), labels.flatten())


def loss_sum(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, batch) * (batch["labels"] != -100).sum()


def ignore(*args: Any) -> None:
    """Do nothing, as the functions of users that the fragments call."""


class Progress:
    """The position of a run, as its checkpoints keep it."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class Layer(nn.Module):
    """A matrix, and a batch of them."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Module()
        self.experts.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH))


class MatrixModel(nn.Module):
    """A model as transformers' Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = layer.matrix(hidden) @ layer.experts.weight.sum(0)
        return {"loss": cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def name_transformers(names: dict[str, Any]) -> dict[str, Any]:
    """Write a model of transformers, and return its folder and data."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=2, **sizes)
    folder = f"llama_{os.getpid()}"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokens = torch.arange(LENGTH)
    return {"name": folder, "rows": [{"input_ids": tokens, "labels": tokens}] * 8}


def name_big_model(names: dict[str, Any]) -> dict[str, Any]:
    Accelerator().save_model(Net(), "path/of/the/checkpoint")
    return {"MyModel": Net, "config": None, "inputs": torch.randn(2, WIDTH)}


def name_inference(names: dict[str, Any]) -> dict[str, Any]:
    model = nn.Linear(1, 1)
    model.answer = str.upper
    return {
        "load_my_model": lambda: model,
        "prompts": ["one", "two"],
        "metric": SimpleNamespace(add_batch=lambda predictions, references: None),
        "inputs": torch.randn(4, WIDTH),
        "receiver": {name: torch.empty_like(tensor) for name, tensor in Net().state_dict().items()},
        "train_on": ignore,
        "engine_model": SimpleNamespace(load_weights=dict),
    }


def name_processes(names: dict[str, Any]) -> dict[str, Any]:
    Path("serve.py").touch()
    return {"train": ignore, "model_name": "tiny"}


def name_matrices(names: dict[str, Any]) -> dict[str, Any]:
    from pytorch_optimizer import Muon

    return {"MuonWithAdam": Muon}


def name_shards(names: dict[str, Any]) -> dict[str, Any]:
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    return {"plugin": plugin, "ParallelismConfig": ParallelismConfig, "prompts": torch.ones(1, LENGTH).long()}


def name_objects(model: nn.Module, dataset: list[Any]) -> dict[str, Any]:
    """Return objects that are not prepared."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer),
        **{name: DataLoader(dataset, batch_size=8) for name in ("loader", "train_loader", "test_loader")},
        "dataset": dataset,
    }


OF_TEXTS = (
    "accumulation",
    "averages",
    "layouts",
    "long-sequences",
    "matrix-optimizers",
    "memory",
    "profiling",
    "sharding",
)
"""Guides whose batches are dictionaries of tokens and labels."""
MODELS = {"matrix-optimizers": MatrixModel, "memory": OutputModel, "profiling": OutputModel}
"""The classes of models of guides that need another one."""
OTHER_NAMES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "accumulation": lambda names: {"num_tokens": lambda batch: (batch["labels"] != -100).sum()},
    "averages": lambda names: {"unet": names["model"]},
    "big_models": name_big_model,
    "checkpoints": lambda names: {"Progress": Progress, "epochs": 1},
    "clients": name_transformers,
    "inference": name_inference,
    "launching": name_processes,
    "long-sequences": name_shards,
    "matrix-optimizers": name_matrices,
    "profiling": lambda names: {"train_step": ignore},
    "sharding": name_shards,
}


def make_names(page: str, *, accelerator: bool = False, prepared: bool = False) -> dict[str, Any]:
    """Return the names for the blocks of a page.

    Args:
        page: name of the page, without its folder and suffix.
        accelerator: whether they include an `Accelerator`.
        prepared: whether the objects are prepared.
    """
    torch.manual_seed(0)
    is_of_texts = page in OF_TEXTS
    model_class = MODELS.get(page, LanguageModel if is_of_texts else Net)
    dataset = texts() if is_of_texts else rows()
    if page in ("long-sequences", "sharding"):
        dataset = [(*batch.values(), torch.arange(LENGTH)) for batch in dataset]
    names = name_objects(model_class(), dataset)
    if accelerator or prepared:
        names["accelerator"] = Accelerator()
    if prepared:
        keys = [key for key in names if key not in ("accelerator", "dataset")]
        names.update(zip(keys, names["accelerator"].prepare(*(names[key] for key in keys)), strict=True))
    names |= {
        "torch": torch,
        "nn": nn,
        "Accelerator": Accelerator,
        "DataLoader": DataLoader,
        "batch": next(iter(names["loader"])),
        "loss_of": loss_of,
        "loss_fn": loss_of,
        "loss_sum": loss_sum,
        "evaluate": nn.Module.eval,
        "step": 1,
        "loss": 1.0,
        "resuming": False,
        "right": 0,
    }
    return names | OTHER_NAMES.get(page, lambda names: {})(names)
