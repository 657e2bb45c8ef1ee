"""Updates are skipped on all ranks if a gradient of one rank is not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.stand_ins.cases import call_for_each
from torch import nn

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin, GradScalerKwargs

Run = Callable[..., list[Any]]


def whole(model: nn.Module) -> list[float]:
    values = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return [float(value.detach().sum()) for value in values]


def train(
    sharded: bool = False, on: bool = True, precision: str = "no", cpu: bool = False
) -> tuple[Any, ...]:
    """Two micro-batches for each of three updates; in the second one the gradient of one rank is NaN."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, skip_nonfinite_updates=on),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None,
        mixed_precision=precision,
        cpu=cpu,
        kwargs_handlers=[GradScalerKwargs(init_scale=16.0)],
    )
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate").addHandler(handler)
    weights, skipped, steps = [whole(model)], [], []
    for step in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 3)).sum())
            if step == 3 and accelerator.is_last_process:
                gradient: Any = next(model.parameters()).grad
                getattr(gradient, "to_local", lambda g=gradient: g)()[0, 0] = float("nan")
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            weights.append(whole(model))
            skipped.append(accelerator.optimizer_step_was_skipped)
            steps.append(scheduler.scheduler.last_epoch)
    logging.getLogger("accelerate").removeHandler(handler)
    scale = None if accelerator.scaler is None else accelerator.scaler.get_scale()
    return weights, skipped, steps, lines, optimizer.num_updates, scale


def check(ranks: Sequence[tuple[Any, ...]]) -> None:
    for weights, skipped, steps, _, num_updates, _ in ranks:
        assert skipped == [False, True, False]
        assert weights[0] != weights[1] == weights[2] != weights[3]
        assert steps == [len(ranks), len(ranks), 2 * len(ranks)]
        assert num_updates == 2
        assert weights == ranks[0][0]
    said = [line for rank in ranks for line in rank[3]]
    assert len(said) == 1
    assert "Update 2 of SGD is skipped on all ranks" in said[0]


def test_one_rank_with_nan_skips_the_update_of_all(run: Run) -> None:
    cases = [(False,), (True,), (False, True, "fp16")]  # replicas, shards, and replicas with a scaler
    for ranks in zip(*run(call_for_each, train, cases), strict=True):
        check(ranks)
    assert [rank[5] for rank in ranks] == [8.0, 8.0]  # the scalers of all ranks back off together


def train_joined() -> tuple[Any, ...]:
    """Rank 0 has two batches and rank 1 has four, of which the third gives NaN."""
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(skip_nonfinite_updates=True)
    )
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    skipped = []
    with accelerator.join_uneven_inputs([model]):
        for step in range(2 + 2 * accelerator.process_index):
            value = float("nan") if step == 2 else 1.0
            accelerator.backward(model(torch.full((2, 3), value)).sum())
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
    return skipped, optimizer.num_updates, whole(model)


def test_a_rank_without_batches_takes_no_part_in_the_decision(run: Run) -> None:
    first, second = run(train_joined)
    assert (first[0], first[1]) == ([False, False], 2)
    assert (second[0], second[1]) == ([False, False, True, False], 3)
    assert all(math.isfinite(value) for value in second[2])


def test_one_process_skips(states: None) -> None:
    check([train(cpu=True)])


def test_nothing_is_skipped_by_default(states: None) -> None:
    weights, skipped, *_ = train(on=False, cpu=True)
    assert not any(skipped)
    assert math.isnan(weights[2][0])
