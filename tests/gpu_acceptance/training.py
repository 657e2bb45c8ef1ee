"""State and `prepare`: device, placement, generators, and operations on nested tensors."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate.utils import broadcast, gather, pad_across_processes, reduce, send_to_device, set_seed

from .setting import Setting


def check_state(setting: Setting) -> None:
    """Prepare a model, train a step, and look where everything is."""
    accelerator = setting.make_accelerator()
    device = accelerator.device
    assert accelerator.num_processes == 1
    assert accelerator.is_main_process
    check_prepare(accelerator)
    check_generators(accelerator)
    check_operations(device)


def check_prepare(accelerator: object) -> None:
    device = accelerator.device
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    samples = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    prepared = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=16), scheduler)
    model, optimizer, loader, scheduler = prepared
    losses = []
    for inputs, targets in loader:
        assert inputs.device.type == targets.device.type == device.type
        with accelerator.accumulate(model):
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()))
    assert torch.stack(losses).isfinite().all()
    assert scheduler.get_last_lr() == [0.01 / 5]
    tensors = [*model.parameters(), *model.buffers()]
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert len(moments) == 2 * len(list(model.parameters()))
    assert {tensor.device.type for tensor in [*tensors, *moments]} == {device.type}


def check_generators(accelerator: object) -> None:
    """Draw the same numbers after the same seed and after a state was restored."""
    device, backend = accelerator.device, accelerator.state.device_backend
    set_seed(7)
    first = torch.randn(100, device=device)
    state = backend.rng_state()
    second = torch.randn(100, device=device)
    set_seed(7)
    assert torch.equal(torch.randn(100, device=device), first)
    assert not torch.equal(second, first)
    backend.set_rng_state(state)
    assert torch.equal(torch.randn(100, device=device), second)


def check_operations(device: torch.device) -> None:
    nested = {"a": [torch.arange(4), (torch.ones(2, 3), "text")]}
    moved = send_to_device(nested, device, non_blocking=True)
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == device.type
    assert moved["a"][1][1] == "text"
    for operation in (gather, broadcast, reduce, pad_across_processes):
        result = operation(moved["a"][0])
        assert result.device.type == device.type
        assert result.tolist() == [0, 1, 2, 3]
