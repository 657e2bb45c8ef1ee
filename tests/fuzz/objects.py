"""Models, optimizers and registered objects that the schedules of `trial.py` train."""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


class Rows(nn.Module):
    """Embedding with sparse gradients."""

    def __init__(self, _: float) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 1, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        rows: Tensor = self.rows((inputs.abs().sum(-1) * 5).long() % 8)
        return rows


class Named(torch.optim.SGD):
    """Has states that belong to no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        own = self.state.setdefault("run", {"steps": 0, "decay": torch.ones(2)})  # type: ignore[call-overload]
        own["steps"] += 1
        own["decay"] *= 0.9
        self.state["k"] = torch.tensor([own["steps"]])  # type: ignore[index]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad *= 1 / (1 + 0.1 * own["steps"]) + float(own["decay"][0])
        return super().step(closure)


class Factored(torch.optim.Optimizer):
    """Has a state for each row of a parameter, and does not take a closure."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group["lr"])

    def update(self, parameter: Any, rate: float) -> None:
        state, square = self.state[parameter], parameter.grad.square() + 1e-6
        new = square.mean(-1, keepdim=True) if square.ndim > 1 else square
        state["rows"] = new if "rows" not in state else state["rows"] * 0.9 + new * 0.1
        state["plain"] = state.get("plain", torch.zeros(3)) + 1
        change = parameter.grad / state["rows"].sqrt() * rate / float(state["plain"].sum())
        if hasattr(change, "placements"):
            change = change.redistribute(placements=parameter.placements)
        parameter.sub_(change)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.02),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}
OTHERS: dict[str, Any] = {
    "named": lambda parameters: Named(parameters, 0.02, momentum=0.9),
    "rows": Factored,
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, 0.1, max_iter=3, history_size=3),
    "sparse": lambda parameters: torch.optim.SparseAdam(parameters, 0.01),
}
NEEDS_ONE_PROCESS = ("lbfgs", "sparse")


class Registered:
    """Registered object with values of many types, which change with each batch."""

    def __init__(self, number: int) -> None:
        self.state: dict[Any, Any] = {"count": 0, "number": number, "seen": [], "empty": b""}

    def update(self) -> None:
        """Changes all values, alike on all ranks, since rank 0 saves them for all."""
        state = self.state
        state["count"] += 1
        state["seen"].append((state["count"], "a"))
        number = zlib.crc32(repr(state["seen"]).encode())
        state["tensor"] = torch.full((2, 1), float(number), dtype=torch.float64)
        state["nested"] = {number: [None, True, 1.5, {"text": str(number)}], "bytes": bytes([number % 256])}
        state["numpy"] = np.arange(number % 5, dtype=np.int16)
        state["others"] = [{number}, OrderedDict(a=number), Counter(str(number)), 1j, torch.int8]

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state

    def checksum(self) -> float:
        return float(zlib.crc32(repr(self.state).encode()))
