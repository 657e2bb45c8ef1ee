"""Training on torch_xla's CPU device, the real one. Needs the package torch_xla, and the torch of it.

Each case runs in a process of its own: the runtime starts once in a process, and keeps its settings.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("torch_xla")

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed

options = json.loads(sys.argv[1])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def data():
    tokens = torch.arange(48).reshape(24, 2) % 8
    return DataLoader(TensorDataset(tokens, (tokens * 3 + 1) % 8), batch_size=8)


def train(accelerator, epochs=2):
    set_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data())
    losses = []
    for _ in range(epochs):
        for tokens, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return model, optimizer, losses


fields = options.pop("fsdp", None)
folder = options.pop("folder", None)
plugin = None if fields is None else FullyShardedDataParallelPlugin(**fields)
accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2, **options)
model, optimizer, losses = train(accelerator)
answer = {
    "losses": losses,
    "device": str(accelerator.device),
    "label": str(accelerator.distributed_type.value),
    "strategy": type(accelerator._runtime.strategy).__name__,
    "devices": sorted({p.device.type for p in model.parameters()}),
    "updates": optimizer.num_updates,
}
if folder:
    answer["tied"] = model.head.weight is model.embedding.weight
    accelerator.save_state(folder + "/state")
    accelerator.save_model(model, folder + "/model")
    accelerator.save(model.state_dict(), folder + "/plain.safetensors", safe_serialization=True)
    from safetensors.torch import load_file
    plain = load_file(folder + "/plain.safetensors")
    answer["written"] = all(torch.equal(v.cpu(), plain[n]) for n, v in model.state_dict().items())
    accelerator.save_state(folder + "/later", blocking=False)
    accelerator.wait_for_checkpoint()
    moments = [v["exp_avg"].cpu().clone() for v in optimizer.state.values()]
    before = {n: v.clone() for n, v in accelerator.get_state_dict(model).items()}
    answer["saved_on"] = sorted({v.device.type for v in before.values()})
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer.optimizer.state.clear()
    accelerator.load_state(folder + "/later")
    answer["moments"] = all(
        torch.equal(v["exp_avg"].cpu(), m) for v, m in zip(optimizer.state.values(), moments, strict=True)
    )
    accelerator.load_state(folder + "/state")
    after = accelerator.get_state_dict(model)
    answer["restored"] = all(torch.equal(before[n], after[n]) for n in before)
    answer["names"] = sorted(before)
print("ANSWER " + json.dumps(answer))
"""


def run(tmp_path: Path, devices: int = 1, cpu: bool = False, **options: Any) -> dict[str, Any]:
    import os

    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps({"cpu": cpu, **options})],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(lines[0].removeprefix("ANSWER ")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same on the CPU, without torch_xla."""
    return run(tmp_path_factory.mktemp("plain"), cpu=True)


WAYS: dict[str, tuple[dict[str, Any] | None, int, str]] = {
    "replica": (None, 1, "XlaReplicas"),
    "fsdp 2, one unit, 4 devices": ({"fsdp_version": 2}, 4, "XlaFullyShard"),
    "fsdp 2, blocks, 4 devices": (
        {
            "fsdp_version": 2,
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": ["Block"],
        },
        4,
        "XlaFullyShard",
    ),
    "fsdp 2, recomputing": (
        {
            "fsdp_version": 2,
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": ["Block"],
            "activation_checkpointing": True,
        },
        4,
        "XlaFullyShard",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_the_cpu(way: str, plain: dict[str, Any], tmp_path: Path) -> None:
    fsdp, devices, strategy = WAYS[way]
    answer = run(tmp_path, devices, fsdp=fsdp, folder=str(tmp_path))
    assert answer["losses"] == pytest.approx(plain["losses"], rel=1e-4, abs=1e-4)
    assert (answer["device"], answer["label"], answer["strategy"]) == ("xla:0", "XLA", strategy)
    assert answer["devices"] == ["xla"]
    assert answer["updates"] == plain["updates"]
    assert answer["tied"]
    assert answer["saved_on"] == ["cpu"]
    assert answer["restored"]
    assert answer["moments"]
    assert answer["written"]
    assert not [name for name in answer["names"] if "orig" in name]


def test_fsdp_1_trains(plain: dict[str, Any], tmp_path: Path) -> None:
    units = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    answer = run(tmp_path, fsdp={"fsdp_version": 1, **units})
    assert answer["strategy"] == "XlaFullySharded"
    assert answer["losses"] == pytest.approx(plain["losses"], rel=1e-4, abs=1e-4)


def test_bfloat16(plain: dict[str, Any], tmp_path: Path) -> None:
    answer = run(tmp_path, mixed_precision="bf16")
    assert answer["losses"] == pytest.approx(plain["losses"], rel=0.1, abs=0.1)
    assert answer["losses"] != plain["losses"]
