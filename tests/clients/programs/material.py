"""What the programs of client libraries train on: Python's documentation, letter by letter; tiny models."""

from __future__ import annotations

import json
import sys
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LENGTH = 24
LETTERS = [chr(code) for code in range(32, 127)]


def text(size: int) -> str:
    """The beginning of the documentation, with other characters as spaces."""
    joined = " ".join(topics[name] for name in sorted(topics))[:size]
    return "".join(letter if letter in LETTERS else " " for letter in joined)


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Samples of a language model."""
    places = {letter: place for place, letter in enumerate(LETTERS)}
    tokens = torch.tensor([places[letter] for letter in text(count * LENGTH)]).view(count, LENGTH)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each letter."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<eos>", "<unk>"]
    words = {token: place for place, token in enumerate([*LETTERS, *special])}
    base = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    base.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=base, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


def gpt2() -> GPT2LMHeadModel:
    """A tiny GPT-2 without dropout, the same on all ranks."""
    torch.manual_seed(0)
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": len(LETTERS) + 3}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **drop, bos_token_id=96, eos_token_id=96))


def llama(layers: int = 3) -> LlamaForCausalLM:
    """A tiny Llama, the same on all ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(LETTERS) + 3,
        max_position_embeddings=256,
        pad_token_id=95,
        bos_token_id=96,
        eos_token_id=96,
    )
    return LlamaForCausalLM(config)


def tell(found: dict[str, Any]) -> None:
    """Print what was found, for the one who reads this program's output."""
    print("FOUND " + json.dumps(found), flush=True)
    sys.stdout.flush()
