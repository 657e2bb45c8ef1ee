"""Training through `Accelerator` on the simulated device gives the numbers of the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.simulated_device import sim
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DataLoaderConfiguration, GradScalerKwargs, ProfileKwargs, set_seed

pytestmark = pytest.mark.usefixtures("states")
Run = Callable[..., list[Any]]
SEEDED = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
LATE = ["none", "all", "default_streams"]


def train(
    accelerator: Accelerator,
    steps: int = 12,
    late: str = "none",
    fails_at: int = -1,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> dict[str, Any]:
    """Train a small net with shuffled batches, accumulation and clipping; return its weights and losses."""
    sim.set_late(late)
    set_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    optimizer = make_optimizer(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = TensorDataset(torch.randn(96, 6), torch.randint(0, 3, (96,)))
    loader = DataLoader(data, batch_size=8, shuffle=True, pin_memory=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    model.eval()  # dropout draws from the generator of the device
    losses, skipped = [], 0
    for step, (x, y) in enumerate(loader):
        assert x.device.type == accelerator.device.type
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss * float("inf") if step == fails_at else loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            skipped += accelerator.optimizer_step_was_skipped and accelerator.sync_gradients
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean"))
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    weights = {name: value.cpu() for name, value in weights.items()}
    return {"weights": weights, "losses": [loss.item() for loss in losses], "skipped": skipped}


def on_host(**kwargs: Any) -> dict[str, Any]:
    return train(Accelerator(cpu=True, **kwargs))


def reset() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


def assert_same(found: dict[str, Any], expected: dict[str, Any], atol: float = 1e-5) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], abs=atol)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name].float(), value.float(), atol=atol, rtol=0)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("steps", [1, 3])
def test_one_process(late: str, steps: int) -> None:
    expected = on_host(gradient_accumulation_steps=steps)
    reset()
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    assert accelerator.device.type == "sim"
    assert_same(train(accelerator, late=late), expected)


def test_an_optimizer_that_has_state_before_its_parameters_move() -> None:
    expected = train(Accelerator(cpu=True), make_optimizer=torch.optim.Adagrad)
    reset()
    assert_same(train(Accelerator(), make_optimizer=torch.optim.Adagrad), expected)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_near(precision: str) -> None:
    expected = on_host()
    reset()
    found = train(Accelerator(mixed_precision=precision), late="all")
    assert_same(found, expected, atol=3e-2)
    assert found["losses"] != expected["losses"]


def test_a_step_with_infinite_gradients_is_skipped() -> None:
    scaler = GradScalerKwargs(init_scale=2.0**10)
    found = train(Accelerator(mixed_precision="fp16", kwargs_handlers=[scaler]), fails_at=4)
    assert found["skipped"] == 1
    assert all(value.isfinite().all() for value in found["weights"].values())


def test_a_compiled_model() -> None:
    expected = on_host()
    reset()
    assert_same(train(Accelerator(dynamo_backend="aot_eager")), expected)


def train_as(kind: str, late: str) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "fsdp2" else None
    accelerator = Accelerator(fsdp_plugin=plugin, dataloader_config=SEEDED)
    assert accelerator.device == torch.device("sim", accelerator.process_index)
    return train(accelerator, late=late)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_have_the_numbers_of_one(run: Run, kind: str, late: str) -> None:
    first, second = run(train_as, kind, late, env={"ACCELERATE_USE_CPU": None})
    expected = on_host(dataloader_config=SEEDED)
    assert_same(first, expected)
    assert second["losses"] == first["losses"]


def save_and_resume(folder: Path, late: str, steps: int = 5) -> tuple[list[float], list[float]]:
    """Returns the weights at the time of the call and after loading.

    `steps` is the number of steps that run while the state is written.
    """
    accelerator = Accelerator()
    sim.set_late(late)
    model = nn.Linear(4, 4)
    # Not the values that an earlier save has left in the same pinned memory.
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(time.time_ns()))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))

    def step() -> None:
        model(torch.ones(2, 4, device=accelerator.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    saved = [value.item() for value in model.weight.detach().flatten()]
    accelerator.save_state(str(folder), blocking=False)
    for _ in range(steps):
        step()
    accelerator.wait_for_checkpoint()
    accelerator.load_state(str(folder))
    loaded = [value.item() for value in model.weight.detach().flatten()]
    accelerator.end_training()
    return saved, loaded


@pytest.mark.parametrize("late", LATE)
def test_a_state_saved_in_the_background_is_that_of_the_call(tmp_path: Path, late: str) -> None:
    saved, loaded = save_and_resume(tmp_path / "state", late)
    assert loaded == saved


def test_dropout_continues_where_it_was(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Dropout(0.5))
    ones = torch.ones(64, device=accelerator.device)
    model(ones)
    accelerator.save_state(str(tmp_path / "state"))
    expected = model(ones).cpu()
    model(ones)
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(model(ones).cpu(), expected)


def test_a_profile_and_the_peak_memory_of_a_block(tmp_path: Path) -> None:
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(output_trace_dir=str(tmp_path))])
    model = accelerator.prepare(nn.Linear(4, 4))
    with accelerator.profile() as profile:
        model(torch.ones(2, 4, device=accelerator.device)).sum().backward()
    assert any("addmm" in event.key for event in profile.key_averages())
    assert (tmp_path / "profile_0.json").exists()
    with accelerator.peak_memory() as memory:
        torch.zeros(1 << 20, device=accelerator.device)
    assert 4 << 20 <= memory.peak < 5 << 20
