"""Inputs of recomputed blocks that are offloaded by a simulated device, whose copies are late."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.samples.recomputed import LAYERS, PROGRAMS, WAYS, WIDTH, Block, batches_of, built, gradients_of
from tests.simulated_device import sim
from torch import Tensor, nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.strategies import activation_offload, recomputed_blocks
from accelerate.strategies.activation_offload import OffloadedTensor, StreamCopy, StreamTransfer
from accelerate.utils import ActivationCheckpointing

pytestmark = pytest.mark.usefixtures("states", "small_tensors")
Run = Callable[..., list[Any]]
HERE = torch.device("sim", 0)
LATE = ["none", "all", "default_streams"]


@pytest.fixture
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 4096)


def prepared(model: nn.Module, offload: bool = True) -> Any:
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(kwargs_handlers=[ActivationCheckpointing(offload=offload)])
    assert accelerator.device.type == "sim"
    return accelerator.prepare(model)


def run_program(program: str, way: str = "plain", offload: bool = True, late: str = "none") -> list[Tensor]:
    model, batches = prepared(built(way), offload), batches_of(HERE)
    sim.synchronize()
    sim.set_late(late)
    torch.manual_seed(5)
    PROGRAMS[program](model, batches)
    found = gradients_of(model)
    sim.set_late()
    return found


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_those_of_recomputation(program: str, late: str) -> None:
    for way in WAYS if program == "take_step" else ("plain",):
        expected = run_program(program, way, offload=False)
        assert same(run_program(program, way, late=late), expected), way


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("way", ["plain", "keywords", "repeated"])
def test_dropout_of_the_device_is_that_of_the_forward(
    monkeypatch: pytest.MonkeyPatch, way: str, is_known: bool
) -> None:
    # With this name torch restores the generator of the device.
    monkeypatch.setattr(sim, "_initialized", is_known, raising=False)
    found = []
    for handlers in ([], *([ActivationCheckpointing(offload=offload)] for offload in (False, True))):
        AcceleratorState._reset_state(True)
        model = Accelerator(kwargs_handlers=handlers).prepare(built(way))
        torch.manual_seed(5)
        PROGRAMS["take_step"](model, batches_of(HERE))
        found.append(gradients_of(model))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def use_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamCopy, "wait", lambda self: setattr(self, "_is_awaited", True))


def reuse_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamCopy, "__del__", lambda self: None)
    monkeypatch.setattr(OffloadedTensor, "release", lambda self: setattr(self, "_leaving", None))


def copy_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: Any, source: Tensor, target: Tensor, on_device: Tensor) -> StreamCopy:
        stream = self._streams.setdefault(HERE, sim.Stream(device=HERE))
        with sim.stream(stream):
            target.copy_(source, non_blocking=True)
            return StreamCopy(on_device, stream, sim.default_stream(HERE))

    monkeypatch.setattr(StreamTransfer, "_copy", copy)


@pytest.mark.parametrize(
    ("plant", "late"),
    [(use_without_waiting, "all"), (reuse_before_the_end, "all"), (copy_too_early, "default_streams")],
)
def test_late_copies_show_a_planted_race(monkeypatch: pytest.MonkeyPatch, plant: Any, late: str) -> None:
    expected = run_program("take_step")
    # Otherwise the comparison of recomputed values raises an error for the race.
    monkeypatch.setattr(recomputed_blocks, "check_of", lambda name: None)
    plant(monkeypatch)
    assert not same(run_program("take_step", late=late), expected)


def abandon_a_copy() -> Tensor:
    """Returns ones in memory that was that of a prefetched input until its graph was freed."""
    gc.collect()
    sim.empty_cache()
    model = prepared(nn.Sequential(*(Block() for _ in range(4))))
    model.insert(0, nn.Linear(WIDTH, WIDTH).to(HERE))
    batch = batches_of(HERE)[0]
    sim.synchronize()
    with sim.late():
        loss = model(batch).sum()
        torch.autograd.grad(loss, list(model[3].parameters()))  # prefetches the input of model[2]
        del loss
        ones = [torch.ones_like(batch) for _ in range(40)]
        sim.synchronize()  # the copy runs at last
        return torch.stack(ones).cpu()


def test_the_memory_of_an_abandoned_copy_is_not_reused_before_it_ends(monkeypatch: Any) -> None:
    assert abandon_a_copy().eq(1).all()
    monkeypatch.setattr(StreamCopy, "__del__", lambda self: None)
    assert not abandon_a_copy().eq(1).all()


def peak_of(offload: bool) -> tuple[int, Any]:
    """Returns the peak of a step on the device, and the plan."""
    gc.collect()
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(kwargs_handlers=[ActivationCheckpointing(offload=offload)])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(12)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch = torch.randn(4096, WIDTH)

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    plan = accelerator.plan_memory(net, optimizer, batch, loss_of, max_norm=None)
    model, optimizer = accelerator.prepare(net, optimizer)
    batch = batch.to(HERE)
    for _ in range(3):
        gc.collect()
        sim.synchronize()
        sim.reset_peak_memory_stats()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        peak = sim.memory_stats()["requested_bytes.all.peak"]  # without what cached blocks are larger
    return peak, plan


def test_the_peak_falls_by_the_inputs_as_planned() -> None:
    (plain, plan_of_plain), (offloaded, plan) = peak_of(False), peak_of(True)
    hidden = 4096 * WIDTH * 4
    assert offloaded == pytest.approx(plan.peak, rel=0.05)
    assert plain == pytest.approx(plan_of_plain.peak, rel=0.05)
    assert plain - offloaded > 8 * hidden  # at another moment, with two inputs on the device
    assert plan.host == 12 * hidden
    assert "inputs of recomputed blocks: offloaded" in str(plan)
    assert plan_of_plain.host == 0


def arguments_of(way: str) -> dict[str, Any]:
    if way.startswith("fsdp"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(way[4]),
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            use_orig_params=True,
            reshard_after_forward="FULL_SHARD" if way[4] == "1" else True,
            activation_checkpointing="flag" in way,
            activation_checkpointing_offload=way.endswith("offload"),
        )
        return {"fsdp_plugin": plugin}
    if way == "tp":
        return {"parallelism_config": ParallelismConfig(tp_size=2)}
    return {}


def train_as(way: str, offload: bool) -> tuple[dict[str, Tensor], int]:
    """Returns weights after two steps with late copies, and the number of copies to the host."""
    activation_offload.MIN_BYTES = 1024
    copies: list[int] = []
    to_host = StreamTransfer.to_host

    def count(self: StreamTransfer, tensor: Tensor) -> Any:
        copies.append(tensor.nbytes)
        return to_host(self, tensor)

    StreamTransfer.to_host = count  # type: ignore[method-assign]
    handlers = [] if "flag" in way else [ActivationCheckpointing(offload=offload)]
    name = f"{way} offload" if "flag" in way and offload else way
    accelerator = Accelerator(kwargs_handlers=handlers, **arguments_of(name))
    net = built()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    rank = 0 if way == "tp" else accelerator.process_index
    batches = batches_of(accelerator.device, 4)[2 * rank :][:2]
    sim.set_late("all")
    torch.manual_seed(rank)
    for batch in batches:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    return {name: value.cpu() for name, value in state.items()}, len(copies)


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "fsdp2 flag", "fsdp1", "tp"])
def test_strategies_train_as_with_recomputation(run: Run, way: str) -> None:
    on_device: Any = {"env": {"ACCELERATE_USE_CPU": None}}
    expected, found = (run(train_as, way, offload, **on_device) for offload in (False, True))
    for (weights, copies), (reference, none) in zip(found, expected, strict=True):
        assert copies == 2 * LAYERS
        assert none == 0
        assert weights.keys() == reference.keys()
        for name, value in reference.items():
            assert torch.equal(weights[name], value), name
