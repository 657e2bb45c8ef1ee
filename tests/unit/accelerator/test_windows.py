"""Windows of a loader on one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.base import ConfigurationError, StateError
from accelerate.ops import AsyncReduction, reduce_async
from accelerate.utils import GradientAccumulationPlugin

pytestmark = pytest.mark.usefixtures("states")


def accelerator_with(steps: int, samples: int, **choices: Any) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **choices)
    return accelerator, accelerator.prepare(DataLoader(torch.arange(float(samples)).reshape(-1, 1)))


def test_windows_have_their_length_and_number_of_items() -> None:
    accelerator, loader = accelerator_with(2, 5)
    windows = accelerator.windows(loader, num_items=lambda batch: batch.sum() / 2)
    assert len(windows) == 3
    found = [(len(window), window.num_items, len(list(window))) for window in windows]
    assert found == [(2, 0.5, 2), (2, 2.5, 2), (1, 2, 1)]
    assert isinstance(list(windows)[2].num_items, int)


def test_batches_count_as_one_without_a_counting_function() -> None:
    accelerator, loader = accelerator_with(2, 3)
    assert [window.num_items for window in accelerator.windows(loader)] == [2, 1]


def test_only_the_last_batch_of_a_window_synchronises() -> None:
    accelerator, loader = accelerator_with(2, 5)
    state = accelerator.gradient_state
    found = []
    for window in accelerator.windows(loader):
        for batch in window:
            found.append((batch.item(), accelerator.sync_gradients, state.end_of_dataloader))
        assert accelerator.sync_gradients
    assert found == [
        (0.0, False, False),
        (1.0, True, False),
        (2.0, False, False),
        (3.0, True, False),
        (4.0, True, True),
    ]
    assert not state.in_dataloader
    assert loader.iteration == 1


def test_gradients_are_those_of_the_mean_over_all_items() -> None:
    accelerator, loader = accelerator_with(3, 5)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    gradients = []
    for window in accelerator.windows(loader, num_items=lambda batch: batch.sum()):
        for batch in window:
            accelerator.backward(model(batch).sum())
        gradients.append(model.weight.grad.item())
        model.zero_grad()
    assert gradients == pytest.approx([1.0, 1.0])


def test_outside_of_a_window_losses_are_not_rescaled() -> None:
    accelerator, loader = accelerator_with(2, 4)
    weight = torch.nn.Parameter(torch.ones(1))
    for window in accelerator.windows(loader):
        list(window)
        accelerator.backward(weight.sum())
        assert weight.grad is not None
        assert weight.grad.item() == 0.5
        weight.grad = None


def test_a_loss_after_the_last_batch_of_counted_windows_is_refused() -> None:
    accelerator, loader = accelerator_with(2, 4)
    weight = torch.nn.Parameter(torch.ones(1))
    for window in accelerator.windows(loader, num_items=len):
        list(window)
        with pytest.raises(StateError, match="after the last batch"):
            accelerator.backward(weight.sum())
    accelerator.backward(weight.sum())
    assert weight.grad is not None


def test_a_loader_read_inside_another_does_not_change_the_active_loader() -> None:
    accelerator, loader = accelerator_with(2, 4)
    evaluation = accelerator.prepare(DataLoader([0, 1, 2], batch_size=2))
    for window in accelerator.windows(loader):
        for _ in window:
            read = [batch.tolist() for batch in evaluation]
            assert read == [[0, 1], [2]]
            assert accelerator.gradient_state.active_dataloader is loader


def test_windows_of_a_plain_iterable_do_not_change_the_outer_loader() -> None:
    accelerator, loader = accelerator_with(2, 2)
    found = []
    for _ in loader:
        for window in accelerator.windows([1, 2, 3]):
            found.append([*window, accelerator.gradient_state.end_of_dataloader])
    assert found == [[1, 2, False], [3, False], [1, 2, True], [3, True]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it in its constructor
def test_the_state_of_a_stateful_loader_is_that_of_the_batch_in_use() -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator, loader = accelerator_with(2, 6, dataloader_config=config)
    positions = {}
    for window in accelerator.windows(loader):
        for batch in window:
            positions[batch.item()] = loader.state_dict()
    loader.load_state_dict(positions[1.0])
    assert [batch.item() for batch in loader] == [2.0, 3.0, 4.0, 5.0]


def test_gradients_of_a_window_left_early_are_cleared() -> None:
    accelerator, loader = accelerator_with(2, 6)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    weights, read = [], []
    for number, window in enumerate(accelerator.windows(loader)):
        for batch in window:
            read.append(batch.item())
            accelerator.backward(-model(torch.ones(1, 1)).sum())
            if number == 1:
                break
        optimizer.step()
        optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [1.0, 1.0, 2.0]
    assert read == [0.0, 1.0, 2.0, 4.0, 5.0]


def test_a_window_may_be_skipped_and_the_loop_ended() -> None:
    accelerator, loader = accelerator_with(2, 6)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    kept = model.weight.grad.clone()
    for number, _ in enumerate(accelerator.windows(loader)):
        assert number < 2
        if number == 1:
            break
    assert torch.equal(model.weight.grad, kept)
    assert accelerator.sync_gradients
    assert not accelerator.gradient_state.in_dataloader


def test_a_window_is_read_once() -> None:
    accelerator, loader = accelerator_with(2, 2)
    for window in accelerator.windows(loader):
        assert len(list(window)) == 2
        with pytest.raises(StateError, match="once"):
            list(window)


def test_accumulate_inside_a_window_is_refused() -> None:
    accelerator, loader = accelerator_with(2, 2)
    for window in accelerator.windows(loader):
        for _ in window:
            for items in (None, 1):
                with pytest.raises(StateError, match="windows"):
                    accelerator.accumulate(num_items=items)


def test_windows_inside_a_window_are_refused() -> None:
    accelerator, loader = accelerator_with(2, 4)
    for window in accelerator.windows(loader):
        for _ in window:
            with pytest.raises(StateError, match="inside a window"):
                next(iter(accelerator.windows([1])))
    with accelerator.accumulate():
        pass
    with pytest.raises(StateError, match="sync_gradients"):
        next(iter(accelerator.windows([1])))


def test_a_bad_count_is_refused_when_it_is_counted() -> None:
    accelerator, loader = accelerator_with(2, 2)
    with pytest.raises(ConfigurationError, match="num_items"):
        list(accelerator.windows(loader, num_items=lambda batch: -1))
    assert not accelerator.gradient_state.in_dataloader


def test_a_window_without_items_is_refused() -> None:
    accelerator, loader = accelerator_with(2, 2)
    with pytest.raises(StateError, match="no items"):
        list(accelerator.windows(loader, num_items=lambda batch: 0))


def test_windows_never_cross_the_end_of_a_loader(caplog: pytest.LogCaptureFixture) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    loader = accelerator.prepare(DataLoader([0, 1, 2]))
    assert [len(window) for window in accelerator.windows(loader)] == [2, 1]
    assert "sync_with_dataloader" in caplog.text


def test_an_empty_iterable_has_no_windows(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert list(accelerator.windows([])) == []
    assert caplog.text == ""


def test_an_error_in_a_window_resets_the_gradient_state() -> None:
    accelerator, loader = accelerator_with(2, 4)
    with pytest.raises(ZeroDivisionError):
        for window in accelerator.windows(loader):
            for _ in window:
                raise ZeroDivisionError
    assert not accelerator.gradient_state.in_dataloader
    assert accelerator.sync_gradients
    assert [len(window) for window in accelerator.windows(loader)] == [2, 2]


def test_items_are_summed_over_processes_once_for_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []

    def note(numbers: Any, how: str, purpose: str) -> AsyncReduction:
        sums.append(numbers[0])
        return reduce_async(numbers, how, purpose)

    monkeypatch.setattr("accelerate.ops.reduce_async", note)
    accelerator, loader = accelerator_with(2, 6)
    for window in accelerator.windows(loader, num_items=lambda batch: batch + 1):
        list(window)
    assert sums == [3.0, 7.0, 11.0]
    sums.clear()
    for batch in loader:
        with accelerator.accumulate(num_items=batch + 1):
            pass
    assert sums == [3.0, 7.0, 11.0]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_checkpoint_between_windows_resumes_at_the_next_batch(tmp_path: Path, after: int) -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)

    def windows_of(accelerator: Accelerator, loader: Any) -> Iterator[list[float]]:
        return ([batch.item() for batch in window] for window in accelerator.windows(loader))

    accelerator, loader = accelerator_with(2, 5, dataloader_config=config)
    whole = [[0.0, 1.0], [2.0, 3.0], [4.0]]
    windows = windows_of(accelerator, loader)
    assert [next(windows) for _ in range(after + 1)] == whole[: after + 1]
    accelerator.save_state(str(tmp_path / "checkpoint"))
    windows.close()
    accelerator.load_state(str(tmp_path / "checkpoint"))
    assert list(windows_of(accelerator, loader)) == whole[after + 1 :]
    assert list(windows_of(accelerator, loader)) == whole


@pytest.mark.parametrize(("sync_each_batch", "kept_apart"), [(False, ["model", "model"]), (True, [])])
def test_gradients_of_all_but_the_last_batch_stay_on_this_rank(
    monkeypatch: pytest.MonkeyPatch, sync_each_batch: bool, kept_apart: list[str]
) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each_batch)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    loader, model = accelerator.prepare(DataLoader([0, 1, 2, 3]), torch.nn.Linear(1, 1))
    entered = []

    def no_sync(entering: Any, early: bool) -> AbstractContextManager[None]:
        assert entering is model
        if not early:
            entered.append("model")
        return nullcontext()

    monkeypatch.setattr(accelerator._runtime.strategy, "no_sync", no_sync)
    for window in accelerator.windows(loader):
        list(window)
    assert entered == kept_apart


def test_only_the_models_that_are_named_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, loader = accelerator_with(2, 2)
    first, _ = accelerator.prepare(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    entered: list[Any] = []
    monkeypatch.setattr(
        accelerator._runtime.strategy, "no_sync", lambda model, early: nullcontext(entered.append(model))
    )
    for window in accelerator.windows(loader, first):
        list(window)
    assert entered == [first]


def test_the_optimizer_does_not_step_for_a_window_that_is_passed_over() -> None:
    accelerator, loader = accelerator_with(1, 2)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for window in accelerator.windows(loader):
        window.close()
        optimizer.step()
    assert optimizer.num_updates == 0
