"""Calls that replica groups cannot repeat raise an error with the fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from accelerate import Accelerator
from accelerate.base import ConfigurationError, RecoveryError, StateError
from accelerate.data_loader import Position
from accelerate.launch import committed_key
from accelerate.recovery.loader import RecoveryLoader
from accelerate.recovery.membership import Members
from accelerate.recovery.run_values import PASSES, RunValues
from accelerate.recovery.session import Recovery
from accelerate.recovery.step_state import StepState


def new_recovery(**attributes: Any) -> Recovery:
    """A session with these attributes, without a store or other groups."""
    recovery = Recovery.__new__(Recovery)
    vars(recovery).update(attributes)
    return recovery


def test_a_state_is_not_loaded_after_a_step() -> None:
    new_recovery(_has_committed=False).before_load_state()
    with pytest.raises(StateError, match="before the first step"):
        new_recovery(_has_committed=True).before_load_state()


def test_a_step_without_backward_of_the_accelerator_is_refused() -> None:
    step = StepState.__new__(StepState)
    vars(step).update(_flags=torch.nn.Parameter(torch.zeros(3)), _kept=[])
    recovery = new_recovery(in_pass=True, _outcome=None, _step=step, members=Members(0, 2))
    vars(recovery).update(_membership=object(), _loader=object())
    with pytest.raises(StateError, match=r"in place of loss\.backward"):
        recovery.commit()


class OtherMember:
    """Membership of a step with another replica group, which has sent these tensors."""

    has_failed = False

    def __init__(self, received: list[torch.Tensor] | None = None) -> None:
        self.received = received
        self.sent: list[torch.Tensor] = []

    def sum(self, tensor: torch.Tensor) -> bool:
        self.sent.append(tensor.clone())
        if self.received is not None:
            tensor += self.received[len(self.sent) - 1]
        return True


def test_members_with_different_learning_rates_are_refused(states: None) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.1}])
    model, optimizer = accelerator.prepare(model, optimizer)
    strategy: Any = accelerator._runtime.strategy
    step = StepState(strategy, strategy.session.prepared, 2)

    def take(rate: Any, received: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        member: Any = OtherMember(received)
        optimizer.param_groups[1]["lr"] = rate
        step.add_up(member, [True, False])
        if received is not None:
            step.share_buffers(member, Members(0, 2))
        return member.sent  # type: ignore[no-any-return]

    sent = take(0.1)
    take(torch.tensor(0.1, dtype=torch.float64), sent)
    assert step.counts == [2.0, 0.0]
    with pytest.raises(StateError, match="different learning rates"):
        take(0.05, sent)


def test_a_backward_pass_after_a_step_of_the_same_batch_is_refused() -> None:
    with pytest.raises(StateError, match=r"before the first optimizer\.step"):
        new_recovery(in_pass=True, _outcome=True).before_backward(None, {})


def test_the_number_of_micro_batches_is_not_changed_within_a_pass(states: None) -> None:
    accelerator = Accelerator(cpu=True)
    recovery = new_recovery(in_pass=True)
    accelerator._runtime = replace(accelerator._runtime, groups=recovery)
    with pytest.raises(ConfigurationError, match="between two passes"):
        accelerator.gradient_accumulation_steps = 3
    recovery.in_pass = False
    accelerator.gradient_accumulation_steps = 3
    assert accelerator.gradient_accumulation_steps == 3


def test_windows_and_counted_items_are_refused(states: None) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator._runtime = replace(accelerator._runtime, groups=new_recovery(in_pass=False))
    accelerator._accumulation.groups = accelerator._runtime.groups
    with pytest.raises(ConfigurationError, match=r"windows=.*Use accumulate\(\)"):
        accelerator.windows([])
    with pytest.raises(ConfigurationError, match=r"num_items=3.*mean loss"):
        accelerator.accumulate(num_items=3)


class Store(dict[str, str]):
    """The store of a run."""

    def check(self, names: list[str]) -> bool:
        return all(name in self for name in names)


class Waiting:
    """Membership of a replica group that has started again, to which no other one sends its state."""

    num_committed = 0

    def __init__(self, on_begin: Callable[[int], Any] = lambda number: None) -> None:
        self.num_begun, self._on_begin = 0, on_begin

    def begin(self) -> Members:
        self.num_begun += 1
        self._on_begin(self.num_begun)
        return Members(0, 1)

    def decline(self) -> None:
        pass


def begin_again(membership: Waiting, store: Store, timeout: float) -> RecoveryLoader:
    """Begins a step of pass 3 while another replica group has taken steps, and returns the loader."""
    store.update({committed_key(0): "7", PASSES.format(0, 0): "3"})
    run = SimpleNamespace(timeout=timeout, replicas=2)
    run_values = RunValues.__new__(RunValues)
    vars(run_values).update(_store=store, _run=run, life=0)
    recovery = new_recovery(_store=run_values, num_replicas=2, _run=run)
    loader = RecoveryLoader.__new__(RecoveryLoader)
    loader.number, loader.position = 0, Position(3, 8)
    recovery._begin_with_state(cast("Any", membership), loader)
    return loader


def test_a_pass_that_others_end_meanwhile_is_not_trained_alone(
    states: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.recovery.session.PAUSE", 0.0)
    store = Store()
    over = PASSES.format(0, 0)
    membership = Waiting(lambda number: store.update({over: "4"}) if number == 3 else None)
    loader = begin_again(membership, store, 60.0)
    assert (loader.position, membership.num_begun) == (Position(4), 3)


def test_steps_are_not_taken_without_the_state_of_the_run(states: None) -> None:
    with pytest.raises(RecoveryError, match="sent no state within -1"):
        begin_again(Waiting(), Store(), -1)


@pytest.fixture
def gradients_of_step(states: None) -> tuple[StepState, torch.nn.Linear, Callable[..., None]]:
    """A step, its model, and a function that takes a backward pass, and then changes gradients."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    strategy: Any = accelerator._runtime.strategy
    step = StepState(strategy, strategy.session.prepared, 2)
    member: Any = OtherMember()

    def backward(used: torch.nn.Parameter, *, is_last: bool, undoes_changes: bool = False) -> None:
        step.begin_backward()
        used.sum().backward()
        if is_last:
            step.add_up(member, [True, False])
        step.keep_gradients(undoes_changes=undoes_changes)
        torch.nn.utils.clip_grad_norm_([used], 0.1)

    step.begin()
    return step, model, backward


def test_a_loop_changes_only_the_gradients_of_a_step(gradients_of_step: Any) -> None:
    step, model, backward = gradients_of_step
    for _ in range(2):
        step.begin_micro_batch(is_own=True)
        backward(model.weight, is_last=False, undoes_changes=True)
    step.begin_micro_batch(is_own=True)
    step.begin_backward()
    assert model.weight.grad.tolist() == [[2.0, 2.0]]


def test_gradients_of_one_loss_may_change_before_that_of_others(gradients_of_step: Any) -> None:
    _, model, backward = gradients_of_step
    for parameter in (model.weight, model.bias):
        backward(parameter, is_last=True)
    assert model.weight.grad.norm().item() == pytest.approx(0.1)
    assert model.bias.grad.norm().item() == pytest.approx(0.1)


@pytest.mark.parametrize("is_last", [True, False])
def test_gradients_that_change_before_others_are_added_are_refused(
    gradients_of_step: Any, is_last: bool
) -> None:
    _, model, backward = gradients_of_step
    backward(model.weight, is_last=is_last)
    with pytest.raises(StateError, match="Gradients were changed or set to zero after accelerator.backward"):
        backward(model.weight, is_last=is_last)


def test_gradients_that_move_without_a_change_are_added_up(gradients_of_step: Any) -> None:
    step, model, _ = gradients_of_step
    model.weight.sum().backward()
    step.keep_gradients(undoes_changes=False)
    model.weight.grad = model.weight.grad.clone()  # as a forward of DistributedDataParallel may do
    step.begin_backward()
    model.weight.sum().backward()
    assert model.weight.grad.tolist() == [[2.0, 2.0]]
