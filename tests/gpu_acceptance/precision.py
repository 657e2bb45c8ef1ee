"""Steps in bfloat16, float16 with the gradient scaler, and FP8; each beside the same loop of plain torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from accelerate.utils import AORecipeKwargs, GradScalerKwargs

from .setting import NotAvailableError, Setting

STEPS, WIDTH, ROWS = 12, 64, 32
FIRST_SCALE = 2.0**10


def parts(device: str) -> tuple[nn.Module, Any, Any, torch.Tensor, torch.Tensor]:
    """Return model, optimizer, scheduler, inputs and targets; equal at each call."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    inputs, targets = (torch.randn(ROWS, WIDTH, generator=generator).to(device) for _ in range(2))
    return model, optimizer, scheduler, inputs, targets


def train_plain(device: str, dtype: torch.dtype, scaler: Any = None) -> list[float]:
    model, optimizer, _, inputs, targets = parts(device)
    losses = []
    for _ in range(STEPS):
        with torch.autocast(device, dtype):
            outputs = model(inputs)
        loss = (outputs.float() - targets).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(accelerator: Any, prepared: tuple[Any, ...]) -> list[float]:
    model, optimizer, scheduler, inputs, targets = prepared
    losses = []
    for _ in range(STEPS):
        loss = (model(inputs) - targets).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepare(accelerator: Any, device: str) -> tuple[Any, ...]:
    model, optimizer, scheduler, inputs, targets = parts(device)
    return (*accelerator.prepare(model, optimizer, scheduler), inputs, targets)


def compare(setting: Setting, ours: list[float], plain: list[float], tolerance: float) -> None:
    assert ours[-1] < 0.9 * ours[0], f"the loss does not fall: {ours}"
    difference = max(abs(a - b) / abs(b) for a, b in zip(ours, plain, strict=True))
    setting.report("largest relative difference of a loss from plain torch", difference, "")
    assert difference <= tolerance, f"{ours} instead of {plain}"


def inner_dtype(model: nn.Module, inputs: torch.Tensor) -> torch.dtype:
    """Return the dtype that the first layer of a model computes in."""
    seen: list[torch.dtype] = []
    handle = model[0].register_forward_hook(lambda module, given, output: seen.append(output.dtype))
    outputs = model(inputs)
    handle.remove()
    assert outputs.dtype == torch.float32
    return seen[0]


def train_bf16(setting: Setting) -> None:
    """Train under autocast to bfloat16."""
    setting.require("bfloat16")
    accelerator = setting.make_accelerator(mixed_precision="bf16")
    prepared = prepare(accelerator, setting.device)
    assert inner_dtype(prepared[0], prepared[3]) == torch.bfloat16
    compare(setting, train(accelerator, prepared), train_plain(setting.device, torch.bfloat16), 1e-3)


def train_fp16(setting: Setting) -> None:
    """Train with the gradient scaler, then let a step overflow: it is skipped and the scale halves."""
    setting.require("float16")
    handler = GradScalerKwargs(init_scale=FIRST_SCALE)
    accelerator = setting.make_accelerator(mixed_precision="fp16", kwargs_handlers=[handler])
    prepared = prepare(accelerator, setting.device)
    model, optimizer, scheduler, inputs, targets = prepared
    assert inner_dtype(model, inputs) == torch.float16
    ours = train(accelerator, prepared)
    plain = train_plain(
        setting.device, torch.float16, accelerator.state.device_backend.grad_scaler(init_scale=FIRST_SCALE)
    )
    compare(setting, ours, plain, 1e-3)
    assert not optimizer.step_was_skipped
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    scale, steps = accelerator.scaler.get_scale(), scheduler.scheduler.last_epoch
    loss = (model(inputs) - targets).square().mean() * float("inf")
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    assert optimizer.step_was_skipped
    assert accelerator.scaler.get_scale() == scale / 2
    assert scheduler.scheduler.last_epoch == steps
    assert all(map(torch.equal, weights, model.parameters()))
    setting.report("scale after a skipped step, over that before", accelerator.scaler.get_scale() / scale, "")
    train(accelerator, prepared)
    assert not optimizer.step_was_skipped


def train_fp8(setting: Setting) -> None:
    """Train with torchao's float8 layers, beside bfloat16."""
    if find_spec("torchao") is None:
        raise NotAvailableError("torchao is not installed")
    if setting.device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise NotAvailableError(f"{torch.cuda.get_device_name()} does not compute in FP8")
    setting.require("bfloat16")
    handlers = [AORecipeKwargs()]
    accelerator = setting.make_accelerator(mixed_precision="fp8", kwargs_handlers=handlers)
    prepared = prepare(accelerator, setting.device)
    kinds = [type(module).__name__ for module in prepared[0] if isinstance(module, nn.Linear)]
    assert kinds == ["Linear", "Float8Linear", "Linear"], kinds
    ours = train(accelerator, prepared)
    setting.report("layers in FP8", kinds.count("Float8Linear"), "")
    compare(setting, ours, train_plain(setting.device, torch.bfloat16), 0.1)
