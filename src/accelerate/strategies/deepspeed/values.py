"""What objects given to `prepare` say of DeepSpeed's configuration: sizes of batches, rates, steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.plugins import Filling
from accelerate.settings import AUTO
from accelerate.strategies.deepspeed.wrappers import DummyOptim, DummyScheduler

MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
TOTAL = "train_batch_size"
HINTS = {
    MICRO: "give the loader to prepare, with a batch_size, or write a number into "
    "accelerator.deepspeed_plugin.deepspeed_config",
    TOTAL: f"it follows from {MICRO}",
    "optimizer.params.": "DummyOptim(parameters, name=...) tells it",
    "scheduler.params.": "DummyScheduler(optimizer, name=...) tells it",
}
"""Names, or how they begin -> who says such a value where it is "auto"."""


@dataclass(frozen=True)
class Given:
    """What a configuration is filled from.

    Attributes:
        optimizer: torch's, or what stands for DeepSpeed's; None to run a model without training it.
        smallest: whether the smallest counts, and not the largest.
        accumulation: batches for each step.
        replicas: number of processes that see different data.
        pace: steps of a schedule for each step of the optimizer.
    """

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    batch_sizes: Sequence[int] = ()
    known_sizes: Sequence[int] = ()
    smallest: bool = True
    accumulation: int = 1
    replicas: int = 1
    pace: int = 1


def filling_of(given: Given, config: Mapping[str, Any]) -> Filling:
    """Return the values for a configuration."""
    values: dict[str, Any] = {STEPS: given.accumulation}
    sources = {STEPS: "Accelerator(gradient_accumulation_steps)"}
    usual: dict[str, Any] = {"gradient_clipping": 0.0, **_sizes_of_buckets(given.model)}
    micro = _micro_batch(given, config)
    if micro is not None:
        usual[MICRO] = micro
        steps = _number(config.get(STEPS), given.accumulation)
        values[TOTAL] = micro * steps * given.replicas
        sources[TOTAL] = f"{MICRO} {micro} x {STEPS} {steps} x {given.replicas} processes"
    if given.batch_sizes and _number(config.get(MICRO), None) not in given.batch_sizes:
        values[MICRO] = _chosen(given.batch_sizes, given.smallest)
        sources[MICRO] = "the loader (its batch on one process)"
    usual.update(_of_optimizer(given.optimizer))
    usual.update(_of_scheduler(given.scheduler, given.optimizer, given.pace))
    return Filling(values, sources, usual=usual, hints=HINTS)


def _micro_batch(given: Given, config: Mapping[str, Any]) -> int | None:
    """Return the batch of one process and round: as configured, else of a loader, else from the whole."""
    configured: int | None = _number(config.get(MICRO), None)
    if configured is not None:
        return configured
    sizes = given.batch_sizes or given.known_sizes
    if sizes:
        return _chosen(sizes, given.smallest)
    whole: int | None = _number(config.get(TOTAL), None)
    share: int = _number(config.get(STEPS), given.accumulation) * given.replicas
    if whole is not None and whole % share == 0:
        return whole // share
    return 1 if given.optimizer is None else None  # a model that is only run has no batches to count


def _chosen(sizes: Sequence[int], smallest: bool) -> int:
    return min(sizes) if smallest else max(sizes)


def _number(value: Any, otherwise: Any) -> Any:
    return otherwise if value in (None, AUTO) else int(value)


def _of_optimizer(optimizer: Any) -> dict[str, Any]:
    if not isinstance(optimizer, DummyOptim):
        return {}
    values = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
    # None: what nobody says is left to the optimizer
    return {f"optimizer.params.{name}": values.get(name) for name in ("betas", "eps", "momentum", *values)}


def _of_scheduler(scheduler: Any, optimizer: Any, pace: int) -> dict[str, Any]:
    if not isinstance(scheduler, DummyScheduler):
        return {}
    values: dict[str, Any] = {
        "warmup_min_lr": 0,
        "warmup_max_lr": _rate_of(optimizer),
        # DeepSpeed refuses a warm-up of no steps
        "warmup_num_steps": max(1, math.ceil(scheduler.warmup_num_steps / pace)),
        **scheduler.kwargs,
    }
    if scheduler.total_num_steps is not None:
        values["total_num_steps"] = math.ceil(scheduler.total_num_steps / pace)
    return {f"scheduler.params.{name}": value for name, value in values.items()}


def _rate_of(optimizer: Any) -> Any:
    if isinstance(optimizer, DummyOptim):
        return optimizer.lr
    return optimizer.defaults.get("lr") if hasattr(optimizer, "defaults") else None


def _sizes_of_buckets(model: Any) -> dict[str, Any]:
    """Return sizes of ZeRO's buckets by the width of a model; None, for DeepSpeed's own, where it is not
    known."""
    width = _width_of(getattr(model, "config", None))
    sizes: dict[str, Any] = {
        "reduce_bucket_size": width and width * width,
        "stage3_prefetch_bucket_size": width and int(0.9 * width * width),
        "stage3_param_persistence_threshold": width and 10 * width,
    }
    return {f"zero_optimization.{name}": size for name, size in sizes.items()}


def _width_of(config: Any) -> int | None:
    places: tuple[Any, ...] = (config, getattr(config, "text_config", None))
    for place in places:
        if getattr(place, "hidden_size", None):
            return int(place.hidden_size)
        if getattr(place, "hidden_sizes", None):
            return int(max(place.hidden_sizes))
    return None


def batch_sizes_of(loaders: Iterable[Any]) -> list[int]:
    """Return how many samples one process gets in a batch, for each prepared loader that knows."""
    found = (_batch_size_of(loader) for loader in loaders)
    return [size for size in found if size is not None]


def _batch_size_of(loader: Any) -> int | None:
    plan = getattr(loader, "plan", None)
    sizes = (
        getattr(plan, "batch_size", None),
        getattr(getattr(loader, "batch_sampler", None), "batch_size", None),
        getattr(loader, "batch_size", None),
    )
    return next((int(size) for size in sizes if size), None)
