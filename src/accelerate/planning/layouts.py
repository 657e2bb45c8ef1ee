"""Memory and communication of a training step under each sharding strategy, computed from one trace.

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
    """Tensors that a strategy shards between ranks, and the dtype that it keeps them in."""

    weights: bool
    gradients: bool
    optimizer: bool
    gathered: str = (
        "nothing"  # sharded weights on a device in the forward pass: the largest "layer", or "all"
    )
    has_masters: bool = False  # in 16 bit, only the optimizer has float32 weights (DeepSpeed)


SHARDINGS = {
    "none": Sharding(False, False, False),
    "zero1": Sharding(False, False, True, has_masters=True),
    "zero2": Sharding(False, True, True, has_masters=True),
    "zero3": Sharding(True, True, True, "layer", has_masters=True),
    "full_shard": Sharding(True, True, True, "layer"),
    "shard_grad_op": Sharding(True, True, True, "all"),
}
ZERO_STAGES = ("none", "zero1", "zero2", "zero3")
"""Names of the shardings, indexed by ZeRO stage."""

OFFLOADS = ("none", "optimizer", "all")
"""Names of what is offloaded to host memory, where "all" is parameters, gradients and optimizer state."""

UNITS_GATHERED = 2
"""Unsharded FSDP units on a device, which are the one that computes and its all-gather buffer."""
UNITS_REDUCED = 2
"""FSDP units with unsharded gradients, which are the one in backward and its reduce-scatter buffer."""
BUCKET_ELEMENTS = 5 * 10**8
"""Default number of elements in a bucket of DeepSpeed."""
REPLICATED_ACTIVATIONS = 10 / 34
"""Fraction of the activations of a transformer layer that tensor parallelism replicates on each rank."""
LARGEST_TENSOR_PARALLEL = 8


@dataclass(frozen=True)
class Layout:
    """Distribution of a model over devices.

    `shards` ranks shard the tensors that `sharding` names, `tensor_parallel` ranks shard each layer, and
    `stages` ranks have different layers. The number of devices is the product. A pipeline splits a batch into
    `microbatches`, and its schedule is 1F1B.
    """

    sharding: str = "none"
    shards: int = 1
    tensor_parallel: int = 1
    offload: str = "none"
    checkpointing: bool = False
    accumulation: int = 1
    stages: int = 1
    microbatches: int = 8

    def __post_init__(self) -> None:
        row = SHARDINGS[self.sharding]
        for name in ("shards", "tensor_parallel", "accumulation", "stages", "microbatches"):
            if getattr(self, name) < 1:
                raise wrong_value(name, getattr(self, name), "it counts from 1", "Give 1 or more")
        if row.has_masters and self.tensor_parallel * self.stages > 1:
            fix = "Use full_shard, shard_grad_op or none"
            raise wrong_value("sharding", self.sharding, "DeepSpeed's engine splits no layers", fix)
        if self.offload == "all" and not row.weights:
            fix = "Use full_shard, shard_grad_op or zero3, or offload the optimizer"
            raise wrong_value("offload", self.offload, f"{self.sharding} keeps parameters on the device", fix)
        if self.offload == "optimizer" and not row.has_masters:
            fix = "Use zero1, zero2 or zero3, or offload all of full_shard"
            raise wrong_value("offload", self.offload, f"{self.sharding} offloads all or nothing", fix)

    @property
    def name(self) -> str:
        parts = ["ddp" if self.sharding == "none" and self.shards > 1 else self.sharding]
        parts += [f"pp {self.stages}"] * (self.stages > 1)
        parts += [f"tp {self.tensor_parallel}"] * (self.tensor_parallel > 1)
        parts += [f"offload {self.offload}"] * (self.offload != "none")
        parts += ["checkpointing"] * self.checkpointing
        return " + ".join(parts)

    @property
    def num_devices(self) -> int:
        """Number of devices, which is the product of all sizes."""
        return self.shards * self.tensor_parallel * self.stages

    @property
    def is_sharded(self) -> bool:
        """True if the strategy shards, and so casts parameters once instead of by autocast in each layer."""
        return self.sharding != "none"


def memory_of(trace: Trace, layout: Layout) -> Parts:
    """Returns the bytes of each part on each device at its peak.

    Args:
        trace: Trace of the step on one device without sharding, with the mixed precision of the layout.
        layout: Distribution of the model over devices.
    """
    passes = [_shard_moment(moment, trace, layout, is_step=False) for moment in trace.forward_backward]
    return largest([*passes, *(_shard_moment(moment, trace, layout, is_step=True) for moment in trace.step)])


def _shard_moment(moment: Parts, trace: Trace, layout: Layout, *, is_step: bool) -> Parts:
    """Returns the bytes that one device has at a moment of an unsharded trace."""
    row, shards, master_ratio = SHARDINGS[layout.sharding], layout.shards, trace.master_ratio
    split = _tensor_parallel_fraction(trace, layout)
    kept_as = 1.0 if row.has_masters else master_ratio
    # FSDP reduces gradients in the last backward of gradient accumulation. Until then they are unsharded.
    is_whole = row.gradients and not row.has_masters and layout.accumulation > 1 and not is_step
    weights = moment.parameters * split * kept_as / (shards if row.weights else 1)
    gradients = moment.gradients * split
    gradients *= 1.0 if is_whole else kept_as / (shards if row.gradients else 1)
    state = moment.optimizer * master_ratio
    temporary = moment.temporary
    if row.has_masters and master_ratio > 1:
        state += moment.parameters * master_ratio
        temporary += moment.gradients * master_ratio / shards if is_step else 0
    by_optimizer = split / (shards if row.optimizer else 1)
    if is_step:
        temporary *= by_optimizer * master_ratio
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
        activations=moment.activations * _activation_fraction(layout),
        temporary=temporary if is_step or layout.stages == 1 else temporary / layout.microbatches,
        communication=0 if is_step and row.weights else _buffers(moment, trace, layout, is_whole) * split,
    )


def _tensor_parallel_fraction(trace: Trace, layout: Layout) -> float:
    """Returns the fraction of the parameters on a rank, of which each has a part of all blocks.

    The parameters outside of blocks, such as embeddings, are on one rank of a pipeline.
    """
    whole = max(moment.parameters for moment in (*trace.forward_backward, *trace.step))
    outside = trace.outside_blocks / whole if whole else 1.0
    return outside + (1 - outside) / (layout.tensor_parallel * layout.stages)


def _activation_fraction(layout: Layout) -> float:
    """Returns the fraction of the activations of a batch on the rank with the most.

    The first stage of a pipeline has those of its layers for one micro-batch of each stage.
    """
    alive = 1.0 if layout.stages == 1 else 1 / max(layout.microbatches, layout.stages)
    return alive * _tensor_parallel_activations(layout)


def _tensor_parallel_activations(layout: Layout) -> float:
    return REPLICATED_ACTIVATIONS + (1 - REPLICATED_ACTIVATIONS) / layout.tensor_parallel


def _buffers(moment: Parts, trace: Trace, layout: Layout, is_whole: bool) -> float:
    """Returns the bytes of communication buffers, and of unsharded parameters and gradients.

    The parameters outside of all blocks are one FSDP unit. It stays unsharded, and so do its gradients until
    backward ends.
    """
    row = SHARDINGS[layout.sharding]
    if layout.shards == 1:
        return 0
    reduced = 0 if is_whole else trace.outside_blocks + UNITS_REDUCED * trace.largest_block
    if row.gathered == "layer" and layout.stages == 1:
        return trace.outside_blocks + UNITS_GATHERED * trace.largest_block + reduced
    if row.gathered in ("layer", "all"):  # a pipeline gathers its stage for all micro-batches
        return moment.parameters + reduced
    if row.has_masters:  # a bucket of gradients, and one that is reduced at the same time
        element = 4 / trace.master_ratio
        return 2 * min(trace.trained_bytes, BUCKET_ELEMENTS * element)
    return trace.trained_bytes  # DistributedDataParallel copies all gradients to buckets


def host_bytes(trace: Trace, layout: Layout) -> float:
    """Returns the bytes that each rank offloads to host memory."""
    if layout.offload == "none":
        return 0
    on_device = _shard_moment(trace.step[0], trace, replace(layout, offload="none"), is_step=True)
    offloaded = on_device.parameters + on_device.gradients if layout.offload == "all" else 0
    return on_device.optimizer + offloaded


def communication_of(trace: Trace, layout: Layout) -> float:
    """Returns the bytes that each rank sends in one optimizer step, with ring collectives."""
    row, n, t = SHARDINGS[layout.sharding], layout.shards, layout.tensor_parallel
    passes, split = layout.accumulation, _tensor_parallel_fraction(trace, layout)
    gradients = trace.trained_bytes * split
    weights = trace.peak.parameters * split
    if row.weights:
        num_all_gathers = 2 if row.gathered == "layer" else 1
        num_reductions = passes if row.has_masters else 1
        size = num_all_gathers * passes * weights + num_reductions * gradients
    elif row.optimizer:
        size = (passes if row.gradients else 1) * gradients + weights
    else:
        size = 2 * gradients
    layers = 4 * 2 * trace.block_outputs * passes  # two all-reduces per block, in forward and in backward
    between_stages = 2 * trace.block_outputs / _num_blocks(trace) * passes  # activations and gradients
    return size * (n - 1) / n + layers * (t - 1) / t + between_stages * (layout.stages > 1)


def _num_blocks(trace: Trace) -> int:
    return max(1, round((trace.peak.parameters - trace.outside_blocks) / max(1, trace.largest_block)))


def candidate_layouts(
    devices: int, *, accumulation: int = 1, can_split_layers: bool = False, offload: bool = True
) -> Iterator[Layout]:
    """Yields all layouts of a number of devices, with the fastest layout of each sharding first."""
    degrees = [t for t in range(1, min(devices, LARGEST_TENSOR_PARALLEL) + 1) if devices % t == 0]
    for degree in degrees if can_split_layers else [1]:
        for name, row in SHARDINGS.items():
            shards = devices // degree
            if (shards == 1 and name != "none") or (degree > 1 and row.has_masters):
                continue  # DeepSpeed and tensor parallelism are not combined
            kinds = [kind for kind, fits in (("optimizer", row.has_masters), ("all", row.weights)) if fits]
            for kind in ["none", *(kinds if offload else [])]:
                for checkpointing in (False, True):
                    yield Layout(name, shards, degree, kind, checkpointing, accumulation)


_DEVICES = re.compile(r"(?:\s*(\d{1,6})\s*[xX×])?(.+[bB])\s*")


def parse_devices(text: str) -> tuple[int, int]:
    """Returns the number of devices and the bytes of each for text such as "8x80GB" or "80GB"."""
    match = _DEVICES.fullmatch(text)
    count = int(match[1] or 1) if match else 0
    try:
        size = convert_file_size_to_int(match[2].upper()) if match else 0
    except ConfigurationError:
        size = 0
    if not count or not size:
        reason = "this is not a number of devices with the memory of each"
        raise wrong_value("devices", text, reason, "Write 8x80GB, or 24GiB for one device")
    return count, size
