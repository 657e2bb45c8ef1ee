"""Memory and communication of a training step under each sharding strategy, computed from one trace.

Sources: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html,
    https://arxiv.org/abs/1910.02054 (ZeRO), https://arxiv.org/abs/2205.05198 (activations under tensor
    parallelism).
"""

from __future__ import annotations

import itertools
import math
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


UNITS_GATHERED = 2
"""Unsharded FSDP units on a device, which are the one that computes and its all-gather buffer."""
UNITS_REDUCED = 2
"""FSDP units with unsharded gradients, which are the one in backward and its reduce-scatter buffer."""
BUCKET_ELEMENTS = 5 * 10**8
"""Default number of elements in a bucket of DeepSpeed."""
REPLICATED_ACTIVATIONS = 10 / 34
"""Fraction of the activations of a transformer layer that tensor parallelism replicates on each rank."""
COPIES_AVERAGED = 2
"""Copies of the gradients that are averaged after a backward pass."""
LARGEST_TENSOR_PARALLEL = 8


@dataclass(frozen=True)
class Layout:
    """Distribution of a model over devices.

    `shards` ranks shard the tensors that `sharding` names, `tensor_parallel` ranks shard each layer,
    `expert_parallel` ranks have different experts, and `stages` ranks have different layers. The number of
    devices is the product. Ranks with different experts have different batches, and also shard the parameters
    outside of experts. A pipeline splits a batch into `microbatches`, and its schedule is 1F1B. Of the
    `shards`, groups of `sequence_parallel` times `context_parallel` ranks have parts of the sequences of one
    batch, and exchange heads along the first of these axes, keys and values along the other. The inputs of
    recomputed blocks are in host memory with `offload_activations`.
    """

    sharding: str = "none"
    shards: int = 1
    tensor_parallel: int = 1
    offload: str = "none"
    checkpointing: bool = False
    accumulation: int = 1
    stages: int = 1
    microbatches: int = 8
    expert_parallel: int = 1
    sequence_parallel: int = 1
    context_parallel: int = 1
    offload_activations: bool = False

    def __post_init__(self) -> None:
        row = SHARDINGS[self.sharding]
        if self.offload_activations and not self.checkpointing:
            reason = "only the inputs of recomputed blocks are offloaded"
            raise wrong_value("offload_activations", True, reason, "Recompute blocks, too")
        for name, value in vars(self).items():
            if type(value) is int and value < 1:
                raise wrong_value(name, value, "it counts from 1", "Give 1 or more")
        if row.has_masters and self.tensor_parallel * self.stages * self.expert_parallel > 1:
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
        parts = ["ddp" if self.sharding == "none" and self.replicas > 1 else self.sharding]
        parts += [f"ep {self.expert_parallel}"] * (self.expert_parallel > 1)
        parts += [f"pp {self.stages}"] * (self.stages > 1)
        parts += [f"cp {self.context_parallel}"] * (self.context_parallel > 1)
        parts += [f"sp {self.sequence_parallel}"] * (self.sequence_parallel > 1)
        parts += [f"tp {self.tensor_parallel}"] * (self.tensor_parallel > 1)
        parts += [f"offload {self.offload}"] * (self.offload != "none")
        parts += ["checkpointing"] * self.checkpointing
        parts += ["offload activations"] * self.offload_activations
        return " + ".join(parts)

    @property
    def num_devices(self) -> int:
        """Number of devices, which is the product of all sizes."""
        return self.replicas * self.tensor_parallel * self.stages

    @property
    def replicas(self) -> int:
        """Number of ranks that shard or average the parameters outside of experts."""
        return self.shards * self.expert_parallel

    @property
    def ranks_of_sequence(self) -> int:
        """Number of ranks that divide each sequence."""
        return self.sequence_parallel * self.context_parallel

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches in each batch of a rank, which is 1 without a pipeline."""
        return self.microbatches if self.stages > 1 else 1

    @property
    def samples_per_batch(self) -> int:
        """Samples of all ranks in one optimizer step for each sample of a forward pass on a rank."""
        return self.replicas // self.ranks_of_sequence * self.accumulation * self.num_microbatches

    @property
    def averages_after_backward(self) -> bool:
        """True if gradients are averaged after the backward pass, without DistributedDataParallel."""
        return self.expert_parallel > 1 and self.tensor_parallel == 1 and not self.is_sharded

    @property
    def uses_host(self) -> bool:
        """True if anything is offloaded to host memory."""
        return self.offload != "none" or self.offload_activations

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
    steps = [_shard_moment(moment, trace, layout, is_step=True) for moment in trace.step]
    if layout.averages_after_backward:  # gradients are copied and concatenated
        averaged = max(fraction for fraction, ranks in _fractions(trace, layout, trained=True) if ranks > 1)
        copies = COPIES_AVERAGED * averaged * trace.trained_bytes
        passes.append(replace(steps[0], temporary=0, communication=copies))
    return largest([*passes, *steps])


def _shard_moment(moment: Parts, trace: Trace, layout: Layout, *, is_step: bool) -> Parts:
    """Returns the bytes that one device has at a moment of an unsharded trace."""
    row, shards, master_ratio = SHARDINGS[layout.sharding], layout.shards, trace.master_ratio
    kept_as = 1.0 if row.has_masters else master_ratio
    # FSDP reduces gradients in the last backward of gradient accumulation. Until then they are unsharded.
    is_whole = row.gradients and not row.has_masters and layout.accumulation > 1 and not is_step
    weights = moment.parameters * kept_as * _fraction(trace, layout, is_sharded=row.weights)
    gradients = moment.gradients * (1.0 if is_whole else kept_as)
    gradients *= _fraction(trace, layout, is_sharded=row.gradients and not is_whole, trained=True)
    state = moment.optimizer * master_ratio
    temporary = moment.temporary
    if row.has_masters and master_ratio > 1:
        state += moment.parameters * master_ratio
        temporary += moment.gradients * master_ratio / shards if is_step else 0
    by_optimizer = _fraction(trace, layout, is_sharded=row.optimizer, trained=True)
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
        activations=moment.activations * _activation_fraction(trace, layout),
        temporary=temporary if is_step or layout.stages == 1 else temporary / layout.microbatches,
        communication=0 if is_step and row.weights else _buffers(moment, trace, layout, is_whole),
    )


def _fraction(trace: Trace, layout: Layout, *, is_sharded: bool = False, trained: bool = False) -> float:
    """Returns the fraction of the traced parameters on a rank, or of those that are trained."""
    fractions = _fractions(trace, layout, trained=trained)
    return sum(fraction / (ranks if is_sharded else 1) for fraction, ranks in fractions)


def _fractions(trace: Trace, layout: Layout, *, trained: bool = False) -> tuple[tuple[float, int], ...]:
    """Returns the fractions of the traced parameters before they are sharded, with the ranks that shard them.

    The first one is that of the parameters outside of experts, the second one that of experts, of which the
    trace has those of one rank. The parameters outside of blocks, such as embeddings, are on one rank of a
    pipeline.
    """
    whole = max(moment.parameters for moment in (*trace.forward_backward, *trace.step))
    of_experts = trace.experts if layout.expert_parallel > 1 else 0
    outside = trace.outside_blocks / (whole - of_experts) if whole > of_experts else 1.0
    experts = of_experts / whole if whole else 0.0
    if trained and of_experts:
        experts = trace.trained_experts / trace.trained_bytes
    in_stage = _stage_fraction(trace, layout)
    others = outside + (1 - outside) * in_stage / layout.tensor_parallel
    return ((1 - experts) * others, layout.replicas), (experts * in_stage, layout.shards)


def _stage_fraction(trace: Trace, layout: Layout) -> float:
    """Returns the fraction of the blocks in the largest stage of a pipeline."""
    num_blocks = _num_blocks(trace)
    return 1.0 if layout.stages == 1 else math.ceil(num_blocks / layout.stages) / num_blocks


def _activation_fraction(trace: Trace, layout: Layout) -> float:
    """Returns the fraction of the activations of a batch on the rank with the most.

    The first stage of a pipeline has those of its layers for one micro-batch of each stage.
    """
    alive = min(1.0, layout.stages / layout.num_microbatches)
    in_stage = _stage_fraction(trace, layout) * alive
    in_layer = REPLICATED_ACTIVATIONS + (1 - REPLICATED_ACTIVATIONS) / layout.tensor_parallel
    return in_stage * in_layer / layout.ranks_of_sequence


def _buffers(moment: Parts, trace: Trace, layout: Layout, is_whole: bool) -> float:
    """Returns the bytes of communication buffers, and of unsharded parameters and gradients.

    The parameters outside of all blocks are one FSDP unit. It stays unsharded, and so do its gradients until
    backward ends.
    """
    row, split = SHARDINGS[layout.sharding], _fraction(trace, layout)
    if layout.replicas == 1 or layout.averages_after_backward:
        return 0
    reduced = 0 if is_whole else trace.outside_blocks + UNITS_REDUCED * trace.largest_block
    if row.gathered == "layer" and layout.stages == 1:
        # FSDP copies experts without a buffer if no other rank has a shard of them.
        unbuffered = trace.experts_in_block if layout.shards == 1 else 0
        gathered = trace.outside_blocks + UNITS_GATHERED * trace.largest_block - unbuffered
        return (gathered + reduced) * split
    if row.gathered in ("layer", "all"):  # a pipeline gathers its stage for all micro-batches
        return (moment.parameters + reduced) * split
    if row.has_masters:  # a bucket of gradients, and one that is reduced at the same time
        element = 4 / trace.master_ratio
        return 2 * min(trace.trained_bytes, BUCKET_ELEMENTS * element)
    return trace.trained_bytes * split  # DistributedDataParallel copies all gradients to buckets


def least_bytes(model: Trace, layout: Layout) -> float:
    """Returns a lower bound of the bytes on each device, of parameters and optimizer states.

    Args:
        model: Trace of the model in any layout without expert parallelism.
        layout: Distribution of the model over devices.
    """
    removed = 1 - 1 / layout.expert_parallel
    moment = Parts(
        parameters=model.step[0].parameters - removed * model.experts,
        optimizer=model.step[0].optimizer * (1 - removed * model.trained_experts / model.trained_bytes),
    )
    trace = replace(
        model,
        forward_backward=(),
        step=(moment,),
        experts=round(model.experts / layout.expert_parallel),
        trained_experts=round(model.trained_experts / layout.expert_parallel),
        trained_bytes=round(model.trained_bytes - removed * model.trained_experts),
    )
    found = _shard_moment(moment, trace, layout, is_step=True)
    # The weights of DeepSpeed are in 16 bits, those of the model may be in 32 bits.
    return found.optimizer + (0 if SHARDINGS[layout.sharding].has_masters else found.parameters)


def host_bytes(trace: Trace, layout: Layout) -> float:
    """Returns the bytes that each rank offloads to host memory."""
    activations = trace.offloaded * _activation_fraction(trace, layout) * layout.offload_activations
    if layout.offload == "none":
        return activations
    on_device = _shard_moment(trace.step[0], trace, replace(layout, offload="none"), is_step=True)
    offloaded = on_device.parameters + on_device.gradients if layout.offload == "all" else 0
    return on_device.optimizer + offloaded + activations


def communication_of(trace: Trace, layout: Layout) -> float:
    """Returns the bytes that each rank sends in one optimizer step, with ring collectives."""
    t, e, passes = layout.tensor_parallel, layout.expert_parallel, layout.accumulation
    kinds = zip(_fractions(trace, layout), _fractions(trace, layout, trained=True), strict=True)
    size = 0.0
    for (of_weights, ranks), (of_gradients, _) in kinds:
        weights, gradients = trace.peak.parameters * of_weights, trace.trained_bytes * of_gradients
        size += _exchanged(weights, gradients, layout) * (ranks - 1) / ranks
    layers = 4 * 2 * trace.block_outputs * passes  # two all-reduces per block, in forward and in backward
    # Each layer sends hidden states and outputs in forward, and their gradients in backward.
    experts = (6 if layout.checkpointing else 4) * trace.dispatched * passes
    size += (layers * (t - 1) / t + experts / t * (e - 1) / e) * _stage_fraction(trace, layout)
    s, c = layout.sequence_parallel, layout.context_parallel
    own = trace.block_outputs / layout.ranks_of_sequence * passes
    size += 4 * 2 * own * (s - 1) / s  # queries, keys, values and outputs, in forward and in backward
    size += 3 * 2 * own * (c - 1)  # keys and values in forward and in backward, and their gradients
    between_stages = 2 * trace.block_outputs / _num_blocks(trace) * passes  # activations and gradients
    return size + between_stages * (layout.stages > 1)


def _exchanged(weights: float, gradients: float, layout: Layout) -> float:
    """Returns the bytes of weights and gradients in the collectives of a step."""
    row, passes = SHARDINGS[layout.sharding], layout.accumulation
    if row.weights:
        num_all_gathers = 2 if row.gathered == "layer" else 1
        num_reductions = passes if row.has_masters else 1
        return num_all_gathers * passes * weights + num_reductions * gradients
    if row.optimizer:
        return (passes if row.gradients else 1) * gradients + weights
    return 2 * gradients


def _num_blocks(trace: Trace) -> int:
    """Returns the number of blocks, or 1 for a model without blocks."""
    return max(1, round((trace.peak.parameters - trace.outside_blocks) / max(1, trace.largest_block)))


def candidate_layouts(devices: int, trace: Trace, *, accumulation: int = 1) -> Iterator[Layout]:
    """Yields the layouts of a number of devices that a model allows, with the fastest one of each kind first.

    Args:
        accumulation: Forward and backward passes in each step.
    """
    # With more stages than micro-batches, ranks wait most of the time.
    most_stages = min(_num_blocks(trace), Layout.microbatches)
    divisors = [divisor for divisor in range(1, devices + 1) if devices % divisor == 0]
    recomputations = ((False, False), (True, False), (True, True))
    for stages, degree, experts in itertools.product(divisors, repeat=3):
        shards, rest = divmod(devices, stages * degree * experts)
        if rest or stages > most_stages or degree > LARGEST_TENSOR_PARALLEL:
            continue
        if degree > 1 and not trace.can_split_layers:
            continue
        if experts > 1 and (not trace.num_experts or trace.num_experts % experts):
            continue
        if trace.num_experts and degree > 1 and experts == 1:
            continue  # plans for tensor parallelism leave experts to expert parallelism
        for name, row in SHARDINGS.items():
            is_plain = stages * degree * experts == 1
            needs_fsdp = stages > 1 and degree > 1 and experts > 1
            if (shards * experts == 1 and name != "none") or (row.has_masters and not is_plain):
                continue  # DeepSpeed is not combined with other axes
            if (needs_fsdp and name == "none") or (stages > 1 and name == "shard_grad_op"):
                continue  # a pipeline keeps the units of its stage gathered in any case
            kinds = [kind for kind, fits in (("optimizer", row.has_masters), ("all", row.weights)) if fits]
            for kind in ["none", *(kinds if stages == 1 else [])]:
                for checkpointing, offloads in recomputations:
                    yield Layout(
                        name,
                        shards,
                        degree,
                        kind,
                        checkpointing,
                        accumulation,
                        stages=stages,
                        expert_parallel=experts,
                        offload_activations=offloads,
                    )


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
