"""Model FLOPs of a step on several ranks, whose counts add up to those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.plugins import ActivationCheckpointing

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


def count_llama(mesh: dict[str, int], fsdp: int, recomputes: bool, num_rows: int) -> tuple[float, float]:
    """Returns the FLOPs of a step with two micro-batches, and the items of three such steps."""
    transformers = pytest.importorskip("transformers")
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        parallelism_config=ParallelismConfig(**mesh) if mesh else None,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=fsdp) if fsdp else None,
        kwargs_handlers=[ActivationCheckpointing()] if recomputes else None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.ones(num_rows, 8, dtype=torch.long, device=accelerator.device)
    for _ in range(6):
        with accelerator.accumulate(model, num_items=tokens.numel()), accelerator.count_flops():
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss * tokens.numel())
            optimizer.step()
            optimizer.zero_grad()
    times = accelerator.step_times()
    return times.step_flops, times.items


@pytest.mark.parametrize("recomputes", [False, True])
def test_counts_of_tensor_parallel_ranks_add_up_to_those_of_one_process(run: Run, recomputes: bool) -> None:
    ((whole, items),) = run(count_llama, {}, 0, False, 4, processes=1)
    found = run(count_llama, {"tp_size": 2}, 0, recomputes, 4, processes=2, timeout=180)
    assert [each for each, _ in found] == [pytest.approx(whole / 2, rel=1e-6)] * 2
    assert [each for _, each in found] == [items] * 2 == [3 * 2 * 4 * 8] * 2


@pytest.mark.parametrize("fsdp", [0, 1, 2])
def test_replicas_and_shards_count_their_own_batches(run: Run, fsdp: int) -> None:
    ((whole, items),) = run(count_llama, {}, 0, False, 4, processes=1)
    found = run(count_llama, {}, fsdp, fsdp == 2, 2, processes=2, timeout=180)
    assert [each for each, _ in found] == [pytest.approx(whole / 2, rel=1e-6)] * 2
    assert [each for _, each in found] == [items] * 2
