"""Averages of weights on one process: which steps count, what is averaged, applied, saved and refused."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.accelerator.state_items import list_items
from accelerate.base import CheckpointError, ConfigurationError, PreparationError, StateError
from accelerate.checkpointing import apply_items, capture_items
from accelerate.utils import GradientAccumulationPlugin, GradScalerKwargs, ProjectConfiguration
from accelerate.weights import read_safetensors

pytestmark = pytest.mark.usefixtures("states")
DECAY = 0.8


class Net(nn.Module):
    """With tied, frozen and unused weights, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)
        self.leave = nn.Linear(4, 4, bias=False)
        self.leave.weight = self.enter.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.leave(self.norm(self.enter(x))))


def trained(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def prepared(dtype: torch.dtype = torch.float32, **choices: Any) -> tuple[Any, Any, Any]:
    accelerator = Accelerator(cpu=True, **choices)
    model = Net().to(dtype)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def step(accelerator: Any, model: Any, *optimizers: Any, factor: float = 1.0) -> None:
    rows = torch.randn(4, 4, dtype=model.enter.weight.dtype)
    with accelerator.accumulate(model):
        accelerator.backward(factor * model(rows).float().square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trained(model)]


def averaged(ema: Any) -> list[Tensor]:
    with ema.applied() as model:
        return weights(model)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained(model)]


@pytest.mark.parametrize("uses_accelerator", [True, False])
def test_a_loss_keeps_its_weights_while_averages_are_applied(uses_accelerator: bool) -> None:
    accelerator, model, optimizer = prepared()
    ema = accelerator.average(model, decay=DECAY)
    step(accelerator, model, optimizer)
    backward = accelerator.backward if uses_accelerator else Tensor.backward
    rows = torch.randn(4, 4)
    backward(model(rows).square().mean())
    expected = gradients_of(model)
    optimizer.zero_grad()
    loss = model(rows).square().mean()
    with ema.applied(), torch.no_grad():
        model(rows)
    backward(loss)
    assert all(map(torch.equal, gradients_of(model), expected))
    optimizer.zero_grad()
    loss = model(rows).square().mean()
    with (
        pytest.raises(StateError, match=r"backward\(\) inside of applied\(\) has used the averages of Net"),
        ema.applied(),
    ):
        backward(loss)
    optimizer.zero_grad()
    with ema.applied():
        backward(model(rows).square().mean())
        assert not all(map(torch.equal, gradients_of(model), expected))
        loss = model(rows).square().mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(loss)
    optimizer.zero_grad()
    step(accelerator, model, optimizer)


def are_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize(("every", "start"), [(1, 0), (2, 0), (1, 3), (2, 3)])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_every_nth_step_from_the_start_is_averaged(every: int, start: int, device: str | None) -> None:
    accelerator, model, optimizer = prepared()
    ema = accelerator.average(model, DECAY, every, start, device)
    naive = weights(model)
    for number in range(1, 7):
        step(accelerator, model, optimizer)
        for own, weight in zip(naive, weights(model), strict=True):
            if number < start:
                own.copy_(weight)
            elif (number - start) % every == 0:
                own.lerp_(weight, 1 - DECAY)
        assert are_equal(averaged(ema), naive)
    assert not are_equal(naive, weights(model))


def test_a_function_of_the_step_gives_the_mean_of_all_weights() -> None:
    accelerator, model, optimizer = prepared()
    ema = accelerator.average(model, decay=lambda number: 1 - 1 / number)
    seen = []
    for _ in range(5):
        step(accelerator, model, optimizer)
        seen.append(weights(model))
    for own, values in zip(averaged(ema), zip(*seen, strict=True), strict=True):
        torch.testing.assert_close(own, torch.stack(values).mean(0))
    ema = accelerator.average(model, decay=lambda number: 1.0)
    with pytest.raises(ConfigurationError, match=r"decay\(step\)=1.0"):
        step(accelerator, model, optimizer)


def warm_up(step: int) -> float:
    """Returns the decay of diffusers' EMAModel, as in the guide."""
    return 0.0 if step == 1 else min(0.9999, step / (9 + step))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ema", {"decay": 0.9, "start": 2}),
        ("mean", {"decay": lambda step: 1 - 1 / step}),
        ("mean of epochs", {"decay": lambda step: 1 - 1 / (1 + (step - 2) // 3), "every": 3, "start": 2}),
        pytest.param("diffusers", {"decay": warm_up}, marks=pytest.mark.slow),
        pytest.param(
            "diffusers, later", {"decay": lambda step: warm_up(step - 2), "start": 3}, marks=pytest.mark.slow
        ),
        pytest.param(
            "diffusers, warm-up",
            {"decay": lambda step: min(0.9999, 1 - step ** (-2 / 3))},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_recipes_of_the_guide_equal_the_originals(name: str, options: dict[str, Any]) -> None:
    accelerator, model, optimizer = prepared()
    ours = accelerator.average(model, **options)
    theirs: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9) if name == "ema" else None)
    if name.startswith("diffusers"):
        module = pytest.importorskip("diffusers.training_utils")
        theirs = module.EMAModel(
            list(trained(model)),
            update_after_step=2 if name == "diffusers, later" else 0,
            use_ema_warmup=name == "diffusers, warm-up",
        )
    for number in range(1, 9):
        step(accelerator, model, optimizer)
        if name.startswith("diffusers"):
            theirs.step(trained(model))
        elif name != "mean of epochs" or (number >= 2 and (number - 2) % 3 == 0):
            theirs.update_parameters(model)
    others = theirs.shadow_params if name.startswith("diffusers") else trained(theirs.module)
    for own, other in zip(averaged(ours), others, strict=True):
        torch.testing.assert_close(own, other.detach(), rtol=0, atol=1e-7)


def test_only_steps_that_changed_the_weights_count() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, skip_nonfinite_updates=True)
    accelerator, model, optimizer = prepared(gradient_accumulation_plugin=plugin)
    ema = accelerator.average(model, DECAY)
    first = weights(model)
    step(accelerator, model, optimizer)
    assert are_equal(averaged(ema), first)
    step(accelerator, model, optimizer, factor=float("inf"))
    assert optimizer.step_was_skipped
    assert are_equal(averaged(ema), first)
    step(accelerator, model, optimizer)
    step(accelerator, model, optimizer)
    assert not are_equal(averaged(ema), first)


def test_steps_that_the_scaler_skips_do_not_count() -> None:
    scaler = GradScalerKwargs(init_scale=4.0)
    accelerator, model, optimizer = prepared(mixed_precision="fp16", kwargs_handlers=[scaler])
    ema = accelerator.average(model, decay=0.0)
    step(accelerator, model, optimizer, factor=float("inf"))
    assert optimizer.step_was_skipped
    assert optimizer.num_updates == 0
    first = averaged(ema)
    step(accelerator, model, optimizer)
    assert not are_equal(averaged(ema), first)
    assert are_equal(averaged(ema), weights(model))


def test_steps_that_the_replica_groups_do_not_commit_do_not_count() -> None:
    accelerator, model, optimizer = prepared()
    ema = accelerator.average(model, decay=0.0)
    optimizer.conditions = (lambda: False,)
    before = averaged(ema)
    model.enter.weight.data.add_(1)  # would show
    step(accelerator, model, optimizer)
    assert are_equal(averaged(ema), before)


def test_frozen_weights_and_buffers_are_those_of_the_model() -> None:
    accelerator, model, optimizer = prepared()
    ema = accelerator.average(model, DECAY)
    step(accelerator, model, optimizer)
    model.frozen.weight.data.fill_(3)
    mean = model.norm.running_mean.clone()
    assert len(ema.tensors()) == 3  # a tied weight, and two of the norm
    with ema.applied():
        assert model.frozen.weight.eq(3).all()
        assert torch.equal(model.norm.running_mean, mean)
        assert model.leave.weight is model.enter.weight


def test_averages_of_bfloat16_weights_are_float32(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(torch.bfloat16)
    ema = accelerator.average(model, DECAY)
    before = weights(model)
    naive = [weight.float() for weight in before]
    for _ in range(3):
        step(accelerator, model, optimizer)
        naive = [own.lerp(new.float(), 1 - DECAY) for own, new in zip(naive, weights(model), strict=True)]
    assert are_equal(ema.tensors(), naive)
    last = weights(model)
    assert are_equal(averaged(ema), [own.bfloat16() for own in naive])
    assert are_equal(weights(model), last)
    accelerator.save_state(tmp_path / "checkpoint")
    for own in ema.tensors():
        own.zero_()
    accelerator.load_state(tmp_path / "checkpoint")
    assert are_equal(ema.tensors(), naive)
    accelerator.save_model(ema, tmp_path / "model")
    saved = read_safetensors(tmp_path / "model" / "model.safetensors")
    assert torch.equal(saved["enter.weight"], naive[0].bfloat16())


def test_each_optimizer_updates_the_averages_of_its_parameters() -> None:
    accelerator = Accelerator(cpu=True)
    model, other = Net(), nn.Linear(2, 2)
    parts = [model.enter, model.norm, other]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    model, other, *optimizers = accelerator.prepare(model, other, *optimizers)
    ema = accelerator.average(model, decay=0.0)
    first = weights(model)
    step(accelerator, model, optimizers[0], optimizers[2])
    assert torch.equal(averaged(ema)[0], model.enter.weight)
    assert not torch.equal(averaged(ema)[0], first[0])
    assert are_equal(averaged(ema)[1:], first[1:])
    step(accelerator, model, *optimizers)
    assert are_equal(averaged(ema), weights(model))


@pytest.mark.parametrize("backend", ["eager"])
def test_compiled_models_compute_with_the_averages(backend: Any) -> None:
    accelerator, model, optimizer = prepared(dynamo_backend=backend)
    model.eval()
    ema = accelerator.average(model, DECAY)
    rows = torch.randn(2, 4)
    step(accelerator, model, optimizer)
    outside = model(rows)
    with ema.applied() as same, torch.no_grad():
        inside = model(rows)
        assert same is model
        torch.testing.assert_close(inside, accelerator.unwrap_model(model, keep_torch_compile=False)(rows))
    assert not torch.equal(inside, outside)
    assert torch.equal(model(rows), outside)


def test_the_weights_return_after_an_exception_and_no_step_is_taken_inside() -> None:
    accelerator, model, optimizer = prepared()
    ema, second = accelerator.average(model, DECAY), accelerator.average(model, 0.5)
    step(accelerator, model, optimizer)
    before = weights(model)
    with pytest.raises(StateError, match="would train the averages of Net"), ema.applied():
        assert not are_equal(weights(model), before)
        step(accelerator, model, optimizer)
    assert are_equal(weights(model), before)
    with pytest.raises(StateError, match="cannot be nested"), ema.applied(), second.applied():
        pass
    assert are_equal(weights(model), before)
    with pytest.raises(StateError, match="leave the block first"), ema.applied():
        ema.remove()
    assert not are_equal(averaged(ema), averaged(second))
    ema.remove()
    ema.remove()  # has no effect
    step(accelerator, model, optimizer)


def test_autocast_casts_the_averages() -> None:
    accelerator, model, optimizer = prepared()
    ema = accelerator.average(model, DECAY)
    step(accelerator, model, optimizer)
    rows = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        outside = model.enter(rows)
        with ema.applied():
            assert not torch.equal(model.enter(rows), outside)
        assert torch.equal(model.enter(rows), outside)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_run_resumes_bitwise(tmp_path: Path, blocking: bool) -> None:
    accelerator, model, optimizer = prepared()
    emas = [accelerator.average(model, DECAY, every=2, start=1), accelerator.average(model, 0.1, start=9)]
    for _ in range(2):
        step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path, blocking=blocking)
    ends = []
    for _ in range(2):
        torch.manual_seed(1)
        for _ in range(3):
            step(accelerator, model, optimizer)
        ends.append([tensor for ema in emas for tensor in averaged(ema)])
        accelerator.load_state(tmp_path)
    assert are_equal(*ends)
    names = {path.name for path in tmp_path.glob("averages*")}
    assert names == {"averages.safetensors", "averages_1.safetensors"}
    whole = read_safetensors(tmp_path / "averages.safetensors")
    assert torch.equal(whole["enter.weight"], whole["leave.weight"])


def test_a_checkpoint_without_averages_is_loaded_before_they_begin(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, model, optimizer = prepared()
    accelerator.save_state(tmp_path / "without")
    ema = accelerator.average(model)
    step(accelerator, model, optimizer)
    before = weights(model)
    with pytest.raises(CheckpointError, match=r"call accelerator.average\(\) after load_state"):
        accelerator.load_state(tmp_path / "without")
    assert are_equal(weights(model), before)
    accelerator.save_state(tmp_path / "with")
    ema.remove()
    accelerator.load_state(tmp_path / "without")
    assert are_equal(averaged(accelerator.average(model)), weights(model))
    accelerator.free_memory()
    accelerator, model, optimizer = prepared()
    with caplog.at_level(logging.WARNING):
        accelerator.load_state(tmp_path / "with")
    assert "holds averages.safetensors" in caplog.text


def test_a_checkpoint_of_other_averages_is_refused(tmp_path: Path) -> None:
    accelerator, model, _ = prepared()
    ema = accelerator.average(model)
    accelerator.save_state(tmp_path)
    ema.remove()
    model.norm.requires_grad_(False)
    accelerator.average(model)
    with pytest.raises(CheckpointError, match=r"does not fit this average of Net: it has norm.bias"):
        accelerator.load_state(tmp_path)


def test_checkpoints_are_not_saved_or_loaded_inside(tmp_path: Path) -> None:
    accelerator, model, _ = prepared()
    ema = accelerator.average(model)
    accelerator.save_state(tmp_path / "a")
    calls: list[Callable[[], Any]] = [
        lambda: accelerator.save_state(tmp_path / "b"),
        lambda: accelerator.load_state(tmp_path / "a"),
    ]
    for call in calls:
        with pytest.raises((StateError, CheckpointError), match="outside of applied"), ema.applied():
            call()
    assert not (tmp_path / "b").exists()


def test_exports_inside_and_outside_are_equal(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared()
    ema = accelerator.average(model, DECAY)
    step(accelerator, model, optimizer)
    accelerator.save_model(model, tmp_path / "model")
    accelerator.save_model(ema, tmp_path / "outside")
    with ema.applied():
        accelerator.save_model(ema, tmp_path / "inside")
    model_file, outside, inside = (
        read_safetensors(tmp_path / name / "model.safetensors") for name in ("model", "outside", "inside")
    )
    assert list(model_file) == list(outside)
    assert all(torch.equal(outside[name], inside[name]) for name in inside)
    assert not torch.equal(outside["enter.weight"], model_file["enter.weight"])


def test_an_evaluation_with_averages_saves_no_recent_checkpoint(tmp_path: Path) -> None:
    project = ProjectConfiguration(fast_dir=str(tmp_path), fast_every=1)
    accelerator, model, optimizer = prepared(project_config=project)
    data: Any = torch.zeros(8, 4)
    loader = accelerator.prepare(DataLoader(data, batch_size=2))
    ema = accelerator.average(model)
    batches = iter(loader)
    next(batches)
    step(accelerator, model, optimizer)
    with ema.applied():
        next(batches)
    assert not list(tmp_path.rglob("manifest.json"))
    assert len(list(batches)) == 2
    accelerator.wait_for_checkpoint()
    assert list(tmp_path.rglob("averages.safetensors"))
    before = averaged(ema)
    step(accelerator, model, optimizer)
    accelerator.load_state()
    assert are_equal(averaged(ema), before)


def test_joining_replica_groups_receive_the_averages() -> None:
    accelerator, model, optimizer = prepared()
    ema = accelerator.average(model, DECAY)
    step(accelerator, model, optimizer)
    items = list_items(accelerator._runtime.strategy)
    state = capture_items(items)
    state["averages"] = [[value.clone() for value in values] for values in state["averages"]]
    before = averaged(ema)
    step(accelerator, model, optimizer)
    apply_items(items, state)
    assert are_equal(averaged(ema), before)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"decay": 1.0}, "decay=1.0: "),
        ({"decay": -0.1}, "decay=-0.1: "),
        ({"decay": "0.9"}, "decay='0.9': "),
        ({"decay": float("nan")}, "decay=nan: "),
        ({"every": 0}, "every=0: it is not an integer of at least 1"),
        ({"every": 1.5}, "every=1.5: "),
        ({"start": -1}, "start=-1: it is not an integer of at least 0"),
        ({"device": "nowhere"}, "device='nowhere': it is not a device"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], text: str) -> None:
    accelerator, model, _ = prepared()
    with pytest.raises(ConfigurationError) as raised:
        accelerator.average(model, **options)
    assert text in str(raised.value)
    assert not accelerator._runtime.prepared.averages


def test_models_that_cannot_be_averaged_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="model='Net': it is not prepared"):
        accelerator.average(Net())
    model = accelerator.prepare(Net())
    with pytest.raises(PreparationError, match="No prepared optimizer steps enter.weight"):
        accelerator.average(model)
    accelerator._runtime.strategy.has_plain_weights = False
    with pytest.raises(PreparationError, match="keeps the weights of models itself"):
        accelerator.average(model)


def test_a_group_that_is_added_later_is_refused() -> None:
    accelerator, model, optimizer = prepared()
    ema = accelerator.average(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(StateError, match="after add_param_group"):
        step(accelerator, model, optimizer)
    ema.remove()
    accelerator.average(model)
    step(accelerator, model, optimizer)


@pytest.mark.slow
def test_a_run_without_averages_does_not_import_them(tmp_path: Path) -> None:
    code = """
import sys, torch
from accelerate import Accelerator
from accelerate.accelerator.state_items import list_items
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
accelerator.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
accelerator.save_state(sys.argv[1])
accelerator.load_state(sys.argv[1])
print([name for name in sys.modules if "averag" in name and "accelerate" in name])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "checkpoint")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[]"
