"""The parts of the acceptance run, in the order in which they run."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """One row.

    Attributes:
        name: of the part.
        function: `module:function`, called with a `Setting`; a leading dot means this package.
        seconds: after which it is stopped.
        alone: whether nothing else runs meanwhile, because it is timed or limits memory.
    """

    name: str
    function: str
    seconds: int
    alone: bool = False


FACTS = Part("facts", ".facts:collect", 60, alone=True)
"""Runs first: what machine this is."""

PARTS: tuple[Part, ...] = (
    Part("device_tests", ".suites:run_device_tests", 120),
    Part("state", ".training:check_state", 60),
    Part("bf16", ".precision:train_bf16", 60),
    Part("fp16", ".precision:train_fp16", 60),
    Part("fp8", ".precision:train_fp8", 90),
    Part("compile_whole", ".compiling:compile_whole", 120),
    Part("compile_regional", ".compiling:compile_regional", 120),
    Part("collectives_one_rank", ".processes:run_collectives_on_one_rank", 90),
    Part("collectives_all_devices", ".processes:run_on_all_devices", 120),
    Part("ranks_share_device", ".processes:run_ranks_on_one_device", 120),
    Part("ddp_one_rank", ".processes:train_ddp", 90),
    Part("fsdp2_one_rank", ".processes:train_fsdp2", 120),
    Part("out_of_memory", ".memory:retry_smaller_batches", 60),
    Part("memory_snapshot", ".memory:write_snapshot", 60),
    Part("peak_memory", ".memory:compare_peak_with_estimate", 90, alone=True),
    Part("activation_offload", ".activations:compare_offload", 120, alone=True),
    Part("loaders", ".loading:read_batches", 90, alone=True),
    Part("checkpoints", ".checkpoints:save_and_restore", 120, alone=True),
    Part("recent_checkpoints", ".checkpoints:keep_recent", 120, alone=True),
    Part("averages", ".checkpoints:average_weights", 90, alone=True),
    Part("step_plain", ".steps:time_plain", 120, alone=True),
    Part("step_accumulated", ".steps:time_accumulated", 120, alone=True),
    Part("step_clipped", ".steps:time_clipped", 120, alone=True),
    Part("offload_memory", ".offload:infer_from_memory", 120, alone=True),
    Part("offload_disk", ".offload:infer_from_disk", 150, alone=True),
)

LEFT = Part("nothing_left", ".facts:compare_free_memory", 60, alone=True)
"""Runs last; the runner adds processes and files that are left."""
