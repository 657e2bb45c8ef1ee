"""The contract of a device backend, for every row of the table, over a torch that records its calls."""

import logging
import sys
from types import SimpleNamespace

import pytest

from accelerate.base import ConfigurationError
from accelerate.devices import BACKENDS, CPU, CUDA, HPU, MPS, NPU, XLA

ACCELERATORS = [backend for backend in BACKENDS if backend not in (CPU, MPS, XLA)]


def ids(backend):
    return backend.name


@pytest.fixture(params=BACKENDS, ids=ids)
def backend(request):
    return request.param


@pytest.fixture(params=ACCELERATORS, ids=ids)
def accelerator(request):
    return request.param


def test_every_row_implements_the_interface(backend, fake_torch):
    assert backend.available()
    assert backend.count() in (1, 4)
    assert backend.current() in (0, 2)
    backend.device(0)
    backend.device()
    backend.set_current(1)
    backend.synchronize()
    backend.empty_cache()
    backend.seed(3)
    backend.set_rng_state(backend.rng_state())
    assert 0 < backend.free_memory(0) <= backend.total_memory(0)
    assert backend.supports("torch.float32") is True
    backend.grad_scaler(init_scale=4.0)


def test_devices_are_numbered_or_not(accelerator, fake_torch):
    accelerator.device(1)
    accelerator.device()
    assert fake_torch.calls == [("torch.device", accelerator.name, 1), ("torch.device", accelerator.name)]
    with pytest.raises(ConfigurationError, match="index=-1"):
        accelerator.device(-1)


def test_each_backend_builds_its_grad_scaler(accelerator, fake_torch):
    accelerator.grad_scaler(growth_interval=5)
    common = ("torch.amp.GradScaler", accelerator.name, ("growth_interval", 5))
    own = (f"{accelerator.module}.amp.GradScaler", ("growth_interval", 5))
    assert fake_torch.calls == [own if accelerator.own_scaler else common]


def test_bf16_support_is_that_of_the_module(accelerator, fake_torch):
    bf16 = sys.modules["torch"].bfloat16
    fake_torch.answers["is_bf16_supported"] = False
    sys.modules["torch"].__dict__["bfloat16"] = bf16  # one object, so that it equals itself
    assert accelerator.supports(bf16) is False
    fake_torch.answers["is_bf16_supported"] = True
    assert accelerator.supports(bf16) is True


def test_modules_without_a_cache_are_unchanged(accelerator, fake_torch, monkeypatch):
    accelerator.empty_cache()
    assert fake_torch.paths == [f"{accelerator.module}.empty_cache"]
    monkeypatch.setattr(type(accelerator), "torch_module", lambda self: object())
    accelerator.empty_cache()


def test_memory_without_support_of_the_driver(accelerator, fake_torch):
    def refuse(*args):
        raise RuntimeError("The device doesn't support querying the available free memory.")

    fake_torch.answers |= {"mem_get_info": refuse, "memory_reserved": 15}
    fake_torch.answers["get_device_properties"] = SimpleNamespace(total_memory=40)
    assert (accelerator.free_memory(1), accelerator.total_memory(1)) == (25, 40)


def test_other_errors_of_the_driver_are_raised(accelerator, fake_torch):
    def fail(*args):
        raise RuntimeError("out of memory")

    fake_torch.answers["mem_get_info"] = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        accelerator.free_memory(1)


def test_memory_of_modules_without_statistics(accelerator, monkeypatch):
    module = SimpleNamespace(
        get_device_properties=lambda index: SimpleNamespace(total_memory=40), memory_reserved=lambda index: 15
    )
    monkeypatch.setattr(type(accelerator), "torch_module", lambda self: module)
    assert (accelerator.free_memory(1), accelerator.total_memory(1)) == (25, 40)


@pytest.mark.parametrize(
    ("backend", "answer", "other", "hardware"),
    [
        (HPU, "get_device_name", "GAUDI2", "GAUDI"),
        (XLA, "xla_device_hw", "CUDA", "TPU"),
        (XLA, "xla_device_hw", "GPU", "CPU"),
    ],
)
def test_hardware_without_float16(backend, answer, other, hardware, fake_torch):
    float16 = sys.modules["torch"].float16
    fake_torch.answers[answer] = other
    assert backend.supports(float16)
    fake_torch.answers[answer] = hardware
    assert not backend.supports(float16)
    assert backend.supports(sys.modules["torch"].bfloat16)


def test_asking_for_cuda_starts_no_driver_and_leaves_no_variable(fake_torch, monkeypatch):
    from accelerate.base import current

    seen = []
    fake_torch.answers["is_available"] = lambda: seen.append(current().get("PYTORCH_NVML_BASED_CUDA_CHECK"))
    CUDA.available()
    assert seen == ["1"]
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in current()


def test_rows_without_their_extension_are_unavailable(backend):
    if backend.extension is None:
        assert backend.installed()
    else:
        assert not backend.installed()
        assert not backend.available()


def test_a_broken_extension_is_named_and_not_used(fake_torch, monkeypatch, tmp_path, caplog):
    (tmp_path / "torch_npu.py").write_text(
        "raise ImportError('libhccl.so: cannot open shared object file')\n"
    )
    monkeypatch.delitem(sys.modules, "torch_npu")
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert NPU.available() is False
    assert "torch_npu" in caplog.text
    assert "libhccl.so" in caplog.text


def test_the_processor_is_one_device_with_the_machines_memory():
    import torch

    assert (CPU.available(), CPU.count(), CPU.current()) == (True, 1, 0)
    assert CPU.device(3) == CPU.device() == torch.device("cpu")
    assert CPU.free_memory() <= CPU.total_memory()
    assert CPU.supports(torch.bfloat16)
    assert isinstance(CPU.grad_scaler(init_scale=8.0), torch.amp.GradScaler)


def test_the_processors_generator_is_torchs_own():
    import torch

    before = CPU.rng_state()
    CPU.seed(11)
    first = torch.rand(3)
    CPU.seed(11)
    assert torch.equal(torch.rand(3), first)
    CPU.set_rng_state(before)
    assert torch.equal(CPU.rng_state(), before)


def test_apples_gpu_has_no_double_precision():
    import torch

    assert not MPS.supports(torch.float64)
    assert MPS.supports(torch.float16)
