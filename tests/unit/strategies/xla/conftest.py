"""A torch_xla that records its calls, with tensors on the CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.state import Topology
from accelerate.strategies import Context


class FakeXla:
    """Notes calls, and averages with replicas that have the gradient 3 everywhere."""

    def __init__(self, size: int) -> None:
        self.calls: list[Any] = []
        self.size = size

    def all_reduce(self, how: str, tensors: list[torch.Tensor], scale: float) -> None:
        self.calls.append((how, len(tensors), scale))
        for tensor in tensors:
            tensor.add_(3.0 * (self.size - 1)).mul_(scale)

    def mark_sharding(self, tensor: torch.Tensor, mesh: Any, spec: Any) -> None:
        self.calls.append((tuple(tensor.shape), spec))


@pytest.fixture
def context(states: None) -> Context:
    """What a strategy is given in the first of four replicas whose device is the CPU."""
    given = Accelerator(cpu=True)._runtime.strategy.context
    return replace(given, topology=Topology(rank=0, size=4))


@pytest.fixture
def fake(context: Context, monkeypatch: pytest.MonkeyPatch) -> FakeXla:
    """Install it, for four replicas."""
    made = FakeXla(4)
    names = ("torch_xla", "torch_xla.core", "torch_xla.core.xla_model", "torch_xla.distributed")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules["torch_xla"].sync = lambda: made.calls.append("sync")
    modules["torch_xla.core.xla_model"].all_reduce = made.all_reduce
    spmd: Any = ModuleType("torch_xla.distributed.spmd")
    spmd.mark_sharding = made.mark_sharding
    spmd.xla_sharding = SimpleNamespace(
        mark_sharding=made.mark_sharding,
        apply_backward_optimization_barrier=lambda module: made.calls.append(type(module).__name__),
    )
    mesh = SimpleNamespace(size=lambda: 4)
    spmd.get_global_mesh = lambda: mesh
    runtime: Any = ModuleType("torch_xla.runtime")
    runtime.is_spmd = lambda: True
    fsdp: Any = ModuleType("torch_xla.distributed.fsdp")
    fsdp.checkpoint_module = lambda module: made.calls.append(("recompute", type(module).__name__)) or module
    for module in (*modules.values(), spmd, runtime, fsdp):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made
