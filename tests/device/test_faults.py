"""Faults that a CPU does not show, planted one at a time: on the simulated device a test fails for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract import test_strategy
from tests.device import test_generic_row, test_memory, test_training
from tests.simulated_device import module, sim
from torch import Tensor

from accelerate import Accelerator
from accelerate.data_loader import reading
from accelerate.devices import hardware_table
from accelerate.devices.stream_events import StreamEvents
from accelerate.hooks import StreamTransfer, align
from accelerate.nested import send_to_device
from accelerate.state import process_group
from accelerate.strategies import base, session
from accelerate.strategies.dtensors import shards
from accelerate.weights import PinnedBuffers, files

pytestmark = pytest.mark.usefixtures("states")
Run = Callable[..., list[Any]]
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
    patch.setattr(reading, "choose_move", lambda device, non_blocking, batch: None)


def optimizers_keep_old_parameters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session.PrepareSession, "change", lambda self, model, change: change(model))


def generator_not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(hardware_table.detect()), "set_rng_state", lambda self, state: None)


def cached_memory_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "empty_cache", lambda: None)


def model_left_on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(base, "move_module", lambda model, device: model)


def one_pinned_buffer_for_all_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files, "CHUNK_BYTES", 3000)
    patch.setattr(files, "STAGED_BYTES", 1024)
    buffer = torch.empty(files.CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
    patch.setattr(PinnedBuffers, "_free_buffer", lambda self: buffer)


def weights_kept_after_the_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(align.Slot, "clear", lambda self, **kwargs: None)


def inputs_left_where_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(align, "send_to_device", lambda data, *args, **kwargs: data)


def batches_moved_on_a_stream_without_a_wait(patch: pytest.MonkeyPatch) -> None:
    side = torch.Stream("sim")

    def choose_move(device: Any, non_blocking: bool, first: Any) -> Any:
        def move(batch: Any) -> Any:
            with side:
                return send_to_device(batch, device, non_blocking=True)

        return move

    patch.setattr(reading, "choose_move", choose_move)


def copies_to_the_host_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tensor, "cpu", lambda tensor: tensor.to("cpu", non_blocking=True))


def autocast_of_the_cpu(patch: pytest.MonkeyPatch) -> None:
    autocast = torch.autocast
    patch.setattr(torch, "autocast", lambda device, *args, **kwargs: autocast("cpu", torch.bfloat16))


def infinite_gradients_stepped(patch: pytest.MonkeyPatch) -> None:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step()

    patch.setattr(torch.amp.GradScaler, "step", step)


def generator_of_the_device_not_saved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(hardware_table.detect()), "rng_state", lambda self: torch.get_rng_state())


def device_not_selected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(hardware_table.detect()), "set_current", lambda self, index: None)


def logged_tensors_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tensor, "clone", lambda tensor: tensor)


def prefetch(tmp_path: Path) -> None:
    test_memory.test_prefetched_weights_arrive_before_they_are_used(late="all", pinned=True)


def prefetch_from_disk(tmp_path: Path) -> None:
    test_memory.test_weights_on_the_disk(tmp_path, late="all")


def load_a_checkpoint(tmp_path: Path) -> None:
    test_memory.test_a_checkpoint_is_loaded_through_pinned_memory(tmp_path, late="all", is_fresh=False)


def prefetch_ahead(tmp_path: Path) -> None:
    test_memory.test_prefetched_weights_arrive_before_they_are_used(late="default_streams", pinned=True)


def save_in_the_background(tmp_path: Path) -> None:
    # Without steps and without the events of the step clock, whose queries make the device continue, nothing
    # else makes the copies run before the file is written.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamEvents, "make", lambda self: None)
        saved, loaded = test_training.save_and_resume(tmp_path / "state", late="all", steps=0)
    assert loaded == saved


def train(tmp_path: Path) -> None:
    test_training.test_one_process(late="all", steps=1)


def resume_with_dropout(tmp_path: Path) -> None:
    test_training.test_dropout_continues_where_it_was(tmp_path)


def free(tmp_path: Path) -> None:
    test_memory.test_free_memory_gives_memory_of_the_device_back()


def device_map(tmp_path: Path) -> None:
    test_memory.test_a_model_over_two_devices_the_cpu_and_the_disk_under_a_limit(tmp_path)


def load(tmp_path: Path) -> None:
    test_memory.test_batches_that_move_without_blocking_are_whole(late="all", workers=0)


def train_in_bf16(tmp_path: Path) -> None:
    test_training.test_low_precision_is_near("bf16")


def skip_a_step(tmp_path: Path) -> None:
    test_training.test_a_step_with_infinite_gradients_is_skipped()


def choose_a_device(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_generic_row.test_one_of_its_devices_can_be_chosen(patch)


def log_in_the_background(tmp_path: Path) -> None:
    test_memory.test_a_logged_tensor_keeps_its_value()


def offloaded_shards_gathered_where_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shards, "to_full_tensor", lambda value: value.full_tensor())


def shared_and_whole_layers_updated_together(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session, "update_singly", lambda optimizer: False)


def collectives_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    reduce = torch.distributed.all_reduce
    patch.setattr(
        torch.distributed, "all_reduce", lambda *args, **kwargs: reduce(*args, **{**kwargs, "async_op": True})
    )


def barrier_of_no_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(process_group, "wait", lambda device: torch.distributed.barrier())


def every_rank_on_the_first_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(hardware_table.detect()), "device", lambda self, index: torch.device("sim", 0))


FAULTS: list[tuple[Plant, Callable[[Path], None]]] = [
    (no_wait_for_prefetched_weights, prefetch),
    (prefetched_weights_not_recorded, prefetch_ahead),
    (staging_not_waited_for, save_in_the_background),
    (batches_left_on_the_cpu, train),
    (optimizers_keep_old_parameters, train),
    (model_left_on_the_cpu, train),
    (copies_to_the_host_not_waited_for, load),
    (autocast_of_the_cpu, train_in_bf16),
    (infinite_gradients_stepped, skip_a_step),
    (one_pinned_buffer_for_all_weights, prefetch_from_disk),
    (one_pinned_buffer_for_all_weights, load_a_checkpoint),
    (weights_kept_after_the_forward, device_map),
    (inputs_left_where_they_are, device_map),
    (batches_moved_on_a_stream_without_a_wait, load),
    (generator_of_the_device_not_saved, resume_with_dropout),
    (device_not_selected, choose_a_device),
    (logged_tensors_not_copied, log_in_the_background),
    (generator_not_restored, resume_with_dropout),
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


def train_offloaded() -> None:
    plugin, mesh, _ = test_strategy.WAYS["fsdp2 offload"]
    test_strategy.train(plugin, mesh)


def train_shared_layers() -> None:
    plugin, mesh, _ = test_strategy.WAYS["tp"]
    test_strategy.train(plugin, mesh)


def reduce() -> None:
    accelerator = Accelerator()
    sim.set_late("all")
    for number in range(1, 4):
        own = torch.full((1000,), float(number * accelerator.num_processes**accelerator.process_index))
        assert accelerator.reduce(own.to(accelerator.device)).cpu().eq(3 * number).all()


def wait() -> None:
    Accelerator().wait_for_everyone()


def train_ddp() -> None:
    test_training.train_as("ddp", late="none")


FAULTS_OF_TWO_RANKS: list[Any] = [
    pytest.param(offloaded_shards_gathered_where_they_are, train_offloaded, marks=pytest.mark.slow),
    pytest.param(shared_and_whole_layers_updated_together, train_shared_layers, marks=pytest.mark.slow),
    (collectives_not_waited_for, reduce),
    (barrier_of_no_device, wait),
    (every_rank_on_the_first_device, train_ddp),
]


def is_found(plant: Plant | None, check: Callable[[], None]) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        try:
            check()
        except (AssertionError, RuntimeError, UserWarning):
            return True
    return False


@pytest.mark.parametrize(("plant", "check"), FAULTS_OF_TWO_RANKS, ids=lambda value: value.__name__)
def test_a_fault_planted_on_two_ranks_is_found(run: Run, plant: Plant, check: Callable[[], None]) -> None:
    assert any(run(is_found, plant, check))
    assert not any(run(is_found, None, check))
