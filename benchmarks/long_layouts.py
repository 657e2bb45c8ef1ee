"""Print what fits sequences of some lengths, by the memory planner, without logits.

For each model, length and number of devices, the first of these that fits is shown: nothing, activation
checkpointing, offload of activations; each of them first without and then with Ulysses over all devices.
Several devices shard the model with FSDP. A batch is one sequence for each group of ranks that divides it.
"""

from __future__ import annotations

from accelerate import planning
from accelerate.base import convert_bytes
from layouts import CAPACITY, planner

SIZES = ("1.2B", "8B")
LENGTHS, DEVICES = (8192, 32768, 131072), (1, 8)
RECOMPUTED = (
    {},
    {"checkpointing": True},
    {"checkpointing": True, "offload_activations": True},
)


def candidates(devices: int) -> list[planning.Layout]:
    """Returns the layouts in the order in which they are tried."""
    sharding = "none" if devices == 1 else "full_shard"
    return [
        planning.Layout(sharding, devices, sequence_parallel=ranks, **recomputed)
        for recomputed in RECOMPUTED
        for ranks in sorted({1, devices})
    ]


def first_that_fits(size: str, length: int, devices: int) -> str:
    for layout in candidates(devices):
        trace = planner(size, length, logits=False).trace_of(layout, 1)
        total = planning.memory_of(trace, layout).total
        if total <= CAPACITY:
            return f"{layout.name} ({convert_bytes(total)})"
    return "none fits"


def main() -> None:
    print("Decoders in bf16 with AdamW, one sequence, devices of 80 GB.")
    print("| parameters | length | 1 device | 8 devices |\n|---|---|---|---|")
    for size in SIZES:
        for length in LENGTHS:
            cells = [first_that_fits(size, length, devices) for devices in DEVICES]
            print(f"| {size} | {length:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
