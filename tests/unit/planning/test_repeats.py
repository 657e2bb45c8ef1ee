"""Steps that are traced with few of their blocks, beside the traces with all blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from accelerate import strategies
from accelerate.planning import Layout, Step, Trace, Variant, batch_for, memory_of, trace_step, tracer_of
from accelerate.planning.inputs import loss_or_mean
from accelerate.planning.libraries import disable_caches
from accelerate.planning.repeats import repeats_of
from accelerate.planning.tracing import blocks_of
from accelerate.precision import Precision

TEXT = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}  # fmt: skip
EXPERTS = {**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {**EXPERTS, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
          "v_head_dim": 16, "head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
          "topk_group": 1, "first_k_dense_replace": 3, "num_key_value_heads": 2}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {**TEXT, "num_hidden_layers": 8}),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig",
                {**TEXT, "num_hidden_layers": 36, "sliding_window": 8, "_sliding_window_pattern": 6}),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**LATENT, "num_hidden_layers": 14}),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig",
                {**EXPERTS, "num_local_experts": 4, "num_hidden_layers": 12, "sliding_window": 8,
                 "layer_types": ["sliding_attention", "full_attention"] * 6}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**EXPERTS, "num_hidden_layers": 8}),
    "T5": ("T5ForConditionalGeneration", "T5Config",
           {"vocab_size": 200, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 12,
            "num_decoder_layers": 9, "decoder_start_token_id": 0}),
    "ViT": ("ViTForImageClassification", "ViTConfig",
            {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 8,
             "image_size": 32, "patch_size": 8}),
}  # fmt: skip
LAYOUTS = [
    Layout(),
    Layout("full_shard", 8),
    Layout("zero1", 8),
    Layout("shard_grad_op", 4, 2),
    Layout("full_shard", 8, offload="all"),
]


def step_of(model: nn.Module, batch: Any) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    device = torch.device("cpu")
    return Step(model, [optimizer], batch, loss_or_mean, device, keeps_output=True)


def of_family(name: str) -> Step:
    model, config, sizes = FAMILIES[name]
    with torch.device("meta"):
        built = getattr(transformers, model)(getattr(transformers, config)(**sizes)).train()
    return step_of(built, batch_for(built, 2, 32))


def compare(
    step: Step, *, checkpointing: bool = False, accumulates: bool = False, tolerance: float = 1e-3
) -> None:
    def convert(model: nn.Module) -> nn.Module:
        if checkpointing:
            disable_caches(model)
            strategies.recompute_in_trace(model, blocks_of(model))
        return model

    trace = tracer_of(step, Precision(), None, strategies.recompute_in_trace)
    short = trace(Variant(2, checkpointing, False, accumulates))
    whole = trace_step(replace(step, convert=convert, accumulates=accumulates))
    for layout in LAYOUTS:
        found, expected = (memory_of(each, layout).total for each in (short, whole))
        assert found == pytest.approx(expected, rel=tolerance, abs=64)
    facts = [replace(each, forward_backward=(), step=()) for each in (short, whole)]
    assert facts[0] == facts[1]


@pytest.fixture
def sizes_traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of blocks in the steps that are traced."""
    from accelerate.planning import variants

    sizes: list[int] = []

    def spy(name: str) -> None:
        original: Callable[[Step], Any] = getattr(variants, name)

        def count(step: Step) -> Any:
            sizes.append(len(blocks_of(step.model)))
            return original(step)

        monkeypatch.setattr(variants, name, count)

    spy("record_step")
    spy("trace_step")
    return sizes


@pytest.mark.parametrize("name", ["Llama"])
def test_few_blocks_give_the_trace_of_all(name: str, sizes_traced: list[int]) -> None:
    step = of_family(name)
    compare(step)
    assert max(sizes_traced) < len(blocks_of(step.model))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"checkpointing": True}, {"accumulates": True}], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_few_blocks_of_each_family_give_the_trace_of_all(
    name: str, flags: dict[str, bool], sizes_traced: list[int]
) -> None:
    step = of_family(name)
    # With recomputation, the peak of a sharded layout may be in a block between the traced ones.
    compare(step, **flags, tolerance=5e-3 if flags else 1e-3)
    assert max(sizes_traced) < len(blocks_of(step.model))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-MoE", "DeepSeek-V3"])
def test_few_blocks_with_some_experts_give_the_trace_of_all(name: str, sizes_traced: list[int]) -> None:
    step = replace(of_family(name), find_experts=strategies.list_experts)

    def convert(model: nn.Module) -> nn.Module:
        for module in strategies.list_experts(model):
            strategies.trace_share(module, 4)
        return model

    trace = tracer_of(
        step, Precision(), None, strategies.recompute_in_trace, share_experts=strategies.trace_share
    )
    short, whole = trace(Variant(2, False, False, False, 4)), trace_step(replace(step, convert=convert))
    assert max(sizes_traced) < len(blocks_of(step.model))
    for layout in (Layout(expert_parallel=4), Layout("full_shard", 2, expert_parallel=4)):
        found, expected = (memory_of(each, layout).total for each in (short, whole))
        assert found == pytest.approx(expected, rel=1e-3, abs=64)
    single = trace(Variant(2, False, False, False))
    assert 4 * short.experts == single.experts == 4 * short.trained_experts
    assert short.peak.parameters == single.peak.parameters - 3 * short.experts
    assert (short.num_experts, short.dispatched) == (4, single.dispatched)
    # Each layer sends the hidden states (width 32) of 64 tokens to two experts.
    num_layers = len(strategies.list_experts(step.model))
    assert short.dispatched == num_layers * 64 * 2 * 32 * 4


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx = index
        self.linear = nn.Linear(16, 16)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(values))


class Stack(nn.Module):
    """Blocks in a list, of which the output is that of a function of all."""

    def __init__(self, kind: str, count: int = 12) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block(index) for index in range(count))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        outputs = [values]
        for block in self.blocks:
            outputs.append(block(outputs[-1]))
        if self.kind == "fixed":
            return outputs[12].mean()
        if self.kind == "square":  # each block reads the outputs of all blocks before it
            return torch.stack([torch.cat(outputs[: index + 1]).exp().sum() for index in range(13)]).sum()
        return torch.cat(outputs).mean()


def loss_of_stack(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch)
    return loss


@pytest.mark.parametrize("kind", ["plain", "fixed", "square"])
def test_models_that_need_all_blocks_are_traced_whole(kind: str, sizes_traced: list[int]) -> None:
    step = replace(step_of(Stack(kind), torch.zeros(2, 16)), loss=loss_of_stack, keeps_output=False)
    before = [id(each) for each in step.model.parameters()]
    compare(step)
    assert 12 in sizes_traced
    assert [id(each) for each in step.model.parameters()] == before
    assert [id(each) for each in step.optimizers[0].param_groups[0]["params"]] == before


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("a" * 12, (2, 1)),
        ("aaab" * 8, (8, 4)),
        ("aaaaab" * 10 + "aa", (14, 6)),
        ("bbb" + "a" * 20, (5, 1)),
        ("a" * 20 + "b", None),
        ("abcdefghijkl", None),
        ("aaa", None),
    ],
)
def test_blocks_repeat_with_a_period(kinds: str, expected: tuple[int, int] | None) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(2, 2 + ord(kind)) for kind in kinds)
    found = [(each.fewest, each.period) for each in repeats_of(model)]
    assert found == ([expected] if expected else [])


def test_an_optimizer_with_state_keeps_it() -> None:
    step = replace(step_of(Stack("plain"), torch.zeros(2, 16)), loss=loss_of_stack, keeps_output=False)
    loss_of_stack(step.model, step.batch).backward()  # type: ignore[no-untyped-call]
    step.optimizers[0].step()
    state = {id(key): value for key, value in step.optimizers[0].state.items()}
    trace: Callable[[Variant], Trace] = tracer_of(step, Precision(), None, strategies.recompute_in_trace)
    assert trace(Variant(2, False, False, False)).peak.total > 0
    assert {id(key): value for key, value in step.optimizers[0].state.items()} == state
