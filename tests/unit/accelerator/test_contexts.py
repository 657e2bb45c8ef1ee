"""Contexts of the accelerator on one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.stand_ins.streams import Stream
from torch.utils.data import DataLoader

from accelerate import Accelerator, ProfileKwargs
from accelerate.accelerator.contexts import set_even_batches
from accelerate.state import PartialState

pytestmark = pytest.mark.usefixtures("states")


def test_autocast_follows_the_run() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with accelerator.autocast():
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.bfloat16


def test_profile_writes_one_trace_per_rank(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))) as profiler:
        torch.ones(8) + 1
    assert any("add" in event.key for event in profiler.key_averages())
    assert (tmp_path / "profile_0.json").stat().st_size > 0


def test_profile_takes_the_handler_of_the_run(tmp_path: Path) -> None:
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[ProfileKwargs(record_shapes=True, activities=["cpu"])]
    )
    with accelerator.profile() as profiler:
        torch.ones(8) + 1
    assert profiler.record_shapes


def test_context_parallelism_is_absent_without_its_axis() -> None:
    accelerator = Accelerator(cpu=True)
    buffers = [torch.arange(4)]
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[0], no_restore_buffers=set(buffers)
    ):
        assert buffers[0].tolist() == [0, 1, 2, 3]


def test_even_batches_are_restored_after_the_block(caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)  # for the logger
    sampler = SimpleNamespace(even_batches=True)
    loaders = [SimpleNamespace(batch_sampler=sampler), DataLoader(Stream(4))]
    with set_even_batches(loaders, False):
        assert not sampler.even_batches
    assert sampler.even_batches
    assert "iterable datasets" in caplog.text
    with set_even_batches(loaders, None):
        assert sampler.even_batches


def test_get_state_dict_of_one_process_is_complete() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    with accelerator.unsharded(model):
        assert not model(torch.ones(1, 2)).requires_grad
    with accelerator.unsharded():
        assert accelerator.unwrap_model(model) is model
    assert model(torch.ones(1, 2)).requires_grad
