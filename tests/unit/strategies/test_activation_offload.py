"""Offload of the inputs of recomputed blocks, with copies on the CPU that are recorded."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.samples import recomputed
from tests.samples.recomputed import LAYERS, PROGRAMS, ROWS, WAYS, WIDTH, batches_of, built, gradients_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accelerate import Accelerator
from accelerate.base import ConfigurationError
from accelerate.plugins import ActivationCheckpointing
from accelerate.state import AcceleratorState
from accelerate.strategies import activation_offload
from accelerate.strategies.activation_offload import ActivationOffload, Copy, is_offloadable, offload_to_host
from accelerate.strategies.recomputed_blocks import RecomputedForward, keep_activations, recompute
from accelerate.utils import TorchDynamoPlugin

pytestmark = pytest.mark.usefixtures("small_tensors")


@pytest.fixture
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 4096)


class Recorded:
    """Transfer between two tensors on the CPU, which notes copies and forwards of blocks."""

    events: list[str] = []

    def accepts(self, tensor: Tensor) -> bool:
        return type(tensor) is Tensor

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Copy]:
        self.events.append("out")
        return torch.empty_like(tensor).copy_(tensor), Copy(tensor)

    def to_device(self, tensor: Tensor, device: torch.device) -> Copy:
        self.events.append("back")
        return Copy(torch.empty_like(tensor).copy_(tensor))


@pytest.fixture
def events() -> Iterator[list[str]]:
    Recorded.events.clear()
    yield Recorded.events
    Recorded.events.clear()


def offloaded(model: nn.Module, **options: Any) -> nn.Module:
    blocks: Any = model.layers
    recompute(model, list(blocks), ActivationOffload(Recorded), **options)
    return model


def run(model: nn.Module, program: str) -> list[Tensor]:
    torch.manual_seed(5)
    PROGRAMS[program](model, batches_of())
    return gradients_of(model)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_recomputation(way: str, program: str, events: list[str]) -> None:
    plain = built(way)
    recompute(plain, list(plain.layers))
    expected = run(plain, program)
    found = run(offloaded(built(way)), program)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert "back" in events


def test_inputs_are_prefetched_one_block_ahead_and_the_last_ones_stay(events: list[str]) -> None:
    model = offloaded(built())
    for index, layer in enumerate(model.layers):
        layer.norm.register_forward_pre_hook(lambda *_, index=index: events.append(f"block {index}"))
    loss = model(batches_of()[0]).sum()
    assert events == [each for index in range(LAYERS) for each in ("out", f"block {index}")]
    events.clear()
    loss.backward()
    # The copy of the block before begins with a recomputation.
    assert events == [
        *(each for index in range(LAYERS - 1, 0, -1) for each in ("back", f"block {index}")),
        "block 0",
    ]


@pytest.mark.parametrize(("way", "copies"), [("shared", LAYERS), ("skip", LAYERS), ("parameter", LAYERS)])
def test_a_tensor_is_copied_once_for_several_blocks(way: str, copies: int, events: list[str]) -> None:
    model = offloaded(built(way))
    loss = model(batches_of()[0]).sum()
    assert events.count("out") == copies
    loss.backward()
    assert events.count("back") <= copies


def alive() -> int:
    """Number of tensors of the size of hidden states."""
    gc.collect()
    size = ROWS * WIDTH
    return len(
        {
            each.untyped_storage().data_ptr()
            for each in gc.get_objects()
            if type(each) is Tensor and each.numel() == size
        }
    )


def test_only_the_last_inputs_stay_on_the_device_until_backward(
    monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    monkeypatch.setattr(Recorded, "to_host", lambda self, tensor: (tensor.double(), Copy(tensor)))
    monkeypatch.setattr(Recorded, "to_device", lambda self, tensor, device: Copy(tensor.float()))
    model, batch = offloaded(built()), batches_of()[0]
    storages: list[Any] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        storages.append(torch.multiprocessing.reductions.StorageWeakRef(args[0].untyped_storage()))

    for layer in model.layers:
        layer.register_forward_pre_hook(note)
    loss = model(batch).sum()
    gc.collect()
    assert [each.expired() for each in storages] == [True] * (LAYERS - 1) + [False]
    loss.backward()
    del loss
    gc.collect()
    assert all(each.expired() for each in storages)
    storages.clear()
    model(batch)  # an evaluation with a graph
    gc.collect()
    assert all(each.expired() for each in storages)


@pytest.mark.parametrize("options", [{"save_operators": "matmul"}, {}], ids=str)
def test_operators_may_be_kept(options: dict[str, Any], events: list[str]) -> None:
    plain = built()
    recompute(plain, list(plain.layers), **options)
    assert all(map(torch.equal, run(offloaded(built(), **options), "take_step"), run(plain, "take_step")))


def test_an_input_that_is_changed_in_place_is_refused(events: list[str]) -> None:
    class Changing(recomputed.Net):
        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.embed(inputs)
            out: Tensor = self.layers[0](hidden)
            part = hidden[:2].detach()  # shares the memory
            del hidden
            part.zero_()
            return out

    torch.manual_seed(0)
    loss = offloaded(Changing())(batches_of()[0]).sum()
    with pytest.raises(ConfigurationError, match="an input of its forward has been changed in place"):
        loss.backward()


def test_inputs_that_stay() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    computed = weight * 2
    assert is_offloadable(computed)
    assert is_offloadable(computed.t())
    assert is_offloadable(computed.view(-1))
    assert not is_offloadable(weight)
    assert not is_offloadable(weight.view(-1))
    assert not is_offloadable(computed[:32])
    assert not is_offloadable(computed[:1].expand(64, 64))
    assert not is_offloadable(computed.detach())
    assert not is_offloadable(weight[:4, :4] * 2)  # tiny
    assert not is_offloadable(computed.to_sparse())


def test_copies_of_a_model_offload_apart(events: list[str]) -> None:
    model = offloaded(built())
    expected = run(model, "take_step")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        first, second = model.layers[0].forward.offload, other.layers[0].forward.offload
        assert first is not second
        assert second is other.layers[1].forward.offload
        assert all(map(torch.equal, run(other, "take_step"), expected))


def test_a_block_inside_of_another_recomputation(events: list[str]) -> None:
    def outer(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(5)
        for batch in batches_of():
            checkpoint(model, batch, use_reentrant=False).square().sum().backward()
        return gradients_of(model)

    plain = built()
    recompute(plain, list(plain.layers))
    assert all(map(torch.equal, outer(offloaded(built())), outer(plain)))


def test_models_with_frozen_blocks_copy_only_what_a_backward_needs(events: list[str]) -> None:
    model = built()
    for module in (model.embed, *model.layers[:3]):
        module.requires_grad_(False)
    loss = offloaded(model)(batches_of()[0]).sum()
    assert events == ["out"]  # the input of the block after the first trained one
    loss.backward()
    assert events == ["out"]


@pytest.fixture
def prepared(states: None) -> Any:
    def prepare(model: nn.Module, **arguments: Any) -> Any:
        AcceleratorState._reset_state(True)
        handler = ActivationCheckpointing(offload=True)
        return Accelerator(cpu=True, kwargs_handlers=[handler], **arguments).prepare(model)

    return prepare


def test_a_run_on_the_cpu_recomputes_without_copies(prepared: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        model = prepared(built())
    forwards = [layer.forward for layer in model.layers]
    assert all(isinstance(forward, RecomputedForward) and forward.offload is None for forward in forwards)
    assert not caplog.records
    keep_activations(model)


def test_compiled_models_are_refused(prepared: Any) -> None:
    for arguments in ({"dynamo_backend": "eager"}, {"dynamo_plugin": TorchDynamoPlugin(backend="eager")}):
        with pytest.raises(ConfigurationError, match="offload=True: a compiled block"):
            prepared(built(), **arguments)
    model = built()
    model.layers[1].compile(backend="eager")
    with pytest.raises(ConfigurationError, match="offload=True: Net is compiled"):
        prepared(model)


def test_a_device_without_streams_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="offload=True: copies of the device mps"):
        offload_to_host(built(), torch.device("mps"))
