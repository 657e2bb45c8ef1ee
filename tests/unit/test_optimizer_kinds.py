"""Optimizers of other libraries, the real ones: trained, saved, resumed.

Needs the packages schedulefree, lomo-optim (with transformers), torchao and bitsandbytes; those that are not
installed are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("states"), pytest.mark.filterwarnings("ignore")]
STEPS = 6

KINDS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "schedule-free AdamW": ("schedulefree", lambda lib, p: lib.AdamWScheduleFree(p, lr=1e-2)),
    "schedule-free around SGD": (
        "schedulefree",
        lambda lib, p: lib.ScheduleFreeWrapper(torch.optim.SGD(p, lr=1e-2), momentum=0.9),
    ),
    "torchao AdamW8bit": ("torchao.optim", lambda lib, p: lib.AdamW8bit(p, lr=1e-2)),
    "torchao AdamW4bit": ("torchao.optim", lambda lib, p: lib.AdamW4bit(p, lr=1e-2)),
    "torchao AdamWFp8": ("torchao.optim", lambda lib, p: lib.AdamWFp8(p, lr=1e-2)),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", lambda lib, p: lib.AdamW8bit(p, lr=1e-2)),
}
BATCHES = torch.randn(STEPS, 8, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def inductor_writes_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's compiler, which torchao uses, leave its variable to be cleaned up."""
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")


def begin(make: Callable[[Any], Any], seed: int) -> tuple[Accelerator, nn.Module, Any]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    model, optimizer = accelerator.prepare(model, make(model))
    optimizer.train()
    return accelerator, model, optimizer


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, batches: torch.Tensor) -> float:
    for batch in batches:
        loss = (model(batch) - batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    package, choose = KINDS[kind]
    pytest.importorskip(package.split(".")[0])
    library = import_module(package)

    def make(model: nn.Module) -> Any:
        return choose(library, model.parameters())

    accelerator, model, optimizer = begin(make, seed=0)
    first = train(accelerator, model, optimizer, BATCHES[:1])
    last = train(accelerator, model, optimizer, BATCHES[1:])
    assert last < first
    assert optimizer.num_updates == STEPS

    accelerator, model, optimizer = begin(make, seed=0)
    train(accelerator, model, optimizer, BATCHES[:3])
    accelerator.save_state(tmp_path)
    accelerator, model, optimizer = begin(make, seed=7)
    accelerator.load_state(tmp_path)
    assert train(accelerator, model, optimizer, BATCHES[3:]) == last


def test_schedule_free_weights_differ_between_training_and_evaluation() -> None:
    library = pytest.importorskip("schedulefree")
    accelerator, model, optimizer = begin(lambda m: library.AdamWScheduleFree(m.parameters(), lr=1e-2), 0)
    train(accelerator, model, optimizer, BATCHES)
    trained = model[0].weight.detach().clone()
    optimizer.eval()
    assert not torch.equal(model[0].weight, trained)
    optimizer.train()
    torch.testing.assert_close(model[0].weight, trained)


@pytest.mark.parametrize("rate", [None, 0.05])
def test_lomo_trains_as_without_accelerate(rate: float | None) -> None:
    """Lomo alone: this version of AdaLomo keeps its states on a GPU only."""
    pytest.importorskip("transformers")
    make = pytest.importorskip("lomo_optim").Lomo
    accelerator, model, optimizer = begin(lambda m: make(m, lr=0.05), seed=0)
    assert accelerator.has_lomo_optimizer
    for batch in BATCHES:
        loss = (model(batch) - batch).square().mean()
        accelerator.backward(loss, **({} if rate is None else {"learning_rate": rate}))
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    plain = make(alone, lr=0.05)
    for batch in BATCHES:
        plain.fused_backward((alone(batch) - batch).square().mean(), 0.05)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    assert optimizer.num_updates == STEPS
