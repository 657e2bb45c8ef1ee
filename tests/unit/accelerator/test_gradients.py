"""Accumulation, clipping and flags on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.base import ConfigurationError, StateError
from accelerate.utils import GradientAccumulationPlugin, GradScalerKwargs

pytestmark = pytest.mark.usefixtures("states")


def sync_pattern(accelerator: Accelerator, samples: int, epochs: int = 1) -> list[bool]:
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.ones(samples, 1))
    )
    pattern = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
                pattern.append(accelerator.sync_gradients)
    return pattern


def test_every_nth_batch_and_the_last_one_synchronise() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert sync_pattern(accelerator, 5, epochs=2) == [False, True, False, True, True] * 2


def test_a_window_may_cross_the_end_of_the_loader() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    assert sync_pattern(accelerator, 3, epochs=2) == [False, True, False, True, False, True]


def test_step_counts_the_batches_of_a_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.step == 0
    with accelerator.accumulate():
        assert accelerator.step == 1


def test_sync_gradients_can_be_assigned() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.sync_gradients = False
    assert not accelerator.gradient_state.sync_gradients


def test_backward_passes_arguments_on_and_accepts_those_of_engines() -> None:
    accelerator = Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(1))
    loss = (weight * 2).sum()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss, scale_wrt_gas=False, learning_rate=0.1)
    assert weight.grad is not None
    assert weight.grad.item() == 4.0


def test_clipping_returns_the_norm_before() -> None:
    accelerator = Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(4))
    accelerator.backward(weight.sum())
    assert weight.grad is not None
    version = weight.grad._version
    assert accelerator.clip_grad_norm_(iter([weight]), float("inf")) == 2.0
    assert weight.grad._version == version  # so that nothing else sees a change
    assert accelerator.clip_grad_norm_([weight], 1.0, norm_type=2) == 2.0
    assert weight.grad.norm() == pytest.approx(1.0, abs=1e-5)
    accelerator.clip_grad_value_([weight], 0.25)
    assert weight.grad.max() == 0.25


@pytest.mark.parametrize("max_norm", [-1, float("nan")])
def test_clipping_to_no_norm_is_refused(max_norm: float) -> None:
    with pytest.raises(ConfigurationError, match="max_norm="):
        Accelerator(cpu=True).clip_grad_norm_([torch.nn.Parameter(torch.ones(4))], max_norm)


def test_a_raised_flag_is_seen_once() -> None:
    accelerator = Accelerator(cpu=True)
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()
    accelerator.set_breakpoint()
    assert accelerator.check_breakpoint()


def test_sync_contexts_have_no_effect_on_one_process() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with accelerator.no_sync(model), accelerator.trigger_sync_in_backward(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    with accelerator.join_uneven_inputs([model], even_batches=False):
        assert model.weight.grad is not None


def gradients_by_items(accelerator: Accelerator, counts: list[int]) -> list[float]:
    """The gradient of each window, where each item adds its own number of the batch."""
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    loader = accelerator.prepare(DataLoader(counts, batch_size=1))
    gradients = []
    for batch in loader:
        with accelerator.accumulate(model, num_items=batch):
            accelerator.backward(model(batch.float().square()).sum())
        if accelerator.sync_gradients:
            gradients.append(model.weight.grad.item())
            model.zero_grad()
    return gradients


def test_summed_losses_are_weighted_by_the_number_of_items() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert gradients_by_items(accelerator, [1, 3, 2, 2, 5]) == pytest.approx([10 / 4, 8 / 4, 25 / 5])
    weight = torch.nn.Parameter(torch.ones(1))
    accelerator.backward(weight.sum())
    assert weight.grad == 0.5  # as before: divided by the steps


def test_float16_gradients_are_unscaled_to_the_same() -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
    )
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    gradients = []
    for items in [1, 3, 2, 2] * 4:
        with accelerator.accumulate(model, num_items=items):
            accelerator.backward(model(torch.full((1, 1), float(items))).sum())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
                gradients.append(model.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    assert gradients == pytest.approx([1.0] * 8, rel=1e-3)


def test_items_are_counted_in_all_rounds_of_a_window_or_in_none() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with accelerator.accumulate(num_items=1):
        pass
    with pytest.raises(StateError, match="all of them or in none"):
        accelerator.accumulate()
    with accelerator.accumulate(num_items=1):
        pass
    with accelerator.accumulate():
        pass
    with pytest.raises(StateError, match="all of them or in none"):
        accelerator.accumulate(num_items=1)
    accelerator.free_memory()


def test_a_refused_count_leaves_the_window_as_it_was() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(ConfigurationError, match="num_items"):
        accelerator.accumulate(num_items=-3)
    assert accelerator.step == 0


def test_free_memory_ends_an_open_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with accelerator.accumulate(num_items=1):
        pass
    accelerator.free_memory()
    with accelerator.accumulate():
        assert accelerator.step == 1


@pytest.mark.parametrize("loss", [3.0, None, [1.0]])
def test_a_loss_that_is_no_tensor_is_refused(loss: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^loss=.*: it is not a tensor") as raised:
        Accelerator(cpu=True).backward(loss)
    assert isinstance(raised.value, AttributeError)
