"""Mixed precision: autocast forwards, float32 outputs, one scaler for several optimizers."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path

import pytest
import torch

from accelerate import Accelerator
from accelerate.base import ConfigurationError
from accelerate.precision import AutocastForward, get_grad_scaler, get_mixed_precision_context_manager
from accelerate.utils import AutocastKwargs, GradientAccumulationPlugin, GradScalerKwargs

pytestmark = pytest.mark.usefixtures("states")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, pixels: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        hidden = self.layer(pixels)
        self.seen.append(hidden.dtype)
        return {"logits": hidden * scale}


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_forward_runs_in_low_precision_and_returns_float32(name: str, dtype: torch.dtype) -> None:
    model = Accelerator(cpu=True, mixed_precision=name).prepare(Net())
    outputs = model(torch.ones(1, 4))
    assert model.seen == [dtype]
    assert outputs["logits"].dtype == torch.float32


def test_the_model_stays_the_object_that_was_passed() -> None:
    model = Net()
    assert Accelerator(cpu=True, mixed_precision="bf16").prepare(model) is model
    assert list(inspect.signature(model.forward).parameters) == ["pixels", "scale"]


def test_copies_and_pickles_run_their_own_weights() -> None:
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(Net())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.nn.init.zeros_(copied.layer.weight)
        torch.nn.init.ones_(copied.layer.bias)
        assert copied(torch.ones(1, 4))["logits"].tolist() == [[1.0, 1.0]]
        assert copied.seen[-1] == torch.bfloat16
        assert not torch.equal(copied.layer.weight, model.layer.weight)


def test_unwrapping_restores_the_plain_forward() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Net())
    assert accelerator.unwrap_model(model) is model
    assert isinstance(model.forward, AutocastForward)
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    assert "forward" not in vars(model)
    assert model(torch.ones(1, 4))["logits"].dtype == torch.float32


def test_a_forward_set_on_the_object_is_kept_inside() -> None:
    model = Net()
    model.forward = lambda pixels: model.layer(pixels) + 100  # type: ignore[method-assign]
    own = model.forward
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    assert prepared(torch.zeros(1, 4)).min() > 50
    accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert vars(model)["forward"] is own


def test_autocast_arguments_reach_forward_and_context() -> None:
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)]
    )
    model = accelerator.prepare(Net())
    model(torch.ones(1, 4))
    assert model.seen == [torch.float32]
    with accelerator.autocast():
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.float32
    with accelerator.autocast(AutocastKwargs(enabled=True)):
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.bfloat16


def test_the_scaler_takes_its_arguments() -> None:
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)]
    )
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 8.0
    assert Accelerator(cpu=True, mixed_precision="fp16").native_amp


def half_and_reference() -> tuple[torch.nn.Linear, torch.nn.Linear]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2).half()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("clips", [False, True])
def test_float16_gradients_are_refused_with_the_option_that_allows_them(clips: bool) -> None:
    accelerator, (model, _) = Accelerator(cpu=True, mixed_precision="fp16"), half_and_reference()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum() * 1e-4)
    with pytest.raises(
        ConfigurationError,
        match=r"2 parameters of SGD are float16.*GradScalerKwargs\(allow_fp16_gradients=True\)",
    ):
        accelerator.clip_grad_norm_(model.parameters(), 1.0) if clips else optimizer.step()


@pytest.mark.parametrize("clips", [False, True])
def test_float16_weights_train_on_request(clips: bool) -> None:
    handlers = [GradScalerKwargs(init_scale=8.0, allow_fp16_gradients=True)]
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers)
    model, reference = half_and_reference()
    expected_optimizer = torch.optim.Adam(reference.parameters(), lr=0.1, eps=1e-4)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-4))
    for step in range(4):
        factor = 1.0 if step != 2 else 1e5  # too large for float16
        accelerator.backward(model(torch.ones(1, 2)).sum() * factor)
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped is (step == 2)
        if step != 2:
            (reference(torch.ones(1, 2).half()).float().sum() * 8).backward()
            for parameter in reference.parameters():
                parameter.grad = parameter.grad / 8
            if clips:
                torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            expected_optimizer.step()
            expected_optimizer.zero_grad()
        for got, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert got.dtype == torch.float16
            assert torch.equal(got, expected)
    assert accelerator.scaler is not None
    copied = pickle.loads(pickle.dumps(accelerator.scaler))
    assert copied.get_scale() == accelerator.scaler.get_scale() == 4.0


def step_two_models(accelerator: Accelerator, scale: float) -> list[float]:
    """Backward both losses, then step both; return the two weights."""
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for model in models:
        torch.nn.init.ones_(model.weight)
    first, second, *optimizers = accelerator.prepare(*models, *optimizers)
    for _ in range(3):
        accelerator.backward(first(torch.ones(1, 1)).sum() * scale)
        accelerator.backward(second(torch.ones(1, 1)).sum() * scale)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [model.weight.item() for model in (first, second)]


def test_two_optimizers_see_one_scale_until_both_have_stepped() -> None:
    """With a scale that doubles at each update, an update between the two would halve the second step."""
    growing = GradScalerKwargs(init_scale=2.0, growth_interval=1)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[growing])
    assert step_two_models(accelerator, 0.25) == pytest.approx([1 - 3 * 0.125] * 2)
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 8.0


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_skipped_step_does_not_change_the_scale_of_the_next_optimizer(skipped: int) -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, skip_nonfinite_updates=True),
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0)],
    )
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)
    before = [model.weight.item() for model in models]
    for update in range(2):
        for number, model in enumerate(prepared[:2]):
            factor = torch.inf if (number, update) == (skipped, 0) else 1.0
            accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
        for optimizer in prepared[2:]:
            optimizer.step()
            optimizer.zero_grad()
    steps = [start - model.weight.item() for start, model in zip(before, models, strict=True)]
    assert steps == pytest.approx([1.0, 2.0] if skipped == 0 else [2.0, 1.0])
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 32.0


def test_a_checkpoint_has_the_scale_after_the_steps_of_all_optimizers(tmp_path: Path) -> None:
    growing = GradScalerKwargs(init_scale=2.0, growth_interval=1)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[growing])
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    first, second, *optimizers = accelerator.prepare(*models, *optimizers)

    def step() -> None:
        for model in (first, second):
            accelerator.backward(model(torch.ones(1, 1)).sum())
        for optimizer in optimizers:
            optimizer.step()

    step()
    accelerator.save_state(str(tmp_path))
    assert torch.load(tmp_path / "scaler.pt")["scale"] == 4.0
    step()
    accelerator.load_state(str(tmp_path))
    for model in (first, second):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 4.0
    optimizers[0].step()
    accelerator.save_state(str(tmp_path / "between"))
    bias = models[1].bias.item()
    optimizers[1].step()
    assert models[1].bias.item() == pytest.approx(bias - 0.5)


def test_clipping_unscales_gradients_only_once() -> None:
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=64.0)]
    )
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.full((1, 1), 4.0)).sum())
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == pytest.approx(4.0)
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    accelerator.unscale_gradients()
    optimizer.step()
    assert model.weight.item() == pytest.approx(0.5)


def test_clipping_returns_unscaled_norms_while_gradients_accumulate() -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0)],
    )
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 1), 4.0)).sum())
        assert accelerator.clip_grad_norm_(model.parameters(), 10.0) == pytest.approx(2.0)
        optimizer.step()
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 1), 4.0)).sum())
        assert accelerator.clip_grad_norm_(model.parameters(), 10.0) == pytest.approx(4.0)
        optimizer.step()


def test_public_constructors_follow_the_state() -> None:
    Accelerator(cpu=True, mixed_precision="bf16")
    with get_mixed_precision_context_manager(native_amp=True):
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.bfloat16
    with get_mixed_precision_context_manager(native_amp=False):
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.float32
    assert get_grad_scaler(init_scale=4.0).get_scale() == 4.0
