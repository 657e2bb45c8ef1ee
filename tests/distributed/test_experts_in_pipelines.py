"""Models whose layers and experts are on different ranks train as on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import is_torch_version
from accelerate.utils import ExpertParallelConfig, PipelineConfig

pytestmark = pytest.mark.skipif(is_torch_version("<", "2.13"), reason="pipelines need torch 2.13")
Run = Callable[..., list[Any]]
BATCH = 16


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(0.3 * torch.randn(4, 8, 16))
        self.down = nn.Parameter(0.3 * torch.randn(4, 16, 8))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            rows, choices = torch.where(chosen == expert)
            hidden = torch.relu(tokens[rows] @ self.up[expert]) @ self.down[expert]
            output = output.index_add(0, rows, (hidden * weights[rows, choices, None]).to(output.dtype))
        return output


class Layer(nn.Module):
    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.router = nn.Linear(8, 4, bias=False) if has_experts else None
        self.experts = Experts() if has_experts else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x + self.narrow(torch.relu(self.wide(x))))
        if self.router is None or self.experts is None:
            return x + tokens
        weights, chosen = torch.topk(torch.softmax(self.router(tokens), -1), 2)
        mixed: Tensor = self.experts(tokens, chosen, weights)
        return x + mixed


class Net(nn.Module):
    """Layers with experts after two layers without, which are whole stages of four."""

    tp_plan = {"layers.*.wide": "colwise", "layers.*.narrow": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index > 1) for index in range(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def are_experts(module: nn.Module) -> bool:
    return isinstance(module, Experts)


def make_accelerator(sizes: dict[str, int], schedule: str, has_fsdp: bool, **options: Any) -> Accelerator:
    if not sizes:
        return Accelerator(cpu=True, split_batches=True, **options)
    pipeline = PipelineConfig(schedule=schedule, microbatches=4)
    experts = ExpertParallelConfig(is_experts=are_experts)
    mesh = ParallelismConfig(**sizes, pp_handler=pipeline, ep_handler=experts)  # type: ignore[arg-type]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Layer"],
        cpu_ram_efficient_loading=False,
    )
    return Accelerator(
        cpu=True,
        split_batches=True,
        parallelism_config=mesh,
        fsdp_plugin=plugin if has_fsdp else None,
        **options,
    )


def train(
    sizes: dict[str, int], schedule: str, has_fsdp: bool, steps: int, folder: Path, saves: bool
) -> dict[str, Any]:
    accelerator = make_accelerator(sizes, schedule, has_fsdp, gradient_accumulation_steps=steps)
    torch.manual_seed(0)
    model: Any = Net()
    rows = torch.randn(4 * BATCH, 8, generator=torch.Generator().manual_seed(1))
    data = [(row, index % 3) for index, row in enumerate(rows)]
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader: Any = DataLoader(data, batch_size=BATCH)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if not saves:
        accelerator.load_state(str(folder))
    losses, norms = [], []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = accelerator.forward_backward(model, tuple(batch), F.cross_entropy)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss, "mean")))
    model.eval()
    with torch.no_grad():
        logits = torch.cat([accelerator.gather_for_metrics(model(rows)) for rows, _ in loader])
    if saves:
        accelerator.save_state(str(folder))
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return {"losses": losses, "norms": norms, "logits": logits, "state": state}


PP, EP = "pp_size", "ep_size"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "schedule", "has_fsdp", "steps"),
    [
        ({PP: 2, EP: 2}, "1f1b", False, 1),
        ({PP: 2, EP: 2}, "1f1b", True, 2),
        ({PP: 2, EP: 2}, "zbvzerobubble", False, 1),
        ({PP: 2, EP: 2}, "interleavedzerobubble", True, 1),
        ({PP: 2, EP: 2, "dp_replicate_size": 2}, "1f1b", False, 1),
        ({PP: 2, EP: 2, "dp_shard_size": 2}, "interleaved1f1b", True, 2),
        ({PP: 2, EP: 2, "tp_size": 2}, "gpipe", True, 1),
        ({PP: 4, EP: 2}, "1f1b", True, 1),
    ],
)
def test_training_is_that_of_one_process(
    run: Run, tmp_path: Path, sizes: dict[str, int], schedule: str, has_fsdp: bool, steps: int
) -> None:
    processes = 1
    for size in sizes.values():
        processes *= size
    (expected,) = run(train, {}, "", False, steps, tmp_path / "one", True, processes=1)
    (resumed,) = run(train, {}, "", False, steps, tmp_path / "one", False, processes=1)
    options = (sizes, schedule, has_fsdp, steps)
    for wanted, folder, saves in [(expected, "many", True), (resumed, "one", False)]:
        found = run(train, *options, tmp_path / folder, saves, processes=processes, timeout=240)
        for rank, each in enumerate(found):
            assert each["losses"] == pytest.approx(wanted["losses"], rel=1e-6, abs=1e-6)
            assert each["norms"] == pytest.approx(wanted["norms"], rel=1e-5, abs=1e-6)
            torch.testing.assert_close(each["logits"], wanted["logits"], atol=1e-5, rtol=1e-5)
            assert list(each["state"]) == ([] if rank else list(wanted["state"]))
            for name, value in each["state"].items():
                torch.testing.assert_close(value, wanted["state"][name], atol=1e-5, rtol=1e-5, msg=name)
    (again,) = run(train, {}, "", False, steps, tmp_path / "many", False, processes=1)
    assert again["losses"] == pytest.approx(resumed["losses"], rel=1e-5, abs=1e-5)
