"""Offloading, loading and memory on the simulated device, whose copies are late and whose memory is small."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.simulated_device import sim
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from accelerate.checkpointing import Payload, StagingMemory
from accelerate.data_loader import prepare_data_loader
from accelerate.tracking import read_snapshot, take_snapshot
from accelerate.utils import find_executable_batch_size
from accelerate.weights import PinnedBuffers, files

HERE = torch.device("sim", 0)
WIDTH, BLOCKS = 64, 8
LATE = ["none", "all", "default_streams"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.nn.functional.gelu(self.layer(x))) + x


def make_blocks() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divides weights of a few kilobytes into chunks that are copied through pinned memory."""
    monkeypatch.setattr(files, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(files, "STAGED_BYTES", 1024)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("pinned", [False, True])
def test_prefetched_weights_arrive_before_they_are_used(late: str, pinned: bool) -> None:
    model, x = make_blocks(), torch.randn(4, WIDTH)
    expected = model(x)
    state = {name: value.pin_memory() if pinned else value for name, value in model.state_dict().items()}
    offloaded = cpu_offload(copy.deepcopy(model), HERE, state_dict=state)
    sim.set_late(late)
    with torch.no_grad():  # else a forward keeps all weights for its backward
        for _ in range(4):  # the order of the blocks is known from the second forward on
            torch.testing.assert_close(offloaded(x).cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("late", LATE)
def test_weights_on_the_disk(tmp_path: Path, late: str) -> None:
    model, x = make_blocks(), torch.randn(4, WIDTH)
    expected = model(x)
    offloaded = disk_offload(model, str(tmp_path), HERE)
    sim.set_late(late)
    for _ in range(4):
        torch.testing.assert_close(offloaded(x).cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("late", LATE)
def test_tensors_that_are_copied_through_pinned_memory_are_whole(late: str) -> None:
    buffers, made = PinnedBuffers(), []
    sim.set_late(late)
    for number in range(12):
        dtype = (torch.float32, torch.bfloat16, torch.int64)[number % 3]
        source = (100 * torch.randn(200 + 700 * number)).to(dtype)
        expected, target = source.clone(), torch.zeros_like(source, device=HERE)
        buffers.copy(target, source)
        source.zero_()  # as the caller may free it
        made.append((target, expected))
    for target, expected in made:
        assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("late", LATE)
def test_staged_tensors_are_complete(late: str) -> None:
    memory = StagingMemory()
    for number in range(3):
        tensors = {"a": torch.randn(1000), "b": torch.arange(number, number + 500)}
        content = {"state": [tensor.to(HERE) for tensor in tensors.values()], "step": number}
        sim.set_late(late)
        (staged,) = memory.stage([Payload("x", content)])
        for tensor in content["state"]:
            tensor.zero_()
        assert staged.content["step"] == number
        for copied, expected in zip(staged.content["state"], tensors.values(), strict=True):
            assert torch.equal(copied, expected)


@pytest.mark.usefixtures("small_chunks", "states")
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_checkpoint_is_loaded_through_pinned_memory(tmp_path: Path, late: str, is_fresh: bool) -> None:
    sim.set_late(late)

    def prepared() -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
        accelerator = Accelerator()
        model = make_blocks()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def step(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        accelerator.backward(model(torch.ones(4, WIDTH, device=HERE)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    run = prepared()
    step(*run)
    run[0].save_state(tmp_path / "saved")
    expected = step(*run)
    if is_fresh:
        run = prepared()
    run[0].load_state(tmp_path / "saved")
    for own, right in zip(step(*run), expected, strict=True):
        assert torch.equal(own, right)


def test_a_model_over_two_devices_the_cpu_and_the_disk_under_a_limit(tmp_path: Path) -> None:
    model, x = make_blocks(), torch.randn(4, WIDTH)
    expected = model(x)
    places: list[Any] = [0, 0, 1, 1, "cpu", "cpu", "disk", "disk"]
    device_map = {str(index): place for index, place in enumerate(places)}
    of_block = sum(value.nbytes for value in model[0].state_dict().values())
    gc.collect()
    sim.empty_cache()
    for index in range(2):
        free, total = sim.mem_get_info(index)
        sim.set_memory_limit(index, total - free + 5 * of_block)  # all blocks would not fit
    spread = dispatch_model(model, device_map, main_device=0, offload_dir=str(tmp_path))
    with torch.no_grad():  # a backward would need all weights
        for _ in range(3):
            torch.testing.assert_close(spread(x).cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_that_move_without_blocking_are_whole(late: str, workers: int) -> None:
    rows = torch.arange(64 * 1000, dtype=torch.float32).view(64, 1000)
    loader = DataLoader(TensorDataset(rows), batch_size=4, pin_memory=True, num_workers=workers)
    prepared = prepare_data_loader(loader, HERE, put_on_device=True, non_blocking=True)
    sim.set_late(late)
    kept = [batch for (batch,) in prepared]
    assert torch.equal(torch.cat([batch.cpu() for batch in kept]), rows)


def test_the_batch_size_is_reduced_until_it_fits() -> None:
    sizes: list[int] = []
    sim.empty_cache()
    free, total = sim.mem_get_info()
    sim.set_memory_limit(0, total - free + (3 << 20))

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> int:
        sizes.append(batch_size)
        torch.ones(batch_size, 1 << 18, device=HERE).sum().item()
        return batch_size

    assert train() < 4
    assert sizes[0] == 16


@pytest.mark.usefixtures("states")
def test_free_memory_gives_memory_of_the_device_back() -> None:
    accelerator = Accelerator()
    gc.collect()  # what other tests have left
    sim.empty_cache()
    before, reserved = sim.memory_allocated(), sim.memory_reserved()
    model = accelerator.prepare(make_blocks())
    assert sim.memory_allocated() > before
    (model,) = accelerator.free_memory(model)
    assert sim.memory_allocated() == before
    accelerator.free_memory()  # until the call before returned, the caller still had the model
    assert sim.memory_reserved() <= reserved


def test_a_logged_tensor_keeps_its_value() -> None:
    value = torch.ones(1000, device=HERE)
    with sim.late():
        snapshot = take_snapshot({"loss": value})
        value.add_(1)
        assert read_snapshot(snapshot)["loss"].eq(1).all()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


def offload_by_hook(model: nn.Module) -> None:
    _, hook = cpu_offload_with_hook(model, HERE)
    model(torch.arange(3))
    hook.offload()


@pytest.mark.parametrize("move", [lambda model: dispatch_model(model, {"": 0}), offload_by_hook])
def test_tied_weights_stay_tied_when_a_model_moves(move: Any) -> None:
    model = Tied()
    expected = model(torch.arange(3))
    move(model)
    assert model.head.weight is model.embedding.weight
    torch.testing.assert_close(model(torch.arange(3, device=HERE)).cpu(), expected)
