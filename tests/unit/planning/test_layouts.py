"""The memory of each device, and what it sends, by strategy: against the arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accelerate.base import ConfigurationError
from accelerate.planning import (
    SHARDINGS,
    Layout,
    Parts,
    Trace,
    candidate_layouts,
    communication_of,
    host_bytes,
    least_bytes,
    memory_of,
    parse_devices,
)

WEIGHTS, STATE, ACTIVATIONS = 800, 1600, 400
BLOCK, OUTSIDE = 100, 200
WORK = Parts(parameters=WEIGHTS, gradients=WEIGHTS, optimizer=STATE, activations=ACTIVATIONS)
STEP = Parts(parameters=WEIGHTS, gradients=WEIGHTS, optimizer=STATE, temporary=80)
TRACE = Trace(1, (WORK,), (STEP,), WEIGHTS, BLOCK, OUTSIDE, block_outputs=60)
LOW = Trace(1, (WORK,), (STEP,), WEIGHTS, BLOCK, OUTSIDE, master_ratio=2.0)
N = 4


def parts(layout: Layout, trace: Trace = TRACE) -> dict[str, int]:
    found = memory_of(trace, layout).as_dict()
    return {name: found[name] for name in ("parameters", "gradients", "optimizer", "communication")}


def expected(weights: float, gradients: float, optimizer: float, communication: float) -> dict[str, float]:
    return dict(
        zip(("parameters", "gradients", "optimizer", "communication"),
            (weights, gradients, optimizer, communication), strict=True)
    )  # fmt: skip


GATHERED = OUTSIDE + 2 * BLOCK
REDUCED = OUTSIDE + 2 * BLOCK


@pytest.mark.parametrize(
    ("layout", "values"),
    [
        (Layout(), (WEIGHTS, WEIGHTS, STATE, 0)),
        (Layout(shards=N), (WEIGHTS, WEIGHTS, STATE, WEIGHTS)),  # buckets of DistributedDataParallel
        (Layout("zero1", N), (WEIGHTS, WEIGHTS, STATE / N, 2 * WEIGHTS)),
        (Layout("zero2", N), (WEIGHTS, WEIGHTS / N, STATE / N, 2 * WEIGHTS)),
        (Layout("zero3", N), (WEIGHTS / N, WEIGHTS / N, STATE / N, GATHERED + REDUCED)),
        (Layout("full_shard", N), (WEIGHTS / N, WEIGHTS / N, STATE / N, GATHERED + REDUCED)),
        (Layout("shard_grad_op", N), (WEIGHTS / N, WEIGHTS / N, STATE / N, WEIGHTS + REDUCED)),
        (Layout("full_shard", N, accumulation=2), (WEIGHTS / N, WEIGHTS, STATE / N, GATHERED)),
        (Layout("zero3", N, accumulation=2), (WEIGHTS / N, WEIGHTS / N, STATE / N, GATHERED + REDUCED)),
        (Layout("zero2", N, offload="optimizer"), (WEIGHTS, WEIGHTS / N, 0, 2 * WEIGHTS)),
        (Layout("full_shard", N, offload="all"), (0, 0, 0, GATHERED + REDUCED)),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_what_each_device_has(layout: Layout, values: tuple[float, ...]) -> None:
    assert parts(layout) == expected(*values)


def test_in_mixed_precision_fsdp_keeps_shards_in_float32() -> None:
    assert parts(Layout("full_shard", N), LOW) == expected(
        2 * WEIGHTS / N, 2 * WEIGHTS / N, 2 * STATE / N, GATHERED + REDUCED
    )


def test_in_mixed_precision_deepspeed_has_masters_in_the_optimizer() -> None:
    masters = 2 * WEIGHTS
    found = parts(Layout("zero1", N), LOW)
    assert found["parameters"] == WEIGHTS
    assert found["optimizer"] == (2 * STATE + masters) / N


def test_the_step_of_the_optimizer_can_be_the_peak() -> None:
    small = Trace(1, (Parts(parameters=8),), (Parts(parameters=8, temporary=8),), 8, 0, 8)
    assert memory_of(small, Layout()).temporary == 8


def test_tensor_parallel_splits_blocks_and_most_activations() -> None:
    found = memory_of(TRACE, Layout(tensor_parallel=2))
    assert found.parameters == OUTSIDE + (WEIGHTS - OUTSIDE) / 2
    assert ACTIVATIONS / 2 < found.activations < ACTIVATIONS


def test_a_pipeline_splits_blocks_and_keeps_the_activations_of_some_micro_batches() -> None:
    layout = Layout(stages=2, microbatches=8)
    found = memory_of(TRACE, layout)
    assert layout.name == "none + pp 2"
    assert found.parameters == OUTSIDE + (WEIGHTS - OUTSIDE) / 2
    assert found.activations == ACTIVATIONS / 2 * (2 / 8)  # one micro-batch for each stage
    # The largest of four stages has two of six blocks, and both micro-batches.
    uneven = memory_of(TRACE, Layout(stages=4, microbatches=2))
    assert uneven.activations == pytest.approx(ACTIVATIONS / 3)
    assert uneven.parameters == pytest.approx(OUTSIDE + (WEIGHTS - OUTSIDE) / 3)
    blocks = (WEIGHTS - OUTSIDE) / BLOCK
    assert communication_of(TRACE, layout) == pytest.approx(2 * 60 / blocks)
    sharded = Layout("full_shard", N, stages=2)
    assert sharded.num_devices == 2 * N
    assert memory_of(TRACE, sharded).parameters == (OUTSIDE + (WEIGHTS - OUTSIDE) / 2) / N


def test_the_host_has_what_is_offloaded() -> None:
    assert host_bytes(TRACE, Layout("full_shard", N)) == 0
    assert host_bytes(TRACE, Layout("zero2", N, offload="optimizer")) == STATE / N
    assert host_bytes(TRACE, Layout("full_shard", N, offload="all")) == (2 * WEIGHTS + STATE) / N


@pytest.mark.parametrize(
    ("layout", "sent"),
    [
        (Layout(), 0),
        (Layout(shards=N), 2 * WEIGHTS),
        (Layout("zero1", N), 2 * WEIGHTS),
        (Layout("zero2", N, accumulation=3), 4 * WEIGHTS),
        (Layout("shard_grad_op", N), 2 * WEIGHTS),
        (Layout("full_shard", N), 3 * WEIGHTS),
        (Layout("full_shard", N, accumulation=3), 7 * WEIGHTS),
        (Layout("zero3", N, accumulation=3), 9 * WEIGHTS),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_what_each_rank_sends_in_a_step(layout: Layout, sent: float) -> None:
    assert communication_of(TRACE, layout) == sent * (N - 1) / N


def test_sequence_parallel_divides_activations_and_exchanges_heads() -> None:
    layout = Layout(shards=2, sequence_parallel=2)
    assert memory_of(TRACE, layout).activations == memory_of(TRACE, Layout(shards=2)).activations / 2
    assert layout.samples_per_batch == 1
    assert layout.name == "ddp + sp 2"
    exchanged = communication_of(TRACE, layout) - communication_of(TRACE, Layout(shards=2))
    assert exchanged == 8 * 60 / 4


def test_context_parallel_divides_activations_and_exchanges_keys_and_values() -> None:
    layout = Layout(shards=4, context_parallel=2, sequence_parallel=2)
    assert memory_of(TRACE, layout).activations == memory_of(TRACE, Layout(shards=4)).activations / 4
    assert layout.samples_per_batch == 1
    assert layout.name == "ddp + cp 2 + sp 2"
    exchanged = communication_of(TRACE, layout) - communication_of(TRACE, Layout(shards=4))
    assert exchanged == 8 * 60 / 4 / 2 + 6 * 60 / 4


def test_candidates_use_all_devices() -> None:
    found = list(candidate_layouts(8, replace(TRACE, can_split_layers=True)))
    assert all(each.shards * each.tensor_parallel * each.stages == 8 for each in found)
    assert {each.sharding for each in found} == set(SHARDINGS)
    assert {each.tensor_parallel for each in found} == {1, 2, 4, 8}
    assert {each.tensor_parallel for each in candidate_layouts(8, TRACE)} == {1}
    assert [each.name for each in candidate_layouts(1, TRACE)] == [
        "none",
        "none + checkpointing",
        "none + checkpointing + offload activations",
    ]


EXPERTS, SENT = 400, 30
WITH_EXPERTS = replace(
    TRACE,
    experts=EXPERTS,
    trained_experts=EXPERTS,
    experts_in_block=50,
    num_experts=8,
    dispatched=SENT,
    can_split_layers=True,
)


@pytest.mark.parametrize(
    ("layout", "values"),
    [
        # All ranks have the parameters outside of experts, and average gradients after backward.
        (Layout(expert_parallel=2), (WEIGHTS, WEIGHTS, STATE, 2 * (WEIGHTS - EXPERTS))),
        (Layout(shards=2, expert_parallel=2), (WEIGHTS, WEIGHTS, STATE, 2 * EXPERTS)),
        (
            Layout("full_shard", 2, expert_parallel=4),
            (*((size * (1 / 8 + 1 / 2) / 2) for size in (WEIGHTS, WEIGHTS, STATE)), GATHERED + REDUCED),
        ),
        (
            Layout("full_shard", 1, expert_parallel=2),
            (*((size * (1 / 2 + 1) / 2) for size in (WEIGHTS, WEIGHTS, STATE)), GATHERED - 50 + REDUCED),
        ),
        (
            Layout("none", 1, 2, expert_parallel=2),
            (*(size * 3 / 4 + size / 8 for size in (WEIGHTS, WEIGHTS, STATE)), WEIGHTS * 7 / 8),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_experts_are_on_some_ranks(layout: Layout, values: tuple[float, ...]) -> None:
    # The trace has the experts of one rank, half of the parameters. Its activations are large only here.
    quiet = replace(WORK, activations=0)
    assert parts(layout, replace(WITH_EXPERTS, forward_backward=(quiet,))) == pytest.approx(expected(*values))


def test_frozen_experts_have_no_gradients_and_no_states() -> None:
    trace = replace(WITH_EXPERTS, trained_experts=0, trained_bytes=WEIGHTS - EXPERTS)
    found = memory_of(trace, Layout("full_shard", 2, expert_parallel=2))
    assert found.parameters == (WEIGHTS - EXPERTS) / 4 + EXPERTS / 2
    assert found.gradients == WEIGHTS / 4
    assert found.optimizer == STATE / 4


def test_experts_send_hidden_states_and_outputs_in_both_passes() -> None:
    def sent(layout: Layout) -> float:
        return communication_of(WITH_EXPERTS, layout)

    gradients = 2 * (WEIGHTS - EXPERTS) * 3 / 4  # those of experts stay on their rank
    assert sent(Layout(expert_parallel=4)) == gradients + 4 * SENT * 3 / 4
    assert sent(Layout(expert_parallel=4, checkpointing=True)) == gradients + 6 * SENT * 3 / 4
    replicas = 2 * ((WEIGHTS - EXPERTS) * 7 / 8 + EXPERTS / 2)
    assert sent(Layout(shards=2, expert_parallel=4)) == replicas + 4 * SENT * 3 / 4


def test_candidates_share_experts_equally() -> None:
    found = list(candidate_layouts(16, WITH_EXPERTS))
    assert {each.expert_parallel for each in found} == {1, 2, 4, 8}
    assert all(each.num_devices == 16 for each in found)
    assert all(each.expert_parallel > 1 for each in found if each.tensor_parallel > 1)
    split = [each for each in found if each.stages > 1 and each.tensor_parallel > 1]
    assert {each.sharding for each in split} == {"full_shard"}
    assert {each.expert_parallel for each in candidate_layouts(16, TRACE)} == {1}


def test_candidates_have_at_most_one_stage_for_each_block() -> None:
    found = list(candidate_layouts(16, TRACE))  # six blocks
    assert {each.stages for each in found} == {1, 2, 4}
    assert {each.sharding for each in found if each.stages > 1} == {"none", "full_shard"}
    assert {each.offload for each in found if each.stages > 1} == {"none"}


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_the_lower_bound_is_below_all_layouts(ratio: float) -> None:
    model = replace(WITH_EXPERTS, master_ratio=ratio)
    for layout in candidate_layouts(8, model):
        removed = round(EXPERTS * (1 - 1 / layout.expert_parallel))
        kept = 1 - removed / WEIGHTS
        rest = Parts(parameters=WEIGHTS * kept, gradients=WEIGHTS * kept, optimizer=STATE * kept)
        trace = replace(
            model,
            forward_backward=(rest,),
            step=(rest,),
            trained_bytes=WEIGHTS - removed,
            experts=EXPERTS - removed,
            trained_experts=EXPERTS - removed,
        )
        assert 0 <= least_bytes(model, layout) <= memory_of(trace, layout).total + 1e-6
    plain = Layout("full_shard", 4)
    assert least_bytes(WITH_EXPERTS, plain) == (WEIGHTS + STATE) / 4
    assert least_bytes(WITH_EXPERTS, replace(plain, offload="all")) == 0


@pytest.mark.parametrize(
    ("text", "devices"),
    [("8x80GB", (8, 80 * 10**9)), ("24GiB", (1, 24 * 2**30)), ("2 X 1.5gb", (2, 15 * 10**8))],
)
def test_devices_are_a_number_and_a_size(text: str, devices: tuple[int, int]) -> None:
    assert parse_devices(text) == devices


@pytest.mark.parametrize(
    "text", ["", "8x", "x80GB", "0x80GB", "8x80", "8*80GB", "8x0GB", "-1x80GB", "8x80XB"]
)
def test_other_texts_are_no_devices(text: str) -> None:
    with pytest.raises(ConfigurationError, match="Write 8x80GB"):
        parse_devices(text)


@pytest.mark.parametrize(
    "wrong",
    [{"offload": "all"}, {"sharding": "full_shard", "offload": "optimizer"},
     {"sharding": "zero1", "tensor_parallel": 2}, {"sharding": "zero1", "expert_parallel": 2}, {"shards": 0},
     {"expert_parallel": 0}, {"offload_activations": True}],
)  # fmt: skip
def test_what_no_strategy_does_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Layout(**wrong)  # type: ignore[arg-type]
