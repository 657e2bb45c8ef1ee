"""Memory and communication of a traced step under each strategy, by arithmetic from one trace.

Sources: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html, https://arxiv.org/abs/1910.02054
(ZeRO), https://arxiv.org/abs/2205.05198 (activations under tensor parallelism).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from accelerate.base import ConfigurationError, convert_file_size_to_int, wrong_value
from accelerate.planning.parts import Parts, Trace, largest


@dataclass(frozen=True)
class Sharding:
    """What is split between processes, and in which number format it is kept."""

    weights: bool
    gradients: bool
    optimizer: bool
    gathered: str = "nothing"  # of split weights in the forward pass: the largest "layer", or "all"
    masters: bool = False  # in 16 bit, the optimizer alone has float32 weights (DeepSpeed)


SHARDINGS = {
    "none": Sharding(False, False, False),
    "zero1": Sharding(False, False, True, masters=True),
    "zero2": Sharding(False, True, True, masters=True),
    "zero3": Sharding(True, True, True, "layer", masters=True),
    "full_shard": Sharding(True, True, True, "layer"),
    "shard_grad_op": Sharding(True, True, True, "all"),
}
ZERO_STAGES = ("none", "zero1", "zero2", "zero3")
"""Sharding by the number of a ZeRO stage."""

OFFLOADS = ("none", "optimizer", "all")
"""What is kept in the memory of the host: nothing, the state of the optimizer, or parameters too."""

UNITS_GATHERED = 2
"""Units of FSDP that are whole on a device: the one that computes, and the buffer that it is gathered in."""
UNITS_REDUCED = 2
"""Units whose gradients are whole: those of the one in backward, and the buffer that they are reduced in."""
BUCKET_ELEMENTS = 5 * 10**8
"""Elements in a bucket of DeepSpeed, by default."""
REPLICATED_ACTIVATIONS = 10 / 34
"""Share of the activations of a transformer's layer that each rank has whole under tensor parallelism."""
LARGEST_TENSOR_PARALLEL = 8


@dataclass(frozen=True)
class Layout:
    """How devices share a run: `shards` ranks split what `sharding` names, `tensor_parallel` ranks split each
    layer. The number of devices is the product."""

    sharding: str = "none"
    shards: int = 1
    tensor_parallel: int = 1
    offload: str = "none"
    checkpointing: bool = False
    accumulation: int = 1

    def __post_init__(self) -> None:
        row = SHARDINGS[self.sharding]
        for name in ("shards", "tensor_parallel", "accumulation"):
            if getattr(self, name) < 1:
                raise wrong_value(name, getattr(self, name), "it counts from 1", "Give 1 or more")
        if row.masters and self.tensor_parallel > 1:
            fix = "Use full_shard, shard_grad_op or none"
            raise wrong_value("sharding", self.sharding, "DeepSpeed's engine splits no layers", fix)
        if self.offload == "all" and not row.weights:
            fix = "Use full_shard, shard_grad_op or zero3, or offload the optimizer"
            raise wrong_value("offload", self.offload, f"{self.sharding} keeps parameters on the device", fix)
        if self.offload == "optimizer" and not row.masters:
            fix = "Use zero1, zero2 or zero3, or offload all of full_shard"
            raise wrong_value("offload", self.offload, f"{self.sharding} offloads all or nothing", fix)

    @property
    def name(self) -> str:
        parts = ["ddp" if self.sharding == "none" and self.shards > 1 else self.sharding]
        parts += [f"tp {self.tensor_parallel}"] * (self.tensor_parallel > 1)
        parts += [f"offload {self.offload}"] * (self.offload != "none")
        parts += ["checkpointing"] * self.checkpointing
        return " + ".join(parts)

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are cast once, not by autocast in each layer."""
        return self.sharding != "none"


def memory_of(trace: Trace, layout: Layout) -> Parts:
    """Return the parts on each device at its peak.

    Args:
        trace: of one device that holds everything, in the number format that the layout computes in.
        layout: how devices share the run.
    """
    work = [_place(moment, trace, layout, is_step=False) for moment in trace.work]
    return largest([*work, *(_place(moment, trace, layout, is_step=True) for moment in trace.step)])


def _place(moment: Parts, trace: Trace, layout: Layout, *, is_step: bool) -> Parts:
    """Return what one device has of a moment."""
    row, shards, masters = SHARDINGS[layout.sharding], layout.shards, trace.masters
    split = _split_by_layers(trace, layout)
    kept_as = 1.0 if row.masters else masters
    # FSDP exchanges nothing before the last pass of a window: until then gradients are whole.
    is_whole = row.gradients and not row.masters and layout.accumulation > 1 and not is_step
    weights = moment.parameters * split * kept_as / (shards if row.weights else 1)
    gradients = moment.gradients * split
    gradients *= 1.0 if is_whole else kept_as / (shards if row.gradients else 1)
    state = moment.optimizer * masters
    temporary = moment.temporary
    if row.masters and masters > 1:
        state += moment.parameters * masters
        temporary += moment.gradients * masters / shards if is_step else 0
    by_optimizer = split / (shards if row.optimizer else 1)
    if is_step:
        temporary *= by_optimizer * masters
    optimizer = state * by_optimizer
    if layout.offload != "none":
        optimizer, temporary = 0, 0 if is_step else temporary
    if layout.offload == "all":
        weights, gradients = 0, gradients if is_whole else 0
    return replace(
        moment,
        parameters=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=moment.activations * _share_of_activations(layout),
        temporary=temporary,
        communication=0 if is_step and row.weights else _buffers(moment, trace, layout, is_whole) * split,
    )


def _split_by_layers(trace: Trace, layout: Layout) -> float:
    """Return the share of the parameters that each rank has under tensor parallelism: blocks are split."""
    whole = max(moment.parameters for moment in (*trace.work, *trace.step))
    outside = trace.outside_blocks / whole if whole else 1.0
    return outside + (1 - outside) / layout.tensor_parallel


def _share_of_activations(layout: Layout) -> float:
    return REPLICATED_ACTIVATIONS + (1 - REPLICATED_ACTIVATIONS) / layout.tensor_parallel


def _buffers(moment: Parts, trace: Trace, layout: Layout, is_whole: bool) -> float:
    """Return the bytes of buffers for communication, and of parameters and gradients that are gathered.

    What is in no block is one unit: it stays gathered, and its gradients are whole until backward ends.
    """
    row = SHARDINGS[layout.sharding]
    if layout.shards == 1:
        return 0
    reduced = 0 if is_whole else trace.outside_blocks + UNITS_REDUCED * trace.largest_block
    if row.gathered == "layer":
        return trace.outside_blocks + UNITS_GATHERED * trace.largest_block + reduced
    if row.gathered == "all":
        return moment.parameters + reduced
    if row.masters:  # a bucket of gradients, and one that is reduced meanwhile
        element = 4 / trace.masters
        return 2 * min(trace.trained_bytes, BUCKET_ELEMENTS * element)
    return trace.trained_bytes  # DistributedDataParallel copies all gradients to buckets


def host_bytes(trace: Trace, layout: Layout) -> float:
    """Return the bytes that each rank keeps in the memory of the host."""
    if layout.offload == "none":
        return 0
    on_device = _place(trace.step[0], trace, replace(layout, offload="none"), is_step=True)
    shared = on_device.parameters + on_device.gradients if layout.offload == "all" else 0
    return on_device.optimizer + shared


def communication_of(trace: Trace, layout: Layout) -> float:
    """Return the bytes that each rank sends for one optimizer step, with collectives in rings."""
    row, n, t = SHARDINGS[layout.sharding], layout.shards, layout.tensor_parallel
    passes, split = layout.accumulation, _split_by_layers(trace, layout)
    gradients = trace.trained_bytes * split
    weights = trace.peak.parameters * split
    if row.weights:
        gathers = 2 if row.gathered == "layer" else 1
        sums = passes if row.masters else 1
        size = gathers * passes * weights + sums * gradients
    elif row.optimizer:
        size = (passes if row.gradients else 1) * gradients + weights
    else:
        size = 2 * gradients
    layers = 4 * 2 * trace.block_outputs * passes  # two sums in each block, in forward and in backward
    return size * (n - 1) / n + layers * (t - 1) / t


def candidates(
    devices: int, *, accumulation: int = 1, can_split_layers: bool = False, offload: bool = True
) -> Iterator[Layout]:
    """Yield the layouts of a number of devices; of each way to shard, the fastest first."""
    degrees = [t for t in range(1, min(devices, LARGEST_TENSOR_PARALLEL) + 1) if devices % t == 0]
    for degree in degrees if can_split_layers else [1]:
        for name, row in SHARDINGS.items():
            shards = devices // degree
            if (shards == 1 and name != "none") or (degree > 1 and row.masters):
                continue  # DeepSpeed and tensor parallelism are not combined
            kinds = [kind for kind, fits in (("optimizer", row.masters), ("all", row.weights)) if fits]
            for kind in ["none", *(kinds if offload else [])]:
                for checkpointing in (False, True):
                    yield Layout(name, shards, degree, kind, checkpointing, accumulation)


_DEVICES = re.compile(r"(?:\s*(\d{1,6})\s*[xX×])?(.+[bB])\s*")


def read_devices(text: str) -> tuple[int, int]:
    """Read "8x80GB": the number of devices, and the bytes of each; "80GB" is one device."""
    match = _DEVICES.fullmatch(text)
    count = int(match[1] or 1) if match else 0
    try:
        size = convert_file_size_to_int(match[2].upper()) if match else 0
    except ConfigurationError:
        size = 0
    if not count or not size:
        reason = "this is no number of devices with the memory of each"
        raise wrong_value("devices", text, reason, "Write 8x80GB, or 24GiB for one device")
    return count, size
