"""The largest batch, layouts that fit, and how a plan is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from accelerate.base import ConfigurationError
from accelerate.planning import (
    LARGEST_BATCH,
    Layout,
    Parts,
    Planner,
    Trace,
    Variant,
    build_plan,
    format_bar,
    format_layouts,
    largest_batch,
)


@pytest.mark.parametrize("start", [1, 8, 64, 5000])
@pytest.mark.parametrize(
    "bytes_of",
    [
        lambda size: 1000 + 7 * size,
        lambda size: max(5000.0, 1000 + 7 * size),
        lambda size: 1000 + 7 * size + (500 if size > 100 else 0),
        lambda size: 1000 + 0.001 * size**2,
    ],
    ids=["affine", "kinked", "jump", "square"],
)
@pytest.mark.parametrize("capacity", [1007, 5003, 10_000, 999])
def test_the_largest_batch_fits_and_one_more_does_not(
    bytes_of: Callable[[int], float], capacity: int, start: int
) -> None:
    tried = []

    def measure(size: int) -> float:
        tried.append(size)
        return bytes_of(size)

    found = largest_batch(measure, capacity, start)
    assert found == 0 or bytes_of(found) <= capacity
    assert bytes_of(found + 1) > capacity
    assert len(tried) == len(set(tried)) <= 30


def test_an_affine_size_needs_few_traces() -> None:
    tried: list[int] = []
    assert largest_batch(lambda size: tried.append(size) or 10 + 3 * size, 10_000, 4) == 3330  # type: ignore[func-returns-value]
    assert len(tried) <= 4


def test_memory_that_does_not_depend_on_the_batch_ends_the_search() -> None:
    assert largest_batch(lambda _: 10, 10, 4) == LARGEST_BATCH
    assert largest_batch(lambda _: 11, 10, 4) == 0


def trace(variant: Variant) -> Trace:
    size = 100 * variant.batch_size // (4 if variant.checkpointing else 1)
    work = Parts(parameters=800, gradients=800, optimizer=1600, activations=size)
    return Trace(
        variant.batch_size, (work,), (work,), 800, 100, 200, can_split_layers=True, block_outputs=10**6
    )


PLANNER = Planner(trace)


def test_a_plan_has_the_peak_and_batch_sizes_of_its_layout() -> None:
    plan = build_plan(PLANNER, Layout(), 2)
    assert plan.peak == 3400
    assert plan.largest_batch_size(4200) == 10
    assert plan.largest_batch_size("4.2KB") == 10
    shown = str(plan)
    assert "activations" in shown
    assert "3.32 KB" in shown
    assert json.loads(json.dumps(plan.as_dict()))["device_bytes"]["total"] == 3400


def test_layouts_that_fit_come_without_offload_and_with_the_least_communication_first() -> None:
    fits = build_plan(PLANNER, Layout(), 2).fitting_layouts("4x2KB")
    keys = [(fit.layout.offload != "none", fit.communication) for fit in fits]
    assert keys == sorted(keys)
    assert fits[-1].communication == min(fit.communication for fit in fits)  # one with offload
    assert all(fit.parts.total <= 2000 for fit in fits)
    names = [fit.layout.name for fit in fits]
    assert "ddp" not in names  # 4,200 bytes
    assert "full_shard" in names
    assert not any(name.startswith("full_shard + offload") for name in names)  # it fits without
    assert format_layouts(fits).count("\n") == 2 + min(5, len(fits)) - 1


def test_checkpointing_and_offload_are_used_where_they_are_needed() -> None:
    names = [fit.layout.name for fit in PLANNER.fitting_layouts(Layout(), 4, 1900, 8)]
    assert "full_shard + checkpointing" in names
    assert PLANNER.fitting_layouts(Layout(), 4, 300, 8) == []


def test_activations_are_offloaded_where_recomputation_alone_does_not_fit() -> None:
    def offloaded(variant: Variant) -> Trace:
        found = trace(variant)
        if not variant.offloads_activations:
            return found
        idle = (replace(found.step[0], activations=0),)
        return replace(found, forward_backward=idle, step=idle, offloaded=77)

    planner = Planner(offloaded)
    fits = planner.fitting_layouts(Layout(), 1, 3250, 8)
    assert [fit.layout.name for fit in fits] == ["none + checkpointing + offload activations"]
    assert fits[0].host == 77
    assert fits[0].layout.uses_host
    assert planner.fitting_layouts(Layout(), 1, 3400, 8)[0].layout.name == "none + checkpointing"
    assert build_plan(planner, fits[0].layout, 8).as_dict()["host_bytes"] == 77


def test_pipelines_are_tried_if_no_other_layout_fits_without_offload() -> None:
    blocks = {"largest_block": 200, "outside_blocks": 0, "can_split_layers": False}
    planner = Planner(lambda variant: replace(trace(variant), **blocks))

    def stages(capacity: int) -> dict[str, int]:
        fits = planner.fitting_layouts(Layout(), 4, capacity, 2)
        return {fit.layout.name: fit.layout.stages for fit in fits if fit.layout.offload == "none"}

    assert set(stages(1650).values()) == {1}  # full_shard needs 1,600 bytes, and 50 for activations
    assert stages(1649) == {"full_shard + pp 2": 2, "none + pp 4": 4}
    assert stages(1599) == {"full_shard + pp 2 + checkpointing": 2, "none + pp 4": 4}
    assert stages(800) == {}


def test_each_micro_batch_of_a_pipeline_has_the_samples_of_a_pass() -> None:
    layout = Layout(stages=2, microbatches=4)
    plan = build_plan(PLANNER, layout, 8)
    assert plan.parts.activations == 100 * 8 / 4
    fits = plan.fitting_layouts("1x10KB")
    assert fits[0].parts.activations == 100 * 2
    assert layout.samples_per_batch == 4


def test_a_bar_shows_the_parts_and_what_does_not_fit() -> None:
    parts = Parts(parameters=25, activations=25)
    assert format_bar(parts, 100).startswith("[" + "P" * 15 + "A" * 15 + "." * 30 + "]")
    assert format_bar(parts, 100).endswith("50 bytes of 100 bytes, 50%")
    assert format_bar(parts, 25).startswith("[" + "P" * 60 + "]" + "A" * 60)


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_has_at_least_one_sample(size: int) -> None:
    with pytest.raises(ConfigurationError, match="at least one sample"):
        build_plan(PLANNER, Layout(), size)
