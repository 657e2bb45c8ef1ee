"""Print the layouts that the memory planner finds for models of some sizes on some numbers of devices.

The models are decoders on the meta device, so no memory is allocated. For each size the layout with the least
communication that fits is shown, alone and with a pipeline. Layouts without offload, DeepSpeed and
`shard_grad_op` are compared.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from accelerate import planning, strategies
from accelerate.base import convert_bytes
from accelerate.losses import use_lm_loss
from accelerate.precision import MixedPrecision

LENGTH, CAPACITY = 4096, 80 * 10**9
DEVICES = (1, 8, 64)
SHARDINGS = ("none", "full_shard")
SIZES = {
    "1.2B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
    "30B, 3B active": {"hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 128,
                       "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}  # fmt: skip
"""Name of a model -> sizes of a decoder, which is one with experts if it has `num_experts`."""


@cache
def planner(size: str, length: int = LENGTH, logits: bool = True) -> planning.Planner:
    """Returns the planner of a model with or without logits, of which one block is traced for all."""
    sizes: dict[str, Any] = SIZES[size]
    family = "Qwen3Moe" if "num_experts" in sizes else "Llama"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=128256,
        num_attention_heads=sizes["hidden_size"] // 128,
        num_key_value_heads=8,
        head_dim=128,
        use_cache=False,
        **sizes,
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    if not logits:
        use_lm_loss(model)
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    step = planning.Step(
        model,
        [torch.optim.AdamW(model.parameters(), foreach=True)],
        {"input_ids": ids, "labels": ids},
        planning.loss_of,
        torch.device("cpu"),
        keeps_output=True,
        find_experts=strategies.list_experts,
    )
    precision = MixedPrecision("bf16", "cpu")
    return planning.Planner(
        planning.tracer_of(
            step, precision, precision, strategies.recompute_in_trace, share_experts=strategies.trace_share
        )
    )


def fastest(size: str, devices: int, pipeline: bool) -> str:
    """Returns the layout that fits and sends the fewest bytes for each sample, with its memory."""
    found = []
    model = planner(size).trace_of(planning.Layout(), 1)
    for layout in planning.candidate_layouts(devices, model):
        offloads = layout.offload != "none" or layout.offload_activations
        is_compared = layout.sharding in SHARDINGS and not offloads and pipeline == (layout.stages > 1)
        if not is_compared or planning.least_bytes(model, layout) > CAPACITY:
            continue
        # Each micro-batch of a pipeline has one sequence.
        trace = planner(size).trace_of(layout, layout.num_microbatches)
        total = planning.memory_of(trace, layout).total
        if total <= CAPACITY:
            sent = planning.communication_of(trace, layout) / layout.samples_per_batch
            found.append((layout.checkpointing, sent, layout.name, total))
    if not found:
        return "none fits"
    _, _, name, total = min(found)
    return f"{name} ({convert_bytes(total)})"


def main() -> None:
    print(f"Decoders in bf16 with AdamW, sequences of {LENGTH} tokens, devices of 80 GB.")
    print("| parameters | devices | without a pipeline | with a pipeline |\n|---|---|---|---|")
    for size in SIZES:
        for devices in DEVICES:
            cells = [fastest(size, devices, pipeline) for pipeline in (False, True)]
            print(f"| {size} | {devices} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
