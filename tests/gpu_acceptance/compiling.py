"""torch.compile through `prepare`: a whole model, and its repeated blocks."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch

from accelerate.utils import TorchDynamoPlugin

from .models import SMALL, TINY, Gpt2, tokens_for
from .setting import NotAvailableError, Setting

STEPS = 8
INDUCTOR = ("cuda", "xpu")
"""Devices that torch's own compiler generates code for; on others the graph runs as it is."""


def compile_whole(setting: Setting) -> None:
    """Compile the model as one."""
    measure(setting, regional=False)


def compile_regional(setting: Setting) -> None:
    """Compile each kind of block once."""
    measure(setting, regional=True)


def measure(setting: Setting, regional: bool) -> None:
    if setting.device in INDUCTOR and find_spec("triton") is None:
        raise NotAvailableError("triton is not installed")
    plain = train(setting, None)
    backend = "inductor" if setting.device in INDUCTOR else "aot_eager"
    compiled = train(setting, TorchDynamoPlugin(backend=backend, use_regional_compilation=regional))
    for ours, wanted in zip(compiled["losses"], plain["losses"], strict=True):
        assert abs(ours - wanted) <= 1e-2 * abs(wanted), f"{compiled['losses']} instead of {plain['losses']}"
    setting.report("first step, with compiling", compiled["seconds"][0], "s")
    setting.report("later steps", median(compiled["seconds"][2:]), "s")
    setting.report("later steps without compiling", median(plain["seconds"][2:]), "s")


def train(setting: Setting, plugin: TorchDynamoPlugin | None) -> dict[str, Any]:
    """Return losses and seconds of each step."""
    torch.manual_seed(0)
    shape = setting.size(SMALL, TINY)
    precision = "bf16" if setting.backend.supports(torch.bfloat16) else "no"
    accelerator = setting.make_accelerator(dynamo_plugin=plugin, mixed_precision=precision)
    model = Gpt2(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    regional = plugin is not None and plugin.use_regional_compilation
    assert is_compiled(model) == (plugin is not None and not regional)
    blocks = [
        is_compiled(block) for block in accelerator.unwrap_model(model, keep_torch_compile=False).blocks
    ]
    assert regional == all(blocks) == any(blocks), f"compiled blocks: {blocks}"
    losses: list[Any] = []
    seconds = []
    for tokens in tokens_for(shape, STEPS, setting.size(16, 2), setting.device):
        seconds.append(setting.time(partial(step, accelerator, model, optimizer, tokens, losses)))
    return {"losses": [loss.item() for loss in losses], "seconds": seconds}


def is_compiled(module: Any) -> bool:
    return (
        isinstance(module, torch._dynamo.eval_frame.OptimizedModule) or module._compiled_call_impl is not None
    )


def step(accelerator: Any, model: Any, optimizer: Any, tokens: torch.Tensor, losses: list[Any]) -> None:
    loss = model(tokens)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
