"""Saved models: names without wrappers, and files that safetensors and transformers read directly."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.utils import TorchDynamoPlugin

Run = Callable[..., list[Any]]

pytestmark = pytest.mark.usefixtures("states")


class Tied(nn.Module):
    """A small language model: input and output embeddings share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.embed(tokens)))
        return logits


def build() -> Tied:
    torch.manual_seed(5)
    return Tied()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mixed_precision": "bf16"},
    "compiled": {"dynamo_plugin": TorchDynamoPlugin(backend="eager")},
    "compiled in bf16": {"dynamo_plugin": TorchDynamoPlugin(backend="eager"), "mixed_precision": "bf16"},
}


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Read a folder by its index only."""
    index = next(folder.glob("*.index.json"), None)
    names = (
        {"model.safetensors"} if index is None else set(json.loads(index.read_text())["weight_map"].values())
    )
    return {key: value for name in names for key, value in load_file(folder / name).items()}


def leave(folder: str, options: str, size: Any) -> dict[str, Any]:
    accelerator = Accelerator(**OPTIONS[options])
    model = build()
    prepared = accelerator.prepare(model)
    loss = prepared(torch.arange(7, device=accelerator.device)).float().sum()
    accelerator.backward(loss)
    accelerator.save_model(prepared, folder, max_shard_size=size)
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(prepared)
    return {
        "names": sorted(state),
        "bare": accelerator.unwrap_model(prepared, keep_torch_compile=False) is model,
        "kept": "compiled" not in options or accelerator.unwrap_model(prepared) is not model,
        "wrapped forward": "forward" in vars(model),
        "bare forward": "forward" not in vars(accelerator.unwrap_model(prepared, False, False)),
    }


@pytest.mark.parametrize(
    ("processes", "options", "size"),
    [
        (1, "compiled in bf16", "10GB"),
        (2, "compiled in bf16", 100),
        *(
            pytest.param(processes, options, size, marks=pytest.mark.slow)
            for processes in (1, 2)
            for options in OPTIONS
            for size in ("10GB", 100)
        ),
    ],
)
def test_files_contain_no_names_of_wrappers(
    run: Run, tmp_path: Path, processes: int, options: str, size: Any
) -> None:
    found = run(leave, str(tmp_path), options, size, processes=processes)
    model = build()
    for each in found:
        assert each.pop("names") == sorted(model.state_dict())
        assert each == {
            "bare": True,
            "kept": True,
            "wrapped forward": "bf16" in options,
            "bare forward": True,
        }
    state = read(tmp_path)
    assert sorted(state) == ["body.bias", "body.weight", "embed.weight"], "a tied matrix is stored once"
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())
    with torch.device("meta"):
        empty = Tied()
    load_checkpoint_in_model(empty, tmp_path, strict=True)
    assert torch.equal(empty.head.weight, model.head.weight)


# With transformers

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8},
    "BertForMaskedLM": {**SMALL, "intermediate_size": 32, "max_position_embeddings": 8},
    "LlamaForCausalLM": {**SMALL, "intermediate_size": 32, "tie_word_embeddings": True},
    "T5ForConditionalGeneration": {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1}
    | {"num_heads": 2},
}


def make(family: str) -> Any:
    torch.manual_seed(6)
    kind = getattr(import_module("transformers"), family)
    return kind(kind.config_class(**FAMILIES[family])).eval()


def outputs(model: Any, family: str) -> torch.Tensor:
    tokens = torch.arange(8).view(1, 8)
    more = {"decoder_input_ids": tokens} if family.startswith("T5") else {}
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens, **more).logits
    return logits


@pytest.mark.parametrize(
    ("size", "safe"), [("10GB", True), ("5KB", False)], ids=["one file of safetensors", "shards of torch"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_our_checkpoints(tmp_path: Path, family: str, size: str, safe: bool) -> None:
    model = make(family)
    accelerator = Accelerator()
    accelerator.save_model(accelerator.prepare(model), tmp_path, size, safe)
    model.config.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.index.json"))) == (size == "5KB")
    again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(outputs(again.eval(), family), outputs(model.cpu(), family))
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight


def leave_transformer(folder: str, family: str) -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(make(family))
    accelerator.save_model(model, folder, "5KB")
    accelerator.unwrap_model(model).config.save_pretrained(folder)
    accelerator.wait_for_everyone()


def test_transformers_reads_checkpoints_of_two_processes(run: Run, tmp_path: Path) -> None:
    expected = make("GPT2LMHeadModel")
    run(leave_transformer, str(tmp_path), "GPT2LMHeadModel", processes=2)
    again = type(expected).from_pretrained(tmp_path).eval()
    assert torch.equal(outputs(again, "GPT2LMHeadModel"), outputs(expected, "GPT2LMHeadModel"))


@pytest.mark.parametrize("size", ["10GB", "5KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("family", ["GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration"])
def test_checkpoints_of_transformers_are_read(tmp_path: Path, family: str, size: str) -> None:
    model = make(family)
    model.save_pretrained(tmp_path, max_shard_size=size)
    other = make(family)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    load_checkpoint_in_model(other, tmp_path, {"": "cpu"}, strict=True)
    assert torch.equal(outputs(other, family), outputs(model, family))
    assert other.get_input_embeddings().weight is other.get_output_embeddings().weight
