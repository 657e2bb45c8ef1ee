"""Accelerator and arguments as train steps get them, and the parts of `megatron.core` they call."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.strategies.megatron import steps


class Core:
    """`megatron.core` on one process, which shares nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self, f"do_{name}")

    def do_get_context_parallel_group(self) -> str:
        return "context"

    def do_vocab_parallel_cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")

    def do_gather_from_tensor_model_parallel_region(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.fixture(autouse=True)
def core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps.library, "core", lambda name: Core())
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    monkeypatch.setattr(steps, "is_transformers_available", lambda: False)


def accelerator(**plugin: Any) -> Any:
    fields = {"megatron_dataset_flag": False, "custom_get_batch_function": None, "custom_loss_function": None}
    return Namespace(state=Namespace(megatron_lm_plugin=Namespace(**{**fields, **plugin})))


def arguments(**given: Any) -> Any:
    values = {
        "pad_token_id": None,
        "eos_token_id": 9,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "return_logits": False,
        "pretraining_flag": True,
        "num_labels": 2,
        "bert_binary_head": True,
        "transformer_impl": "local",
    }
    return Namespace(**{**values, **given})
