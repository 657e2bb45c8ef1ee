"""Seeds and states of random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from accelerate import rng
from accelerate.base import ConfigurationError, RNGType
from accelerate.devices import CpuBackend, hardware_table
from accelerate.ops import Transport
from accelerate.state import PartialState

pytestmark = pytest.mark.usefixtures("states")


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the generators and torch's switches back."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    switches = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = switches


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_same_seed_gives_the_same_numbers() -> None:
    rng.set_seed(42)
    first = draw()
    assert draw() != first
    rng.set_seed(np.int64(42))
    assert draw() == first
    rng.set_seed(43)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_no_state_is_made_for_a_plain_seed() -> None:
    rng.set_seed(1)
    assert PartialState._shared_state == {}


def test_each_process_may_have_its_own() -> None:
    rng.set_seed(10)
    plain = draw()
    PartialState(cpu=True)
    drawn = []
    for rank in range(3):
        PartialState._shared_state.update(process_index=rank)
        rng.set_seed(10, device_specific=True)
        drawn.append(draw())
    assert drawn[0] == plain
    assert len(set(drawn)) == 3
    PartialState._shared_state.update(process_index=1)
    rng.set_seed(2**32 - 1, device_specific=True)
    wrapped = draw()
    rng.set_seed(0)
    assert draw() == wrapped


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "7", None, True])
def test_a_wrong_seed(seed: Any) -> None:
    with pytest.raises(ConfigurationError, match="seed=.*not a whole number from 0"):
        rng.set_seed(seed)


def test_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    rng.set_seed(3, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert rng.environ.current()["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    rng.set_seed(3, deterministic=True)
    assert rng.environ.current()["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


class FromRank0(Transport):
    """A second process, whose peer at rank 0 has a generator seeded with 99."""

    size = 2
    rank = 1

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        assert source == 0
        return tensor.copy_(torch.Generator().manual_seed(99).get_state())


@pytest.fixture
def second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState(cpu=True)
    monkeypatch.setattr(rng, "current_transport", FromRank0)


@pytest.mark.usefixtures("second_process")
@pytest.mark.parametrize("rng_type", ["torch", RNGType.TORCH])
def test_torch_follows_the_first_process(rng_type: RNGType | str) -> None:
    rng.synchronize_rng_state(rng_type)
    assert torch.initial_seed() == 99


@pytest.mark.usefixtures("second_process")
def test_a_generator_follows_the_first_process() -> None:
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(7)
    rng.synchronize_rng_states(["generator"], generator)
    assert generator.initial_seed() == 99
    assert torch.initial_seed() == 1
    other = torch.Generator().manual_seed(7)
    rng.synchronize_rng_state(generator=other)
    assert other.initial_seed() == 99


@pytest.mark.usefixtures("second_process")
def test_generators_of_unused_hardware_are_not_synchronized() -> None:
    torch.manual_seed(1)
    rng.synchronize_rng_states(["cuda", "xla", "npu"])
    assert torch.initial_seed() == 1


@pytest.mark.usefixtures("second_process")
def test_the_device_follows_the_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(7)
    PartialState._shared_state.update(device_backend=hardware_table.CUDA)
    monkeypatch.setattr(type(hardware_table.CUDA), "rng_state", lambda row: generator.get_state())
    monkeypatch.setattr(
        type(hardware_table.CUDA), "set_rng_state", lambda row, state: generator.set_state(state)
    )
    rng.synchronize_rng_state("cuda")
    assert generator.initial_seed() == 99


def test_one_process_keeps_its_states() -> None:
    PartialState(cpu=True)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rng.synchronize_rng_states(["torch", "generator"], torch.Generator())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: rng.synchronize_rng_state("dice"), "rng_type='dice': no such generator"),
        (lambda: rng.synchronize_rng_state("generator"), "pass generator="),
        (lambda: rng.synchronize_rng_state(), "pass generator="),
    ],
)
def test_wrong_generators(call: Any, text: str) -> None:
    PartialState(cpu=True)
    with pytest.raises(ConfigurationError, match=text):
        call()


def test_capture_and_restore() -> None:
    PartialState(cpu=True)
    states = rng.capture()
    assert set(states) == {"python", "numpy", "torch"}
    first = draw()
    rng.restore(states)
    assert draw() == first
    rng.restore({"torch": states["torch"]})
    assert draw()[2] == first[2]


def test_the_state_of_the_device_belongs_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState(cpu=True)
    kept: list[torch.Tensor] = []
    PartialState._shared_state.update(device_backend=hardware_table.CUDA)
    monkeypatch.setattr(type(hardware_table.CUDA), "rng_state", lambda row: torch.tensor([1]))
    monkeypatch.setattr(type(hardware_table.CUDA), "set_rng_state", lambda row, state: kept.append(state))
    states = rng.capture()
    assert set(states) == {"python", "numpy", "torch", "cuda"}
    rng.restore(states)
    assert kept == [torch.tensor([1])]
    PartialState._shared_state.update(device_backend=hardware_table.CPU)
    with pytest.raises(ConfigurationError, match=r"states=\['cuda'\]: this process, which computes on CPU"):
        rng.restore(states)


def test_the_device_is_seeded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(CpuBackend, "seed", lambda row, n: seeds.append(n))
    PartialState(cpu=True)
    rng.set_seed(8)
    assert seeds == [8]
