"""Wrong calls raise the built-in class that callers of the interface catch, whatever class of ours it is."""

from __future__ import annotations

import builtins
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

CALLS: dict[str, str] = json.loads(Path(__file__).with_name("golden").joinpath("errors.json").read_text())
"""Wrong calls, and the name of the built-in class that each raises."""

MODULES = (
    "accelerate.utils",
    "accelerate.hooks",
    "accelerate.big_modeling",
    "accelerate.data_loader",
    "accelerate.inference",
    "accelerate.tracking",
    "accelerate.commands.config.config_args",
    "accelerate.commands.config.default",
    "accelerate.utils.dataclasses",
    "accelerate.utils.modeling",
    "accelerate.utils.offload",
    "accelerate.utils.operations",
    "accelerate.utils.other",
    "accelerate.utils.fsdp_utils",
    "accelerate.utils.bnb",
    "accelerate.utils.deepspeed",
    "accelerate.checkpointing",
    "accelerate.launchers",
    "accelerate.local_sgd",
    "accelerate.logging",
    "accelerate.optimizer",
    "accelerate.scheduler",
    "accelerate.state",
    "accelerate",
)


class Net(nn.Module):
    def __init__(self, width: int = 4, device: str | None = None) -> None:
        super().__init__()
        self.a = nn.Linear(width, width, device=device)
        self.b = nn.Linear(width, 2, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Stateful:
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def net(kind: Any = 4) -> Net:
    return Net(device="meta") if kind == "meta" else Net(kind)


def loader() -> Any:
    return DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=2)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(net().parameters(), lr=1.0)


def on_cpu(**settings: Any) -> Accelerator:
    return Accelerator(cpu=True, **settings)


def in_a_project(**settings: Any) -> Accelerator:
    project = ProjectConfiguration("project", automatic_checkpoint_naming=True, **settings)
    return on_cpu(project_config=project)


def in_training() -> Accelerator:
    accelerator, model = on_cpu(), net()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader())
    return accelerator


def out_of_memory(batch_size: int) -> None:
    raise RuntimeError("CUDA out of memory.")


def save_weights(path: str, extra: bool = False) -> None:
    save_file({**net().state_dict(), **({"extra": torch.ones(1)} if extra else {})}, path, {"format": "pt"})


def write(path: str, text: str) -> None:
    Path(path).write_text(text)


OBJECTS: dict[str, Any] = {
    "A": on_cpu,
    "P": in_a_project,
    "S": Stateful,
    "T": in_training,
    "W": save_weights,
    "BatchSampler": BatchSampler,
    "DataLoader": DataLoader,
    "loader": loader,
    "net": net,
    "oom": out_of_memory,
    "opt": optimizer,
    "os": os,
    "torch": torch,
    "write": write,
}


@pytest.fixture
def names(states: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("F_MAYBE", "maybe")
    monkeypatch.setenv("I_X", "x")
    monkeypatch.setenv("_", "x")  # a text in place of a list is read letter by letter; shells set this one
    known: dict[str, Any] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        known.update({each: getattr(module, each) for each in dir(module) if not each.startswith("_")})
    return {**known, **OBJECTS}


@pytest.mark.filterwarnings("ignore:The following device_map keys")  # the error comes after it
@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_raises_the_built_in_class_of_the_interface(call: str, names: dict[str, Any]) -> None:
    with pytest.raises(getattr(builtins, CALLS[call])):
        exec(call, names)
