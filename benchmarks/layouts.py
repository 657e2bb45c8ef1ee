"""Print the layouts that the memory planner finds for models of some sizes on some numbers of devices.

The models are decoders on the meta device, so no memory is allocated. For each size the layout with the least
communication that fits is shown, alone and with a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import transformers

from accelerate import planning, strategies
from accelerate.base import convert_bytes
from accelerate.precision import MixedPrecision

LENGTH, CAPACITY = 4096, 80 * 10**9
DEVICES = (1, 8, 64)
SIZES = {
    "1.2B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
}


@cache
def planner(size: str) -> planning.Planner:
    """Returns the planner of a model, of which one block is traced and counted for all."""
    heads = SIZES[size]["hidden_size"] // 128
    config = transformers.LlamaConfig(
        vocab_size=128256, num_attention_heads=heads, num_key_value_heads=8, use_cache=False, **SIZES[size]
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    step = planning.Step(
        model,
        [torch.optim.AdamW(model.parameters(), foreach=True)],
        {"input_ids": ids, "labels": ids},
        planning.loss_of,
        torch.device("cpu"),
        keeps_output=True,
        measures=False,
    )
    precision = MixedPrecision("bf16", "cpu")
    return planning.Planner(planning.tracer_of(step, precision, precision, strategies.recompute))


def candidates(devices: int) -> Iterator[planning.Layout]:
    """Yields layouts without offload and DeepSpeed, with the simplest ones first."""
    degrees = [degree for degree in (1, 2, 4, 8) if devices % degree == 0]
    for stages in degrees:
        for tensor_parallel in degrees:
            shards, rest = divmod(devices, stages * tensor_parallel)
            for sharding in ("none", "full_shard") if shards > 1 and not rest else ("none",):
                for checkpointing in (False, True):
                    if shards and not rest:
                        yield planning.Layout(
                            sharding, shards, tensor_parallel, checkpointing=checkpointing, stages=stages
                        )


def fastest(size: str, devices: int, pipeline: bool) -> str:
    """Returns the layout that fits and sends the fewest bytes for each sample, with its memory."""
    found = []
    for layout in candidates(devices):
        if pipeline != (layout.stages > 1):
            continue
        # Each micro-batch of a pipeline has one sequence.
        batch_size = layout.microbatches if pipeline else 1
        trace = planner(size).trace_of(layout, batch_size)
        total = planning.memory_of(trace, layout).total
        if total <= CAPACITY:
            sent = planning.communication_of(trace, layout) / (batch_size * layout.shards)
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
