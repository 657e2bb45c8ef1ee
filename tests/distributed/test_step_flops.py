"""Model FLOPs of a step on several ranks, whose counts add up to those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import compare_versions, is_torch_version
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
LENGTH, MICRO_BATCHES, STEPS = 8, 2, 3
BLOCK = 6 * 32 * 32 + 4 * LENGTH * 32 + 6 * 32 * 64  # layers and scores of attention, layers after it
TOKEN = 3 * (2 * BLOCK + 2 * 32 * 30)  # FLOPs of a token in both passes


def count_llama(mesh: dict[str, int], fsdp: int, recomputes: bool, num_rows: int) -> tuple[float, float]:
    """Returns the FLOPs of a step with several micro-batches, and the items of all steps."""
    transformers = pytest.importorskip("transformers")
    accelerator = Accelerator(
        gradient_accumulation_steps=MICRO_BATCHES,
        parallelism_config=ParallelismConfig(**mesh) if mesh else None,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=fsdp) if fsdp else None,
        kwargs_handlers=[ActivationCheckpointing()] if recomputes else None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.ones(num_rows, LENGTH, dtype=torch.long, device=accelerator.device)
    for _ in range(STEPS * MICRO_BATCHES):
        with accelerator.accumulate(model, num_items=tokens.numel()), accelerator.count_flops():
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss * tokens.numel())
            optimizer.step()
            optimizer.zero_grad()
    times = accelerator.step_times()
    return times.step_flops, times.items


@pytest.mark.skipif(
    compare_versions("transformers", "<", "5.23"),
    reason="the plan of this transformers leaves the head whole",
)
@pytest.mark.parametrize("recomputes", [pytest.param(False, marks=pytest.mark.slow), True])
def test_counts_of_tensor_parallel_ranks_add_up_to_those_of_one_process(run: Run, recomputes: bool) -> None:
    found = run(count_llama, {"tp_size": 2}, 0, recomputes, 4, processes=2, timeout=180)
    items = MICRO_BATCHES * 4 * LENGTH
    assert found == [(pytest.approx(items * TOKEN / 2, rel=0.01), STEPS * items)] * 2


@pytest.mark.parametrize(
    "fsdp", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2]
)
def test_replicas_and_shards_count_their_own_batches(run: Run, fsdp: int) -> None:
    found = run(count_llama, {}, fsdp, fsdp == 2, 2, processes=2, timeout=180)
    items = MICRO_BATCHES * 2 * LENGTH  # of a rank
    assert found == [(pytest.approx(items * TOKEN, rel=0.01), STEPS * 2 * items)] * 2


def count_experts(sizes: dict[str, int]) -> float:
    """Returns the FLOPs of a step of a mixture of experts, whose tokens are those of the rank."""
    transformers = pytest.importorskip("transformers")
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes) if sizes else None)
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    model = transformers.MixtralForCausalLM(config)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank = accelerator.process_index
    tokens = torch.randint(1, 30, (2, 8), generator=torch.Generator().manual_seed(rank))
    tokens = tokens.to(accelerator.device)
    for _ in range(2):
        with accelerator.count_flops():
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
    return accelerator.step_times().step_flops


@pytest.mark.slow
def test_counts_of_ranks_that_share_experts_add_up(run: Run) -> None:
    (alone,) = run(count_experts, {}, processes=1)
    found = run(count_experts, {"ep_size": 2}, processes=2, timeout=180)
    assert sum(found) == pytest.approx(2 * alone, rel=0.01)


def count_attention(sizes: dict[str, int]) -> float:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes) if sizes else None)

    class Reader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.mix(x).unflatten(-1, (2, 8)).transpose(1, 2)
            attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            return attended.sum()

    model = Reader()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        x = torch.ones(2, 16, 16)
        with accelerator.maybe_context_parallel([x], [1], {x}), accelerator.count_flops():
            accelerator.backward(model(x))
            optimizer.step()
    return accelerator.step_times().step_flops


@pytest.mark.skipif(is_torch_version("<", "2.13"), reason="context parallelism on the CPU needs torch 2.13")
def test_ranks_that_share_sequences_count_the_blocks_of_attention_that_they_compute(run: Run) -> None:
    layer, attention = 2 * 32 * 16 * 16, 2 * 2 * 2 * 16 * 16 * (8 + 8)
    assert run(count_attention, {}, processes=1) == [2 * layer + 3 * attention]
    found = run(count_attention, {"cp_size": 2}, processes=2, timeout=180)
    assert found == [(2 * layer + 3 * attention * 3 / 4) / 2] * 2
