"""Windows of sharded models whose gradients are rescaled by their number of items."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin

Run = Callable[..., list[Any]]
STEPS = 5


def build_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        yield torch.randn(4, 4, generator=generator, dtype=torch.float64)


def count_items() -> Any:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        state_dict_type="FULL_STATE_DICT",
        use_orig_params=True,
        auto_wrap_policy="size_based_wrap",
        min_num_params=20,
    )
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)
    model = build_net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for index, batch in enumerate(batches()):
        part = batch.chunk(accelerator.num_processes)[accelerator.process_index][: 1 + index % 2]
        with accelerator.accumulate(model, num_items=len(part)):
            accelerator.backward(model(part).square().sum())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def test_gradients_of_several_flat_units_are_rescaled_once(run: Run) -> None:
    weights, _ = run(count_items)
    model = build_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parts = [
        torch.cat([part[: 1 + index % 2] for part in batch.chunk(2)]) for index, batch in enumerate(batches())
    ]
    for window in (parts[:2], parts[2:4]):
        sums = [model(part).square().sum() for part in window]
        (torch.stack(sums).sum() / sum(map(len, window))).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-9, atol=1e-9)
