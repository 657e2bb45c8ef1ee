"""Windows of several micro-batches give the updates of plain torch in any order of the calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.base import ConfigurationError, StateError
from accelerate.state import AcceleratorState

pytestmark = pytest.mark.usefixtures("states")

SAMPLES, BATCH = 14, 2
ORDERS = (
    *("fbcsZ", "Zfbcs", "fZbcs", "fbcsz", "zfbcs", "fzbcs", "fbcsZz"),
    *("fbcSZ", "ZfbcS", "fbcsG", "fbcSG", "ZfbcsZ", "zZfbcsz", "fbcSz"),
)
"""Statements of a loop body: f forward, b backward, c clip, s step, Z optimizer.zero_grad, z model.zero_grad.

S and G are step and zero_grad where gradients are synchronized.
"""


def new_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def new_loader(samples: int = SAMPLES, batch: int = BATCH, columns: int = 2) -> DataLoader[Any]:
    torch.manual_seed(0)
    data = torch.randn(64, 4).double()[:samples], torch.randn(64, columns).double()[:samples]
    return DataLoader(TensorDataset(*data), batch_size=batch)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def weights(*models: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


def expected(
    window_of: Callable[[int], int], clip: float | None = None, epochs: int = 2, divides_by_size: bool = True
) -> Tensor:
    """Weights after training with plain torch; `window_of(n)` is the number of micro-batches of window n."""
    model, loader = new_model(), new_loader()
    optimizer, count = sgd(model), itertools.count()
    for _ in range(epochs):
        batches = list(loader)
        while batches:
            size = window_of(next(count))
            window, batches = batches[:size], batches[size:]
            size = len(window) if divides_by_size else size
            for x, y in window:
                (mse_loss(model(x), y) / size).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def run_body(body: str, accelerator: Accelerator, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss = None
    for statement in body:
        if statement == "f":
            loss = mse_loss(model(x), y)
        elif statement == "b":
            accelerator.backward(loss)
        elif statement == "c":
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
        elif statement == "z":
            model.zero_grad()
        elif statement == "s" or (statement == "S" and accelerator.sync_gradients):
            optimizer.step()
        elif statement == "Z" or (statement == "G" and accelerator.sync_gradients):
            optimizer.zero_grad()


def trained(body: str, steps: int, way: str = "accumulate") -> Tensor:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = new_model()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), new_loader())
    for _ in range(2):
        if way == "windows":
            for window in accelerator.windows(loader):
                for x, y in window:
                    run_body(body, accelerator, model, optimizer, x, y)
            continue
        for x, y in loader:
            items = {"num_items": 1} if way == "items" else {}
            with accelerator.accumulate(model, **items):
                run_body(body, accelerator, model, optimizer, x, y)
    AcceleratorState._reset_state(True)
    return weights(model)


@pytest.mark.parametrize("way", ["accumulate", "items", "windows"])
def test_the_order_of_calls_does_not_change_the_updates(way: str) -> None:
    wrong = []
    for steps, clip in ((2, None), (4, 0.05)):
        # `accumulate` divides the losses of the last, shorter window as those of all others.
        right = expected(lambda n, steps=steps: steps, clip, divides_by_size=way != "accumulate")
        for order in ORDERS:
            body = order if clip else order.replace("c", "")
            found = trained(body, steps, way)
            if not torch.allclose(found, right, rtol=0, atol=1e-12):
                wrong.append((steps, clip, body, float((found - right).abs().max())))
    assert not wrong


# Two networks


def new_networks() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(1)
    critic = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return critic, nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def critic_loss(critic: Any, generator: Any, real: Tensor, noise: Tensor, detaches: bool = True) -> Tensor:
    fakes = generator(noise)
    ones = torch.ones(len(real), 1, dtype=real.dtype)
    return bce(critic(real), ones) + bce(critic(fakes.detach() if detaches else fakes), 0 * ones)


def generator_loss(critic: Any, generator: Any, noise: Tensor) -> Tensor:
    return bce(critic(generator(noise)), torch.ones(len(noise), 1, dtype=noise.dtype))


def expected_networks(steps: int) -> Tensor:
    """Weights of plain torch, where each optimizer gets the mean gradient of its loss in the window."""
    critic, generator = new_networks()
    pairs = (
        (critic, sgd(critic), lambda x, z: critic_loss(critic, generator, x, z)),
        (generator, sgd(generator), lambda x, z: generator_loss(critic, generator, z)),
    )
    sums: dict[Tensor, Tensor] = {}
    for number, (real, noise) in enumerate(new_loader(16, columns=3), 1):
        for model, optimizer, loss_of in pairs:
            own = list(model.parameters())
            for p, gradient in zip(own, torch.autograd.grad(loss_of(real, noise), own), strict=True):
                sums[p] = sums.get(p, 0) + gradient / steps
            if number % steps == 0 or number == 8:
                for p in own:
                    p.grad = sums.pop(p)
                optimizer.step()
    return weights(critic, generator)


def trained_networks(steps: int, way: str, detaches: bool = True) -> tuple[Tensor, list[int]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    critic, generator = new_networks()
    critic, generator, critic_optimizer, generator_optimizer, loader = accelerator.prepare(
        critic, generator, sgd(critic), sgd(generator), new_loader(16, columns=3)
    )
    clear_critic, clear_generator = critic_optimizer.zero_grad, generator_optimizer.zero_grad
    if way == "modules":
        clear_critic, clear_generator = critic.zero_grad, generator.zero_grad
    for real, noise in loader:
        if way.startswith("two windows"):
            is_guarded = way.endswith("guarded steps")
            with accelerator.accumulate(critic):
                clear_critic()
                accelerator.backward(critic_loss(critic, generator, real, noise, detaches=not is_guarded))
                if accelerator.sync_gradients or not is_guarded:
                    critic_optimizer.step()
            with accelerator.accumulate(generator):
                clear_generator()
                accelerator.backward(generator_loss(critic, generator, noise))
                if accelerator.sync_gradients or not is_guarded:
                    generator_optimizer.step()
            continue
        with accelerator.accumulate(critic, generator):
            clear_critic()
            if way == "all first":
                clear_generator()
            accelerator.backward(critic_loss(critic, generator, real, noise, detaches))
            critic_optimizer.step()
            if way != "all first":
                clear_generator()
            accelerator.backward(generator_loss(critic, generator, noise))
            generator_optimizer.step()
    AcceleratorState._reset_state(True)
    return weights(critic, generator), [critic_optimizer.num_updates, generator_optimizer.num_updates]


def test_each_network_gets_the_gradients_of_its_own_loss() -> None:
    wrong = []
    for steps in (1, 2, 3):
        right = expected_networks(steps)
        for way in ("all first", "in turn", "modules", "two windows", "two windows, guarded steps"):
            found, updates = trained_networks(steps, way)
            if updates != [-(-8 // steps)] * 2 or not torch.allclose(found, right, rtol=0, atol=1e-12):
                wrong.append((steps, way, updates, float((found - right).abs().max())))
    assert not wrong


@pytest.mark.parametrize("way", ["in turn", "modules"])
def test_gradients_that_a_window_cannot_separate_are_refused(way: str) -> None:
    with pytest.raises(StateError, match="detach"):
        trained_networks(2, way, detaches=False)


def test_an_optimizer_that_never_steps_at_the_end_of_a_window_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    critic, generator = new_networks()
    critic, generator, *optimizers, loader = accelerator.prepare(
        critic, generator, sgd(critic), sgd(generator), new_loader(16, columns=3)
    )
    for number, (real, noise) in enumerate(loader):
        with accelerator.accumulate(critic, generator):
            accelerator.backward(critic_loss(critic, generator, real, noise, detaches=False))
            optimizers[number % 2].step()
            optimizers[number % 2].zero_grad()
    assert caplog.text.count("not in its last one") == 1


# Several loaders


def updates_of(read: Callable[..., Iterator[Any]], lengths: tuple[int, int], epochs: int = 2) -> list[int]:
    """Numbers of the micro-batches after which the optimizer has stepped, in windows of three."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = new_model()
    model, optimizer, *loaders = accelerator.prepare(
        model, sgd(model), *(new_loader(2 * length) for length in lengths)
    )
    found, count = [], 0
    for _ in range(epochs):
        for x, y in read(*loaders):
            count += 1
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                before = optimizer.num_updates
                optimizer.step()
                optimizer.zero_grad()
                found += [count] * (optimizer.num_updates - before)
    AcceleratorState._reset_state(True)
    return found


def read_cycled(main: Any, other: Any) -> Iterator[Any]:
    batches = iter(other)
    for batch in main:
        try:
            next(batches)
        except StopIteration:
            batches = iter(other)
            next(batches)
        yield batch


def read_with_kept_evaluation(main: Any, other: Any) -> Iterator[Any]:
    batches = iter(other)
    next(batches)
    for number, batch in enumerate(main):
        if number % 4 == 2:
            next(batches)
        yield batch


READERS: dict[str, tuple[Callable[..., Iterator[Any]], tuple[int, int]]] = {
    "one": (lambda main, other: iter(main), (8, 5)),
    "zip": (lambda main, other: (batch for batch, _ in zip(main, other, strict=False)), (8, 11)),
    "zip with cycle": (
        lambda main, other: (batch for batch, _ in zip(main, itertools.cycle(other), strict=False)),
        (8, 2),
    ),
    "started again": (read_cycled, (8, 5)),
    "kept evaluation": (read_with_kept_evaluation, (8, 4)),
    "read within another": (lambda main, other: (batch for _ in other for batch in main), (4, 2)),
}


def test_windows_end_with_the_loader_that_drives_the_loop() -> None:
    found = {name: updates_of(read, lengths) for name, (read, lengths) in READERS.items()}
    assert found == dict.fromkeys(READERS, [3, 6, 8, 11, 14, 16]) | {
        "read within another": [3, 4, 7, 8, 11, 12, 15, 16]
    }


def test_a_warning_names_the_loader_that_drives_the_loop_if_that_is_uncertain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert updates_of(read_cycled, (1, 5)) == []  # one micro-batch in each epoch
    assert "has chosen one that continues" in caplog.text


def read_ahead(main: Any, other: Any) -> Iterator[Any]:
    batches = iter(main)
    batch = next(batches)
    while batch is not None:
        following = next(batches, None)
        yield batch
        batch = following


def test_a_warning_names_a_loop_that_reads_ahead(caplog: pytest.LogCaptureFixture) -> None:
    assert updates_of(read_ahead, (8, 5)) == [3, 6, 7, 8, 11, 14, 15, 16]
    assert "reads the next batch before the micro-batch" in caplog.text


def test_the_last_batch_may_be_divided_into_micro_batches() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = new_model()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), new_loader(16, batch=4))
    for x, y in loader:
        for part in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x[part : part + 1]), y[part : part + 1]))
                optimizer.step()
                optimizer.zero_grad()
    assert optimizer.num_updates == 4


# Steps and closures


@pytest.mark.parametrize("way", ["accumulate", "windows"])
def test_the_number_of_steps_may_change_between_windows(way: str) -> None:
    sizes = [2, 3, 1, 1, 2, 3, 1, 1]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=sizes[0])
    model = new_model()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), new_loader())
    count = itertools.count(1)

    def train(x: Tensor, y: Tensor) -> None:
        before = optimizer.num_updates
        run_body("fbsZ", accelerator, model, optimizer, x, y)
        if optimizer.num_updates != before:
            accelerator.gradient_accumulation_steps = [*sizes, 1][next(count)]

    for _ in range(2):
        if way == "windows":
            for window in accelerator.windows(loader):
                for x, y in window:
                    train(x, y)
        else:
            for x, y in loader:
                with accelerator.accumulate(model):
                    train(x, y)
    assert optimizer.num_updates == len(sizes)
    torch.testing.assert_close(weights(model), expected(sizes.__getitem__), rtol=0, atol=1e-12)


def test_a_closure_is_called_in_each_micro_batch() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = new_model()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), new_loader())
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):

                def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                    optimizer.zero_grad()
                    loss = mse_loss(model(x), y)
                    accelerator.backward(loss)
                    return loss

                assert optimizer.step(closure).detach() > 0
    right = expected(lambda n: 2, divides_by_size=False)
    torch.testing.assert_close(weights(model), right, rtol=0, atol=1e-12)


def test_a_closure_that_is_called_several_times_is_refused_in_a_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = new_model()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.LBFGS(model.parameters()), new_loader())
    x, y = next(iter(loader))
    with accelerator.accumulate(model), pytest.raises(ConfigurationError, match="LBFGS"):
        optimizer.step(lambda: mse_loss(model(x), y))


def test_gradients_that_are_set_to_zero_in_a_window_are_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = new_model()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), new_loader())
    with pytest.raises(StateError, match="set to zero"):
        for x, y in loader:
            with accelerator.accumulate(model):
                run_body("fbs", accelerator, model, optimizer, x, y)
                model.zero_grad(set_to_none=False)


def test_a_step_that_is_left_out_drops_its_gradients() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = new_model()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), new_loader(8))
    for number, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            run_body("fbZ" if number < 2 else "fbsZ", accelerator, model, optimizer, x, y)
    plain, batches = new_model(), list(new_loader(8))
    plain_optimizer = sgd(plain)
    for x, y in batches[2:]:
        (mse_loss(plain(x), y) / 2).backward()
    plain_optimizer.step()
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=1e-12)


@pytest.mark.parametrize("failed", [(1,), (3, 5), (6,)], ids=str)
def test_a_window_whose_last_micro_batch_fails_is_dropped_by_zero_grad(
    failed: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Batch 6 is the last of the loader, and the only one of its window in the first pass."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = new_model()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), new_loader())
    plain, batches = new_model(), list(new_loader())
    plain_optimizer = sgd(plain)
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            try:
                with accelerator.accumulate(model):
                    if number in failed:
                        raise FloatingPointError
                    run_body("fbsZ", accelerator, model, optimizer, x, y)
            except FloatingPointError:
                optimizer.zero_grad()
        for number, (x, y) in enumerate(batches):
            if number not in failed:
                (mse_loss(plain(x), y) / 2).backward()
                if number % 2 or number == len(batches) - 1:
                    plain_optimizer.step()
            if number in failed or number % 2:
                plain_optimizer.zero_grad()
        plain_optimizer.zero_grad()
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=1e-12)
    assert not caplog.messages


@pytest.mark.parametrize("way", ["accumulate", "items", "windows"])
def test_gradients_can_be_read_and_removed_without_a_step(way: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = new_model()
    model, _, loader = accelerator.prepare(model, sgd(model), new_loader(10))
    found: list[Tensor] = []

    def read(x: Tensor, y: Tensor) -> None:
        accelerator.backward(mse_loss(model(x), y))
        if accelerator.sync_gradients:
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            model.zero_grad()

    if way == "windows":
        for window in accelerator.windows(loader):
            for x, y in window:
                read(x, y)
    else:
        items = {"num_items": 1} if way == "items" else {}
        for x, y in loader:
            with accelerator.accumulate(model, **items):
                read(x, y)
    batches = list(new_loader(10))
    assert len(found) == 3
    for position, gradient in enumerate(found):
        window = batches[2 * position : 2 * position + 2]
        plain = new_model()
        for x, y in window:
            (mse_loss(plain(x), y) / (2 if way == "accumulate" else len(window))).backward()
        expected = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


# Warnings


def warnings_of(caplog: pytest.LogCaptureFixture, body: str, *, prepares: bool, accumulates: bool) -> int:
    caplog.clear()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = new_model()
    optimizer: Any = sgd(model)
    model, loader = accelerator.prepare(model, new_loader())
    optimizer = accelerator.prepare(optimizer) if prepares else optimizer
    for number, (x, y) in enumerate(loader):
        body_now = body if number % 2 else body.replace("2", "")
        if accumulates:
            with accelerator.accumulate(model):
                run_body(body_now, accelerator, model, optimizer, x, y)
        else:
            run_body(body_now.replace("2", "sZ"), accelerator, model, optimizer, x, y)
    AcceleratorState._reset_state(True)
    return sum(record.levelname == "WARNING" for record in caplog.records)


def test_windows_of_one_place_only_give_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    cases = {
        "all right": ("fbsZ", True, True, 0),
        "divided without accumulate": ("fbsZ", True, False, 1),
        "steps by hand": ("fb2", True, False, 0),
        "not prepared": ("fbsZ", False, True, 1),
        "not prepared, steps by the flag": ("fbSG", False, True, 0),
    }
    found = {
        name: warnings_of(caplog, body, prepares=prepares, accumulates=accumulates)
        for name, (body, prepares, accumulates, _) in cases.items()
    }
    assert found == {name: case[-1] for name, case in cases.items()}
