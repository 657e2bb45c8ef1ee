"""AcceleratedOptimizer: steps when gradients are complete, and stays a torch optimizer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.base import ConfigurationError
from accelerate.optimizer import AcceleratedOptimizer, move_to_device, patch_optimizer_step
from accelerate.plugins import GradientAccumulationPlugin
from accelerate.precision import ScaledPrecision
from accelerate.state import AcceleratorState, GradientState

pytestmark = pytest.mark.usefixtures("states")


def make(scaler: torch.amp.GradScaler | None = None) -> tuple[torch.nn.Linear, AcceleratedOptimizer]:
    AcceleratorState(cpu=True, mixed_precision="no", _from_accelerator=True)
    model = torch.nn.Linear(2, 1)
    return model, AcceleratedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), scaler=scaler)


def test_is_a_torch_optimizer_and_carries_a_scheduler() -> None:
    _, optimizer = make()
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_neither_steps_nor_clears_while_gradients_accumulate() -> None:
    model, optimizer = make()
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    GradientState()._set_sync_gradients(False)
    assert optimizer.step() is None
    optimizer.zero_grad()
    assert model.weight.grad is not None
    assert torch.equal(model.weight, before)
    assert optimizer.num_updates == 0
    GradientState()._set_sync_gradients(True)
    optimizer.step()
    assert optimizer.num_updates == 1
    optimizer.zero_grad()
    assert model.weight.grad is None
    assert not torch.equal(model.weight, before)


def test_zero_grad_fills_with_zeros_on_request() -> None:
    model, optimizer = make()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad is not None
    assert not model.weight.grad.any()


def test_an_optimizer_whose_zero_grad_has_no_argument_clears_its_gradients() -> None:
    class Plain(torch.optim.SGD):
        def zero_grad(self) -> None:  # type: ignore[override]
            super().zero_grad(set_to_none=False)

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, Plain(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.zero_grad()
    assert torch.equal(model.weight.grad, torch.zeros(1, 2))


def test_groups_state_and_defaults_are_those_of_the_inner_optimizer() -> None:
    _, optimizer = make()
    extra = torch.nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [extra], "lr": 1.0})
    assert optimizer.optimizer.param_groups[1]["lr"] == 1.0
    optimizer.param_groups = optimizer.param_groups[:1]
    optimizer.defaults = {"lr": 7.0}
    optimizer.state = {"kept": 1}
    assert len(optimizer.optimizer.param_groups) == 1
    assert optimizer.optimizer.defaults == {"lr": 7.0}
    assert optimizer.optimizer.state == {"kept": 1}
    assert {id(p) for p in optimizer.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}


def test_state_dict_is_that_of_the_inner_optimizer() -> None:
    model, optimizer = make()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    plain = torch.optim.Adam(model.parameters(), lr=9.0)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.param_groups[0]["lr"] == 0.1
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1


class Momentum(torch.optim.Optimizer):
    """An optimizer with float32 averages of bfloat16 gradients, and its own count of steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("average", torch.zeros_like(parameter, dtype=torch.float32))
            state.setdefault("count", torch.tensor([0]))
            state["average"].lerp_(parameter.grad.float(), 0.01)
            state["count"] += 1
            parameter -= (0.1 * state["average"] / state["count"].sqrt()).to(parameter.dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Momentum, torch.bfloat16), (torch.optim.NAdam, torch.bfloat16), (torch.optim.NAdam, torch.float64)],
)
def test_a_run_with_states_of_other_dtypes_than_its_weights_resumes_exactly(
    states: None, tmp_path: Path, kind: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, dtype=dtype)
    model, optimizer = accelerator.prepare(model, kind(model.parameters()))

    def train(num_steps: int) -> list[torch.Tensor]:
        for step in range(num_steps):
            inputs = torch.linspace(-1.0, 1.0 + step, 12, dtype=dtype).view(3, 4)
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        values = [value for state in optimizer.state.values() for value in state.values()]
        return [value.clone() for value in (*model.parameters(), *values)]

    train(3)
    accelerator.save_state(tmp_path / "state")
    expected = train(3)
    accelerator.load_state(tmp_path / "state")
    resumed = train(3)
    assert [value.dtype for value in resumed] == [value.dtype for value in expected]
    assert all(map(torch.equal, resumed, expected))


def test_states_that_are_wider_than_their_weights_keep_their_values_in_prepare(states: None) -> None:
    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = Momentum(model.parameters())
    model(torch.linspace(-1.0, 1.0, 4, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()
    before = optimizer.state[model.weight]["average"].clone()
    model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
    after = optimizer.state[model.weight]["average"]
    assert after.dtype == torch.float32
    assert torch.equal(after, before)


def test_step_returns_what_a_closure_computed() -> None:
    model, optimizer = make()

    def closure() -> torch.Tensor:
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    assert torch.is_tensor(optimizer.step(closure))


@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_whose_step_takes_no_closure_steps(scaled: bool) -> None:
    class Own(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            super().step()

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    model, _ = make()
    optimizer = AcceleratedOptimizer(Own(model.parameters(), lr=0.1), scaler=scaler)
    before = model.weight.detach().clone()
    loss = model(torch.ones(1, 2)).sum()
    (loss if scaler is None else scaler.scale(loss)).backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_train_and_eval_reach_optimizers_that_have_modes() -> None:
    _, optimizer = make()
    optimizer.train()
    optimizer.eval()
    called = []
    optimizer.optimizer.train = lambda: called.append("train")  # type: ignore[attr-defined]
    optimizer.optimizer.eval = lambda: called.append("eval")  # type: ignore[attr-defined]
    optimizer.train()
    optimizer.eval()
    assert called == ["train", "eval"]


def test_a_scaled_step_is_skipped_when_a_gradient_is_infinite() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer = make(scaler)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.full((1, 2), float("inf"))).sum()).backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert optimizer.num_updates == 0
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 2.0
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert optimizer.num_updates == 1
    assert not torch.equal(model.weight, before)


def test_the_scaled_step_works_through_names_that_clients_replace() -> None:
    """Some clients give each optimizer a scaler of its own by assigning these four attributes."""
    model, optimizer = make()
    optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer._accelerate_step_called = False
    optimizer._optimizer_original_step_method = optimizer.optimizer.step
    optimizer._optimizer_patched_step_method = patch_optimizer_step(optimizer, optimizer.optimizer.step)
    optimizer.scaler.scale(model(torch.full((1, 2), float("nan"))).sum()).backward()
    optimizer.step()
    assert optimizer.step_was_skipped


@pytest.mark.parametrize("scaled", [False, True])
def test_copies_and_pickles(scaled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    _, optimizer = make(scaler)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied.param_groups[0]["lr"] == 0.1
        assert copied.optimizer is not optimizer.optimizer
        (p,) = copied.param_groups[0]["params"][:1]
        p.grad = torch.ones_like(p)
        before = p.detach().clone()
        if scaled:
            copied.scaler.scale(torch.ones(()))
        copied.step()
        assert not torch.equal(p, before)


def test_unknown_attributes_are_those_of_the_inner_optimizer() -> None:
    _, optimizer = make()
    optimizer.optimizer.special = 3  # type: ignore[attr-defined]
    assert optimizer.special == 3
    with pytest.raises(AttributeError):
        _ = optimizer.not_there


def test_move_to_device_keeps_the_structure() -> None:
    state = {"state": {0: {"step": torch.tensor(1.0), "name": "a"}}, "groups": [(torch.ones(2), 3)]}
    moved = move_to_device(state, "meta")
    assert moved["state"][0]["step"].device.type == "meta"
    assert moved["state"][0]["name"] == "a"
    assert moved["groups"][0][0].device.type == "meta"
    assert moved["groups"][0][1] == 3


def test_each_scaled_step_is_checked_for_overflow() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer = make(scaler)
    skipped = []
    for value in (1.0, float("inf"), 1.0, float("nan")):
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
    assert skipped == [False, True, False, True]
    assert optimizer.num_updates == 2


class ScaledByItself(torch.optim.SGD):
    """Reads the scale from a gradient scaler that it gets as an argument, as some fused optimizers do."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, grad_scaler=None):  # type: ignore[no-untyped-def]
        grad_scaler.unscale_(self)
        states = grad_scaler._per_optimizer_states[id(self)]
        if not any(states["found_inf_per_device"].values()):
            super().step(closure)


class Calls:
    """Counts the calls of an observer of updates."""

    num_updates = 0

    def before_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Does nothing."""

    def after_update(self, optimizer: AcceleratedOptimizer) -> None:
        self.num_updates += 1


FUSED = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "with an argument": lambda p: ScaledByItself(p, lr=0.1),
    "with a scheduler": lambda p: (
        torch.optim.lr_scheduler.LambdaLR(  # which replaces the step
            torch.optim.SGD(p, lr=0.1, fused=True), lambda _: 1.0
        ).optimizer
    ),
}


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_a_fused_optimizer_that_leaves_out_its_step_has_skipped_it() -> None:
    AcceleratorState(cpu=True, mixed_precision="no", _from_accelerator=True)
    failures = []
    for name, build in FUSED.items():
        for unscaled in (False, True) if name != "with an argument" else (False,):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            model, calls = torch.nn.Linear(2, 1), Calls()
            optimizer = AcceleratedOptimizer(build(model.parameters()), scaler=scaler)
            optimizer.observers = (calls,)
            skipped, moved = [], []
            for value in (float("inf"), 1.0, float("nan"), 1.0):
                before = model.weight.detach().clone()
                scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
                if unscaled:
                    scaler.unscale_(optimizer.optimizer)
                optimizer.step()
                skipped.append(optimizer.step_was_skipped)
                moved.append(not torch.equal(before, model.weight))
                optimizer.zero_grad()
            seen = (skipped, moved, optimizer.num_updates, calls.num_updates, scaler.get_scale())
            if seen != ([True, False, True, False], [False, True, False, True], 2, 2, 1.0):
                failures.append((name, unscaled, *seen))
    assert not failures


def test_fused_optimizers_with_one_scaler_are_skipped_each_for_itself() -> None:
    AcceleratorState(cpu=True, mixed_precision="no", _from_accelerator=True)
    precision = ScaledPrecision("fp16", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    optimizers = [
        AcceleratedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, fused=is_fused), scaler=precision.scaler
        )
        for model, is_fused in zip(models, (True, False), strict=True)
    ]
    precision.set_optimizers(optimizers)
    skipped = []
    for values in ((float("inf"), 1.0), (1.0, float("inf")), (1.0, 1.0)):
        loss = sum(
            model(torch.full((1, 2), value)).sum() for model, value in zip(models, values, strict=True)
        )
        precision.scale_loss(loss).backward()
        for optimizer in optimizers:
            optimizer.step()
        skipped.append([optimizer.step_was_skipped for optimizer in optimizers])
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert skipped == [[True, False], [False, True], [False, False]]
    assert [optimizer.num_updates for optimizer in optimizers] == [2, 2]


class Wrapper:
    """Wrapper of an optimizer with the attribute `optimizer` alone."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


def test_train_and_eval_reach_an_optimizer_behind_wrappers() -> None:
    _, optimizer = make()
    inner, called = optimizer.optimizer, []
    inner.train = lambda: called.append("train")  # type: ignore[attr-defined]
    inner.eval = lambda: called.append("eval")  # type: ignore[attr-defined]
    for depth in range(3):
        optimizer.train()
        optimizer.eval()
        assert called == ["train", "eval"] * (depth + 1)
        optimizer.optimizer = Wrapper(optimizer.optimizer)  # type: ignore[assignment]


def test_train_ends_at_a_wrapper_of_itself() -> None:
    _, optimizer = make()
    optimizer.optimizer = wrapper = Wrapper(None)  # type: ignore[assignment]
    wrapper.optimizer = wrapper
    optimizer.train()


class Owners:
    """Counts the steps, in place of the owners of whole matrices."""

    num_steps = 0

    def step(self, take_step, *args):
        self.num_steps += 1
        return take_step(*args)


@pytest.mark.parametrize("scaled", [False, True])
def test_owners_of_matrices_take_the_steps_that_are_not_skipped(scaled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    model, optimizer = make(scaler)
    owners = Owners()
    optimizer.step_wrappers = (owners.step,)
    for value in (1.0, float("inf")) if scaled else (1.0,):
        loss = model(torch.full((1, 2), value)).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert owners.num_steps == optimizer.num_updates == 1


def test_an_update_is_skipped_by_the_gradients_of_its_closure(states: None) -> None:
    plugin = GradientAccumulationPlugin(num_steps=1, skip_nonfinite_updates=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=1.0))
    for factor, expected, updates in ((float("inf"), 1.0, 0), (0.5, 0.5, 1)):

        def closure(factor: float = factor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (factor * parameter).sum()
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
        assert (parameter.item(), optimizer.num_updates) == (expected, updates)
    several = accelerator.prepare(torch.optim.LBFGS([parameter]))
    with pytest.raises(ConfigurationError, match="skip_nonfinite_updates"):
        several.step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_closure_under_fp16_computes_the_update_of_a_step_without_a_closure(kind: Any) -> None:
    def train(with_closure: bool) -> tuple[torch.Tensor, float]:
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, mixed_precision="fp16")
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        wrapped, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=0.1))

        def compute() -> torch.Tensor:
            optimizer.zero_grad()
            loss = wrapped(torch.ones(2, 3)).square().mean()
            accelerator.backward(loss)
            return loss.detach()

        for _ in range(3):
            loss = optimizer.step(compute) if with_closure else compute()
            if not with_closure:
                optimizer.step()
        return model.weight.detach().clone(), float(loss)

    (weight, loss), (expected, expected_loss) = train(True), train(False)
    assert torch.equal(weight, expected)
    assert loss == expected_loss


def test_an_optimizer_that_calls_a_closure_several_times_is_refused_under_fp16() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = torch.nn.Linear(3, 1)
    _, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigurationError, match="closure='LBFGS': .* Leave out fp16"):
        optimizer.step(lambda: 0.0)
