"""Models that the user has sharded train as on one process, with the meshes and placements that they have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.base import PreparationError

Run = Callable[..., list[Any]]
SAMPLES, BATCH = 24, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.narrow(torch.relu(self.wide(self.norm(x))))
        return x + hidden


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.base(x) + self.up(self.down(x))
        return hidden


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def apply_plan(model: Net, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})


def shard_units(model: Net, mesh: DeviceMesh | None, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def attach_adapters(model: Net) -> None:
    """Attaches adapters that start with other values on each rank."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    for block in model.blocks:
        block.wide = Adapted(block.wide)


def shard(model: Net, layout: str) -> None:
    size = dist.get_world_size()
    if layout == "units":
        shard_units(model, None)
    elif layout == "hybrid":
        shard_units(model, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "replicas of shards":  # the user averages over one dimension only
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
        shard_units(model, mesh["shard"])
    elif layout == "plan":
        apply_plan(model, init_device_mesh("cpu", (size,)))
    elif layout == "plan and replicas":
        apply_plan(model, init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "model"))["model"])
    elif layout == "plan outside":
        apply_plan(model, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("tp", "data"))["tp"])
    elif layout == "plan and units":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        apply_plan(model, mesh["tp"])
        shard_units(model, mesh["dp"], reshard_after_forward=False)
    elif layout == "one unit":
        fully_shard(model.blocks[1])
    elif layout == "two meshes":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
        fully_shard(model.blocks[0], mesh=mesh)
        fully_shard(model.blocks[1])
        fully_shard(model.head)


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def build(accelerator: Accelerator, layout: str, adapters: bool) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Net()
    if layout:
        shard(model, layout)
    if adapters:
        attach_adapters(model)
    rows = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    data = [(row, index % 3) for index, row in enumerate(rows)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=BATCH)  # type: ignore[arg-type]
    return accelerator.prepare(model, optimizer, loader)  # type: ignore[no-any-return]


def train(
    layout: str, adapters: bool = False, steps: int = 1, norm: float = 2.0, precision: str = "no"
) -> dict[str, Any]:
    """Trains on global batches of 8 samples, whatever the number of ranks, and returns what a user sees."""
    accelerator = Accelerator(
        gradient_accumulation_steps=steps, mixed_precision=precision, split_batches=True, cpu=True
    )
    model, optimizer, loader = build(accelerator, layout, adapters)
    norms, losses = [], []
    for _ in range(2):
        for rows, labels in loader:
            with accelerator.accumulate(model):
                logits = model(rows)
                loss = nn.functional.cross_entropy(logits, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5, norm)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    numbers = accelerator.prepare(DataLoader(range(13), batch_size=4))  # type: ignore[arg-type]
    state = accelerator.get_state_dict(model)
    return {
        "norms": norms,
        "losses": losses,
        "metrics": [n for batch in numbers for n in accelerator.gather_for_metrics(batch).tolist()],
        "weights": {name: whole(value) for name, value in model.state_dict().items()},
        "state": {name: value.shape for name, value in state.items()},
        "kinds": sorted({type(each).__name__ for each in model.modules()}),
    }


TWO = ["units", "plan", "one unit"]
FOUR = ["hybrid", "replicas of shards", "plan and replicas", "plan outside", "plan and units", "two meshes"]
CASES = [
    *((layout, 2, {}) for layout in TWO),
    ("units", 2, {"adapters": True, "steps": 2}),
    ("plan and units", 4, {"steps": 2}),
    *(
        pytest.param(layout, 4, options, marks=pytest.mark.slow)
        for layout in [*TWO, *FOUR]
        for options in ({}, {"adapters": True}, {"steps": 2}, {"norm": float("inf")})
    ),
]


@pytest.mark.parametrize(("layout", "processes", "options"), CASES)
def test_training_is_that_of_one_process(
    run: Run, layout: str, processes: int, options: dict[str, Any]
) -> None:
    (expected,) = run(train_with, "", options, processes=1)
    for found in run(train_with, layout, options, processes=processes, timeout=180):
        assert found["metrics"] == list(range(13))
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5, abs=1e-6)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)
        assert "DistributedDataParallel" not in found["kinds"]
        for name, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, atol=1e-5, rtol=1e-5)


def train_with(layout: str, options: dict[str, Any]) -> dict[str, Any]:
    return train(layout, **options)
