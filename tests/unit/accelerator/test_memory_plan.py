"""`Accelerator.plan_memory`, beside training loops that run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate import Accelerator, torch_private
from accelerate.base import ConfigurationError, is_torch_version
from accelerate.losses import use_lm_loss

WIDTH, BATCH = 64, 32
CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return values


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, batch: list[Tensor]) -> int:
    """The peak of two steps of a training loop with real tensors, by torch's tracker."""
    model, optimizer = accelerator.prepare(model, optimizer)
    tracker = torch_private.MemTracker()
    tracker.track_external(model, *batch)
    with tracker:
        for _ in range(2 * accelerator.gradient_accumulation_steps):
            tracker.reset_mod_stats()
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                del loss  # whose storage is that of all differences
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return tracker.get_tracker_snapshot("peak")[CPU]["Total"]


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.usefixtures("states")
def test_a_plan_has_the_peak_of_the_loop(precision: Any, steps: int) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=steps)
    model, batch = Net(), [torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)]
    optimizer = torch.optim.AdamW(model.parameters())
    plan = accelerator.plan_memory(model, optimizer, batch, loss_of)
    assert plan.batch_size == BATCH
    # torch 2.9 holds one tensor more in a step of several micro-batches, of 3 % here.
    tolerance = 0.01 if is_torch_version(">=", "2.13") else 0.03
    assert plan.peak == pytest.approx(train(accelerator, model, optimizer, batch), rel=tolerance)


@pytest.mark.usefixtures("states")
def test_prepared_objects_have_the_same_plan() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, batch = Net(), [torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)]
    optimizer = torch.optim.AdamW(model.parameters())
    before = accelerator.plan_memory(model, optimizer, batch, loss_of)
    model, optimizer = accelerator.prepare(model, optimizer)
    after = accelerator.plan_memory(model, [optimizer], batch, loss_of)
    assert before.parts == after.parts
    assert accelerator.step == 0
    assert not optimizer.state


@pytest.mark.usefixtures("states")
def test_the_largest_batch_fits_and_one_more_sample_does_not() -> None:
    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())

    def peak(size: int) -> int:
        batch = [torch.empty(size, WIDTH), torch.empty(size, WIDTH)]
        return accelerator.plan_memory(model, optimizer, batch, loss_of).peak

    batch = [torch.empty(4, WIDTH), torch.empty(4, WIDTH)]
    largest = accelerator.plan_memory(model, optimizer, batch, loss_of).largest_batch_size("2MB")
    assert peak(largest) <= 2 * 10**6 < peak(largest + 1)


@pytest.mark.usefixtures("states")
def test_layouts_that_fit_include_checkpointing_where_memory_is_short() -> None:
    accelerator = Accelerator(cpu=True)
    model, batch = Net(), [torch.empty(4096, WIDTH), torch.empty(4096, WIDTH)]
    plan = accelerator.plan_memory(model, torch.optim.AdamW(model.parameters()), batch, loss_of)
    fits = plan.fitting_layouts(f"2x{plan.peak // 1000 - 500}KB")
    assert fits
    assert all(fit.layout.checkpointing for fit in fits)


@pytest.mark.usefixtures("states")
def test_a_number_format_without_a_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    strategy = accelerator._runtime.strategy
    monkeypatch.setattr(strategy, "context", replace(strategy.context, mixed_precision="fp8"))
    model = Net()
    with pytest.raises(ConfigurationError, match="Plan with mixed_precision='bf16'"):
        accelerator.plan_memory(model, torch.optim.SGD(model.parameters()), [torch.zeros(1, WIDTH)], loss_of)


@pytest.mark.usefixtures("states")
def test_the_plan_of_a_loss_without_logits_has_no_logits() -> None:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(8000, (2, 256))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=8000, **sizes)
    accelerator, batch, peaks = Accelerator(cpu=True), {"input_ids": tokens, "labels": tokens}, []
    for change in (lambda model: model, partial(use_lm_loss, slice_size=100)):
        model = change(transformers.LlamaForCausalLM(config))
        peaks.append(accelerator.plan_memory(model, torch.optim.SGD(model.parameters()), batch).peak)
    logits = 4 * tokens.numel() * 8000
    assert peaks[0] - peaks[1] > logits
    assert peaks[1] < logits
