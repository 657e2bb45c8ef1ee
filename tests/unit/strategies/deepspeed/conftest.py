"""A fake deepspeed package that records its calls for tests."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.base import packages
from accelerate.strategies.deepspeed import building


class Engine(nn.Module):
    """Trains as an engine without ZeRO does, and records the calls."""

    def __init__(self, model: nn.Module, optimizer: Any, config: dict[str, Any]) -> None:
        super().__init__()
        self.module = model
        self.optimizer = optimizer
        self.config = config
        self.calls: list[Any] = []
        self.stage = config["zero_optimization"]["stage"]
        self.device = torch.device("cpu")
        self._config = SimpleNamespace(gradient_clipping=1.0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.calls.append(("boundary", is_boundary))

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.calls.append(("backward", kwargs))
        loss.backward()

    def step(self) -> None:
        self.calls.append("step")
        self.optimizer.step()
        for parameter in self.module.parameters():
            parameter.grad = None

    def get_global_grad_norm(self) -> Any:
        return getattr(self.optimizer, "norm", None)

    def zero_optimization_partition_weights(self) -> bool:
        return bool(self.stage == 3)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return bool(self.config["zero_optimization"].get("stage3_gather_16bit_weights_on_model_save"))

    def _zero3_consolidated_16bit_state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def compile(self, **kwargs: Any) -> None:
        self.calls.append(("compile", kwargs))


class Package(ModuleType):
    """`deepspeed` with one entry point."""

    DeepSpeedEngine = Engine
    DeepSpeedConfigError = type("DeepSpeedConfigError", (Exception,), {})

    def __init__(self) -> None:
        super().__init__("deepspeed")
        self.asked: list[dict[str, Any]] = []

    def initialize(self, **arguments: Any) -> tuple[Any, Any, None, Any]:
        self.asked.append(arguments)
        optimizer = arguments.get("optimizer")
        if optimizer is None and "model_parameters" in arguments:
            optimizer = torch.optim.SGD(arguments["model_parameters"], lr=0.1)
        if optimizer is not None:
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        make_rate = arguments.get("lr_scheduler")
        rate = None
        if make_rate is not None:
            rate = make_rate(optimizer)
        elif "scheduler" in arguments["config"]:
            rate = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return Engine(arguments["model"], optimizer, arguments["config"]), optimizer, None, rate


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, states: None) -> Package:
    """The stand-in, imported wherever `import deepspeed` is written."""
    stand_in = Package()
    monkeypatch.setitem(sys.modules, "deepspeed", stand_in)
    monkeypatch.setattr(packages, "require", lambda *_: None)
    monkeypatch.setattr(building, "begin", lambda context: None)
    return stand_in


@pytest.fixture
def start(package: Package) -> Any:
    """Builds an `Accelerator` with plugins."""

    def build(*plugins: DeepSpeedPlugin, **arguments: Any) -> Accelerator:
        given = plugins[0] if len(plugins) == 1 else dict(zip("abc", plugins, strict=False))
        return Accelerator(cpu=True, deepspeed_plugin=given or DeepSpeedPlugin(), **arguments)

    return build


@pytest.fixture
def parts() -> Any:
    """Builds a model, its optimizer and a loader of batches of four."""

    def build() -> SimpleNamespace:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
        return SimpleNamespace(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loader=torch.utils.data.DataLoader(data, batch_size=4),
        )

    return build
