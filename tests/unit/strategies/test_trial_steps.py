"""Which optimizers compute the update of a value from others, of a parameter or of all parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.strategies.trial_steps import needs_all_parameters, needs_whole_parameters

OPTIMIZERS: dict[str, tuple[bool, Any]] = {
    "Adafactor": (True, lambda parameters: torch.optim.Adafactor(parameters)),
    "LBFGS": (True, lambda parameters: torch.optim.LBFGS(parameters)),
    "AdamW": (False, lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, fused=True)),
    "Adam, lr 0": (False, lambda parameters: torch.optim.Adam(parameters, lr=0.0, capturable=True)),
    "AMSGrad": (False, lambda parameters: torch.optim.Adam(parameters, torch.tensor(0.1), amsgrad=True)),
    "SGD": (False, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True)),
    "Adagrad": (False, lambda parameters: torch.optim.Adagrad(parameters)),
    "RMSprop": (False, lambda parameters: torch.optim.RMSprop(parameters, centered=True)),
    "Rprop": (False, lambda parameters: torch.optim.Rprop(parameters)),
    "NAdam": (False, lambda parameters: torch.optim.NAdam(parameters)),
    "RAdam": (False, lambda parameters: torch.optim.RAdam(parameters)),
    "ASGD": (False, lambda parameters: torch.optim.ASGD(parameters)),
}
OF_LIBRARY = {
    **dict.fromkeys(("Lamb", "LARS", "Shampoo", "SOAP", "CAME", "StableAdamW", "NovoGrad", "Prodigy"), True),
    **dict.fromkeys(("Lion", "AdaBelief", "Tiger", "ScheduleFreeAdamW", "AdEMAMix", "Adan"), False),
}


class Muon(torch.optim.Optimizer):
    """Orthogonalizes matrices."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            u, _, vh = torch.linalg.svd(parameter.grad, full_matrices=False)
            parameter.data -= 0.1 * u @ vh


class NormalizedDescent(torch.optim.Optimizer):
    """Divides gradients by the norm of all of them."""

    def step(self) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.square().sum() for p in parameters]).sum().sqrt()
        for parameter in parameters:
            parameter.data -= 0.1 * parameter.grad / norm


class Sharpness(torch.optim.Optimizer):
    """Computes gradients at weights that are changed by a multiple of the norm of all gradients."""

    def __init__(self, parameters: Any, is_relative: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner, self.is_relative = torch.optim.SGD(self.param_groups, lr=0.1), is_relative
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        parameters = [p for group in self.param_groups for p in group["params"]]
        scaled = [(p.abs() if self.is_relative else 1.0) * p.grad for p in parameters]
        norm = torch.stack([each.square().sum() for each in scaled]).sum().sqrt()
        changes = [
            (p.abs() if self.is_relative else 1.0) * each / norm
            for p, each in zip(parameters, scaled, strict=True)
        ]
        for parameter, change in zip(parameters, changes, strict=True):
            parameter.add_(change)
        closure()
        for parameter, change in zip(parameters, changes, strict=True):
            parameter.sub_(change)
        self.inner.step()


class Averaging(torch.optim.Optimizer):
    """Steps another optimizer, whose groups it has, and moves the weights half of the way."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults, self.state = inner, inner.defaults, inner.state
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [parameter.clone() for parameter in parameters]
        self.inner.step()
        for parameter, weight in zip(parameters, before, strict=True):
            parameter.lerp_(weight, 0.5)


class Noise(torch.optim.Optimizer):
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data -= 0.1 * torch.randn_like(parameter)


class Outside(torch.optim.SGD):
    """Keeps its parameters in an attribute."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.known = {"all": self.param_groups[0]["params"]}

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.known["all"]:
            parameter.data.zero_()


def test_optimizers_that_need_norms_or_matrices_are_found() -> None:
    library = pytest.importorskip("pytorch_optimizer")
    kinds = {name: (is_whole, getattr(library, name)) for name, is_whole in OF_LIBRARY.items()}
    own = {
        "own Muon": (True, lambda parameters: Muon(parameters, {"lr": 0.1})),
        "noise": (False, lambda parameters: Noise(parameters, {"lr": 0.1})),
        "outside": (False, Outside),
        "sharpness": (True, lambda parameters: Sharpness(parameters, False)),
        "relative sharpness": (True, lambda parameters: Sharpness(parameters, True)),
        "averaging": (False, lambda parameters: Averaging(torch.optim.AdamW(parameters, 0.1))),
        "SAM": (True, lambda parameters: library.SAM(parameters, torch.optim.SGD, lr=0.1)),
    }
    wrong = []
    for name, (is_whole, make) in {**OPTIMIZERS, **kinds, **own}.items():
        model = nn.Linear(3, 2)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        random_state = torch.get_rng_state()
        optimizer = make(list(model.parameters()))
        if name.startswith("Adam"):
            torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces the method `step`
        found = needs_whole_parameters(optimizer)
        is_unchanged = (
            all(map(torch.equal, before, model.parameters()))
            and torch.equal(torch.get_rng_state(), random_state)
            and (not optimizer.state or name == "Adagrad")
        )
        if found != is_whole or not is_unchanged:
            wrong.append((name, found, is_unchanged))
    assert not wrong


def test_optimizers_that_need_the_norm_of_all_gradients_are_found() -> None:
    library = pytest.importorskip("pytorch_optimizer")
    own = {
        "own norm": lambda parameters: NormalizedDescent(parameters, {"lr": 0.1}),
        "own Muon": lambda parameters: Muon(parameters, {"lr": 0.1}),
        "sharpness": lambda parameters: Sharpness(parameters, False),
        "averaging": lambda parameters: Averaging(torch.optim.AdamW(parameters, 0.1)),
        "noise": lambda parameters: Noise(parameters, {"lr": 0.1}),
    }
    kinds = {name: make for name, (_, make) in OPTIMIZERS.items()}
    kinds |= {name: getattr(library, name) for name in OF_LIBRARY} | own
    found = {
        name for name, make in kinds.items() if needs_all_parameters(make(list(nn.Linear(3, 2).parameters())))
    }
    assert found == {"LBFGS", "Prodigy", "own norm", "sharpness"}


class Counting(torch.optim.Optimizer):
    """Counts its steps in tensors and lists, which it changes in place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"num_steps": torch.tensor(0)})
        self.known = {"num_steps": torch.tensor(0), "all": []}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for counts in (group, self.known):
            counts["num_steps"] += 1
        self.known["all"].append(self.known["num_steps"])  # type: ignore[union-attr]
        for parameter in group["params"]:
            parameter.sub_(parameter.grad / group["num_steps"])


def test_trials_change_no_counters_of_an_optimizer() -> None:
    optimizer = Counting(nn.Linear(3, 2).parameters())
    assert not needs_all_parameters(optimizer)
    assert not needs_whole_parameters(optimizer)
    assert not optimizer.param_groups[0]["num_steps"]
    assert optimizer.known == {"num_steps": torch.tensor(0), "all": []}
