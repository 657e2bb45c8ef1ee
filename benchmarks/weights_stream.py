"""What a stream of the weights of a model under FSDP 2 costs over its whole state dict, on two processes.

Processor time of rank 0 is counted, and the memory that rank 0 takes in addition to the model at its peak.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from pairing import Pair, measure, report
from ranks import start

PROCESSES, LAYERS, WIDTH, BUCKET = 2, 24, 256, 4 * 2**20
REPETITIONS, ROUNDS = 1, 20
TIME_BUDGET, MEMORY_BUDGET = 1.1, 1.5


def build() -> nn.Module:
    """About three hundred tensors, of 80 MB together."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def memory(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS, or VmHWM, its peak."""
    (size,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(size) * 1024


def peak_of(work: Callable[[], object]) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at the current value
    before = memory("VmRSS")
    result = work()
    del result
    return memory("VmHWM") - before


def run_rank() -> tuple[Pair, int, int] | None:
    ctypes.CDLL(None).mallopt(-3, 2**17)  # M_MMAP_THRESHOLD: freed memory goes back to the system at once
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(build())

    def gather() -> object:
        return accelerator.get_state_dict(model)

    def stream() -> None:
        for _ in accelerator.stream_weights(model, bucket_size=BUCKET):
            pass

    stream()  # torch loads modules
    whole, peak = peak_of(gather), peak_of(stream)
    pair = measure(
        "gather the weights one bucket at a time, over get_state_dict",
        gather,
        stream,
        budget=TIME_BUDGET,
        repetitions=REPETITIONS,
        rounds=ROUNDS,
    )
    is_first = accelerator.is_main_process
    accelerator.end_training()
    return (pair, whole, peak) if is_first else None


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    [(pair, whole, peak)] = start(run_rank, PROCESSES)
    pairs = [
        pair,
        Pair(
            f"memory at its peak, over a bucket of {BUCKET / 2**20:.0f} MiB",
            BUCKET,
            peak,
            peak / BUCKET,
            MEMORY_BUDGET,
            measured="B",
        ),
        Pair("the same, over that of get_state_dict", whole, peak, peak / whole, 0.2, measured="B"),
    ]
    return report(pairs, "Streamed weights")


if __name__ == "__main__":
    sys.exit(main())
