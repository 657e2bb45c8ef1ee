"""The simulated accelerator itself: what it must show for tests on it to find faults."""

from __future__ import annotations

import copy
import io
import os
import signal
import subprocess
import sys

import pytest
import torch
from tests.simulated_device import sim
from torch import nn

HERE = torch.device("sim", 0)
LATE = ["none", "all", "default_streams"]


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.GELU(),
        nn.Flatten(),
        nn.LayerNorm(144),
        nn.Linear(144, 3),
    )


@pytest.mark.parametrize("late", LATE)
def test_training_gives_the_numbers_of_the_cpu(late: str) -> None:
    sim.set_late(late)
    torch.manual_seed(0)
    on_host = small_net()
    on_device = copy.deepcopy(on_host).to(HERE)
    images, labels = torch.randn(16, 1, 8, 8), torch.randint(0, 3, (16,))
    for model, device in ((on_host, "cpu"), (on_device, HERE)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            nn.functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for left, right in zip(on_host.parameters(), on_device.parameters(), strict=True):
        torch.testing.assert_close(left, right.cpu(), atol=1e-5, rtol=1e-4)


def test_a_stream_that_does_not_wait_reads_what_was_there_before() -> None:
    source = torch.ones(1000).pin_memory()
    side, main = torch.Stream(HERE), torch.accelerator.current_stream()
    with sim.late():
        with side:
            copied = source.to(HERE, non_blocking=True)
        assert not (copied * 2).cpu().eq(2).all()
        main.wait_stream(side)
        assert (copied * 2).cpu().eq(2).all()


def test_a_pinned_buffer_that_is_written_too_early_changes_the_copy() -> None:
    buffer = torch.ones(1000).pin_memory()
    with sim.late():
        copied = buffer.to(HERE, non_blocking=True)
        buffer.fill_(7)
        assert copied.cpu().eq(7).all()


def test_a_copy_to_pinned_memory_is_late_until_someone_waits() -> None:
    target = torch.zeros(1000, pin_memory=True)
    with sim.late():
        target.copy_(torch.ones(1000, device=HERE), non_blocking=True)
        event = torch.accelerator.current_stream().record_event()
        assert target.eq(0).all()
        event.synchronize()
        assert target.eq(1).all()


def test_memory_of_the_host_that_is_not_pinned_is_copied_at_once() -> None:
    buffer = torch.ones(1000)
    with sim.late():
        copied = buffer.to(HERE, non_blocking=True)
        buffer.fill_(7)
        assert copied.cpu().eq(1).all()
    assert not buffer.is_pinned()
    assert buffer.pin_memory().is_pinned()


@pytest.mark.parametrize("records", [False, True])
def test_freed_memory_that_another_stream_uses_is_kept_only_where_it_is_recorded(records: bool) -> None:
    side = torch.Stream(HERE)
    with sim.late():
        used = torch.ones(1000, device=HERE)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            result = used + 1
        if records:
            used.record_stream(side)
        del used
        torch.zeros(1000, device=HERE)
        torch.accelerator.current_stream().synchronize()
        side.synchronize()
        assert bool(result.cpu().eq(2).all()) is records


def test_the_cpu_cannot_read_its_memory_by_accident() -> None:
    code = (
        "import ctypes, torch, tests.simulated_device; "
        "x = torch.ones(4, device='sim'); ctypes.c_float.from_address(x.data_ptr()).value"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGSEGV


def test_memory_is_limited_and_counted() -> None:
    sim.empty_cache()
    sim.reset_peak_memory_stats()
    before = sim.memory_allocated()
    kept = torch.empty(1 << 20, dtype=torch.uint8, device=HERE)
    del kept
    assert sim.max_memory_allocated() - before >= 1 << 20
    assert sim.memory_allocated() == before
    free, total = sim.mem_get_info()
    assert total == 2 << 30
    sim.set_memory_limit(0, total - free + (4 << 20))
    with pytest.raises(torch.OutOfMemoryError, match="SIM out of memory"):
        torch.empty(8 << 20, dtype=torch.uint8, device=HERE)
    torch.empty(4 << 20, dtype=torch.uint8, device=HERE)  # what was cached is given back for it


def test_each_device_has_a_generator_of_its_own() -> None:
    torch.manual_seed(4)
    first = torch.randn(3, device="sim:0")
    second = torch.randn(3, device="sim:1")
    assert torch.equal(first.cpu(), second.cpu())  # both were seeded alike
    host = torch.get_rng_state()
    state = sim.get_rng_state(0)
    drawn = torch.nn.functional.dropout(torch.ones(50, device="sim:0"))
    sim.set_rng_state(state, 0)
    assert torch.equal(drawn.cpu(), torch.nn.functional.dropout(torch.ones(50, device="sim:0")).cpu())
    assert torch.equal(torch.get_rng_state(), host)
    own = torch.Generator(device="sim:1").manual_seed(9)
    assert torch.equal(
        torch.rand(3, device="sim:1", generator=own).cpu(),
        torch.rand(3, generator=torch.Generator().manual_seed(9)),
    )


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match=r"found at least two devices, sim:0 and sim:1"):
        torch.ones(2, device="sim:0") + torch.ones(2, device="sim:1")
    with pytest.raises(RuntimeError, match=r"found at least two devices, sim:0 and cpu"):
        torch.ones(2, device="sim:0") + torch.ones(2)
    assert (torch.ones(2, device="sim:0").to("sim:1") + 1).cpu().tolist() == [2, 2]


def test_errors_of_arguments_are_raised_by_the_call() -> None:
    with sim.late(), pytest.raises(RuntimeError, match="size of tensor a"):
        torch.ones(2, device=HERE).add_(torch.ones(3, device=HERE))


def test_a_kernel_that_fails_later_is_reported_by_the_next_wait() -> None:
    with sim.late():
        torch.zeros(2, device=HERE)[torch.tensor([5], device=HERE)]
        with pytest.raises(RuntimeError, match="a kernel failed on simulated device 0.*out of bounds"):
            torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def test_autocast_and_the_gradient_scaler() -> None:
    x = torch.ones(2, 2, device=HERE)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("sim", dtype):
            assert (x @ x).dtype == dtype
            assert torch.nn.functional.softmax((x @ x), -1).dtype == torch.float32
    weight = nn.Parameter(torch.ones(3, device=HERE))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("sim")
    before = scaler.get_scale() if scaler.scale(weight.sum()) is not None else 0
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == before / 2
    assert weight.cpu().eq(1).all()


def test_events_measure_time() -> None:
    start, end = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    with sim.delayed(0.01):
        start.record()
        torch.ones(2, device=HERE).add_(1)
        end.record()
        end.synchronize()
    assert start.elapsed_time(end) >= 10


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_runs_on_it(backend: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(HERE)
    x = torch.ones(2, 4, device=HERE)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))


def test_tensors_are_saved_and_loaded_with_their_device() -> None:
    file = io.BytesIO()
    torch.save(torch.arange(3, device="sim:1"), file)
    file.seek(0)
    assert torch.load(file).device == torch.device("sim:1")
    file.seek(0)
    assert torch.load(file, map_location="cpu").tolist() == [0, 1, 2]


def test_a_fork_cannot_use_a_device_that_was_started() -> None:
    torch.ones(1, device=HERE)
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(1, device=HERE)
        except RuntimeError as error:
            os._exit(3 if "forked subprocess" in str(error) else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
