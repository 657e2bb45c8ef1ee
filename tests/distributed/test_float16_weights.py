"""Weights in float16 train on several processes where the run allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.stand_ins.cases import call_for_each
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import GradScalerKwargs

Run = Callable[..., list[Any]]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 4).half()


def train(version: int | None, clips: bool) -> list[list[float]]:
    accelerator = Accelerator(
        mixed_precision="fp16",
        fsdp_plugin=None if version is None else FullyShardedDataParallelPlugin(fsdp_version=version),
        kwargs_handlers=[GradScalerKwargs(init_scale=4.0, allow_fp16_gradients=True)],
    )
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.125))
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    for step in range(3):
        inputs = torch.full((1, 3), 0.25 * (step + 1 + accelerator.process_index))
        if step == 1 and accelerator.is_last_process:
            inputs = inputs * 1e5
        accelerator.backward(model(inputs).pow(2).sum())
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert optimizer.step_was_skipped is (step == 1)
        optimizer.zero_grad()
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 2.0
    return [
        p.detach().flatten().tolist()
        for p in (getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters())
    ]


def train_plain(clips: bool) -> list[torch.Tensor]:
    model = net().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for step in (0, 2):
        inputs = torch.tensor([[0.25 * (step + 1 + rank)] * 3 for rank in range(2)])
        (model(inputs).pow(2).sum() / 2).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().flatten() for p in model.parameters()]


def test_float16_weights_train_as_float32_ones_do(run: Run) -> None:
    cases = [(None, False), (None, True), (2, False), (2, True)]
    ranks = run(call_for_each, train, cases, processes=2)
    assert ranks[0] == ranks[1]
    for (version, clips), weights in zip(cases, ranks[0], strict=True):
        for got, expected in zip(weights, train_plain(clips), strict=True):
            torch.testing.assert_close(
                torch.tensor(got),
                expected,
                rtol=4e-3,
                atol=4e-3,
                msg=lambda text, case=(version, clips): f"{case}: {text}",
            )
