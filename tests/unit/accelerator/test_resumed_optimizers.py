"""Optimizers of torch and of pytorch_optimizer: a resumed run equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.base import AccelerateError
from accelerate.state import AcceleratorState, GradientState

pytestmark = [pytest.mark.usefixtures("states"), pytest.mark.filterwarnings("ignore")]
STEPS = 5
NEEDS_CODE = {"AdaShift", "Conda", "SCION", "SCIONLight", "ScalableShampoo"}
"""Classes whose states contain other objects, of which a warning is given when they are saved."""


class Rows(nn.Module):
    """Embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 4, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.rows(inputs.argmax(-1))
        return rows


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


Make = tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]
OF_TORCH: dict[str, Make] = {
    "SparseAdam": (Rows, lambda model: torch.optim.SparseAdam(model.parameters(), 1e-2)),
    "LBFGS": (make_net, lambda model: torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)),
}
WRAPPERS = ("Lookahead", "TRAC", "OrthoGrad", "Magma")
FAST = ("EmoNavi", "MADGRAD", "SPAM", "AdaShift")


def make_any(kind: Any) -> Make:
    def make(model: nn.Module) -> Any:
        try:
            return kind(model.parameters(), lr=1e-2)
        except TypeError:
            return kind(model.parameters())

    return make_net, make


def of_torch() -> dict[str, Make]:
    kinds = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    }
    kinds.pop("Optimizer")
    kinds.pop("Muon", None)  # for matrices only, and not in old versions of torch
    return {**{name: make_any(kind) for name, kind in kinds.items()}, **OF_TORCH}


def of_library(*, fast: bool) -> dict[str, Make]:
    library = pytest.importorskip("pytorch_optimizer")
    wrappers: dict[str, Make] = {
        name: (make_net, lambda model, name=name: getattr(library, name)(adamw(model)))
        for name in WRAPPERS
        if hasattr(library, name)
    }
    kinds = {
        name: kind
        for name, kind in vars(library).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    }
    chosen = {name: make_any(kind) for name, kind in kinds.items() if not fast or name in FAST}
    return {**{name: make for name, make in chosen.items() if name not in WRAPPERS}, **wrappers}


class Run:
    """Model and optimizer, prepared or plain."""

    def __init__(self, make: Make, seed: int, *, prepared: bool = True) -> None:
        torch.manual_seed(seed)
        self.model = make[0]()
        self.optimizer = make[1](self.model)
        self.backward: Any = torch.Tensor.backward
        if prepared:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
            self.accelerator = Accelerator(cpu=True)
            self.backward = self.accelerator.backward
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def train(self, first: int, last: int) -> list[torch.Tensor]:
        for step in range(first, last):
            inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            torch.manual_seed(100 + step)  # some optimizers draw

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss: torch.Tensor = (self.model(inputs) - 1).square().mean()
                self.backward(loss)
                return loss

            self.optimizer.step(closure)
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def resume_plain(make: Make) -> list[torch.Tensor]:
    """Continues with the state dicts of torch, or raises an error for what does not train like this."""
    first = Run(make, 0, prepared=False)
    first.train(0, 3)
    second = Run(make, 7, prepared=False)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    return second.train(3, STEPS)


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def find_difference(make: Make, folder: Path, options: dict[str, Any]) -> str:
    """Returns what differs after a resume, or an empty string, also where plain torch does not resume."""
    whole = Run(make, 0).train(0, STEPS)
    run = Run(make, 0)
    run.train(0, 3)
    run.accelerator.save_state(folder)
    rolled_back = run.train(3, 4) and run
    resumed = Run(make, 7)
    for name, own in (("rollback", rolled_back), ("new objects", resumed)):
        try:
            own.accelerator.load_state(folder, **options)
        except AccelerateError as error:
            return f"{name}: {error}"
        if not are_equal(own.train(3, STEPS), whole):
            return f"{name}: other weights"
    return ""


def find_differences(kinds: dict[str, Make], folder: Path) -> tuple[dict[str, str], int]:
    """Returns the differences by the names of the optimizers, and how many of them plain torch resumes."""
    differences, count = {}, 0
    for name, make in kinds.items():
        try:
            whole = Run(make, 0, prepared=False).train(0, STEPS)
            is_exact = are_equal(resume_plain(make), whole)
        except Exception:  # it needs other arguments, or another loop
            continue
        count += is_exact
        options = {"load_kwargs": {"weights_only": False}} if name in NEEDS_CODE else {}
        if is_exact and (difference := find_difference(make, folder / name, options)):
            differences[name] = difference
    return differences, count


@pytest.mark.parametrize(
    "kinds", [OF_TORCH, pytest.param(of_torch(), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_optimizers_of_torch_resume(kinds: dict[str, Make], tmp_path: Path) -> None:
    differences, count = find_differences(kinds, tmp_path)
    assert not differences
    assert count >= len(kinds) - 1


def test_optimizers_with_states_of_other_forms_resume(tmp_path: Path) -> None:
    differences, count = find_differences(of_library(fast=True), tmp_path)
    assert not differences
    assert count == len(FAST) + len(WRAPPERS)


@pytest.mark.slow
def test_optimizers_of_a_library_resume(tmp_path: Path) -> None:
    differences, count = find_differences(of_library(fast=False), tmp_path)
    assert not differences
    assert count > 90


@pytest.mark.parametrize("state", [{}, {"state": {}, "param_groups": 3}, [1]])
def test_a_state_of_another_form_is_refused(state: Any) -> None:
    from accelerate.checkpointing.compatibility import check_optimizer

    with pytest.raises(AccelerateError, match="it needs 'state' and 'param_groups'"):
        check_optimizer(adamw(make_net()), state)
