"""Faults that a CPU does not show, planted one at a time: on the simulated device a test fails for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device import test_memory, test_training
from tests.simulated_device import module, sim

from accelerate.data_loader import loaders
from accelerate.devices import hardware_table
from accelerate.hooks import StreamTransfer
from accelerate.strategies import Strategy

pytestmark = pytest.mark.usefixtures("states")
Plant = Callable[[pytest.MonkeyPatch], None]


def no_wait_for_prefetched_weights(patch: pytest.MonkeyPatch) -> None:
    def receive(self: StreamTransfer, fetched: Any) -> Any:
        return fetched[0]

    patch.setattr(StreamTransfer, "receive", receive)


def prefetched_weights_not_recorded(patch: pytest.MonkeyPatch) -> None:
    def receive(self: StreamTransfer, fetched: Any) -> Any:
        torch.accelerator.current_stream().wait_event(fetched[1])
        return fetched[0]

    patch.setattr(StreamTransfer, "receive", receive)


def staging_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "synchronize", lambda device=None: None)


def batches_left_on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loaders, "choose_move", lambda device, non_blocking: None)


def optimizers_keep_old_parameters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Strategy, "place", lambda self, model: model.to(self.context.device))


def generators_not_seeded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(hardware_table.detect()), "set_rng_state", lambda self, state: None)


def cached_memory_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "empty_cache", lambda: None)


def weights_on_the_cpu_after_loading(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(hardware_table.detect()), "device", lambda self, index=None: torch.device("cpu"))


def prefetch(tmp_path: Path) -> None:
    test_memory.test_prefetched_weights_arrive_before_they_are_used(late="all", pinned=True)


def prefetch_ahead(tmp_path: Path) -> None:
    test_memory.test_prefetched_weights_arrive_before_they_are_used(late="default_streams", pinned=True)


def save_in_the_background(tmp_path: Path) -> None:
    test_training.test_a_state_saved_in_the_background_is_that_of_the_call(tmp_path / "state", late="all")


def train(tmp_path: Path) -> None:
    test_training.test_one_process(late="all", steps=1)


def resume_with_dropout(tmp_path: Path) -> None:
    test_training.test_dropout_continues_where_it_was(tmp_path)


def free(tmp_path: Path) -> None:
    test_memory.test_free_memory_gives_memory_of_the_device_back()


FAULTS: list[tuple[Plant, Callable[[Path], None]]] = [
    (no_wait_for_prefetched_weights, prefetch),
    (prefetched_weights_not_recorded, prefetch_ahead),
    (staging_not_waited_for, save_in_the_background),
    (batches_left_on_the_cpu, train),
    (optimizers_keep_old_parameters, train),
    (weights_on_the_cpu_after_loading, train),
    (generators_not_seeded, resume_with_dropout),
    (cached_memory_kept, free),
]


@pytest.mark.parametrize(("plant", "check"), FAULTS, ids=lambda value: value.__name__)
def test_a_planted_fault_is_found(
    plant: Plant, check: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        plant(patch)
        with pytest.raises((AssertionError, RuntimeError)):
            check(tmp_path)
    sim.set_late()
    with suppress(RuntimeError):  # a kernel that read what was not there may have failed
        torch.accelerator.synchronize()
    test_training.reset()


@pytest.mark.parametrize("check", sorted({check for _, check in FAULTS}, key=lambda check: check.__name__))
def test_nothing_is_found_without_a_fault(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)
