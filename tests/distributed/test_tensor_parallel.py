"""Models of transformers are shared by the plans that they bring, and train as on one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

Run = Callable[..., list[Any]]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30,
    "pad_token_id": 0,
}


def train(name: str, mesh: dict[str, int], ties: bool, sharded: bool = False) -> tuple[list[float], float]:
    transformers = pytest.importorskip("transformers")
    warnings.filterwarnings(
        "ignore", "FSDP2-wrapped module"
    )  # the logits are a view; they are not written to
    more = {"head_dim": 8} if name == "Qwen3" else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **more, tie_word_embeddings=ties)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**mesh) if mesh else None,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.randint(1, 30, (2, 8), generator=torch.Generator().manual_seed(1))
    losses, norm = [], 0.0
    for _ in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norm


@pytest.mark.parametrize(
    ("name", "mesh", "ties", "sharded"),
    [
        ("Llama", {"tp_size": 2}, False, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("Llama", {"tp_size": 2}, True, False),
                ("Qwen3", {"tp_size": 2}, False, False),
                ("Qwen3", {"tp_size": 2}, True, False),
                ("Mistral", {"tp_size": 2}, False, False),
                ("Llama", {"tp_size": 2, "dp_shard_size": 2}, True, True),
                ("Llama", {"tp_size": 2, "dp_replicate_size": 2}, False, False),
            ]
        ),
    ],
)
def test_losses_are_those_of_one_process(
    run: Run, name: str, mesh: dict[str, int], ties: bool, sharded: bool
) -> None:
    pytest.importorskip("transformers")
    processes = 2 * mesh.get("dp_shard_size", 1) * mesh.get("dp_replicate_size", 1)
    (losses, norm), *_ = run(train, name, {}, ties, processes=1)
    for found, found_norm in run(train, name, mesh, ties, sharded, processes=processes, timeout=180):
        assert found == pytest.approx(losses, abs=1e-5)
        assert found_norm == pytest.approx(norm, abs=1e-4)
