"""Lets Python that asks for CUDA devices run on the CPU; imported before `megatron`, by tests only."""

from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class Stream:
    """A stream, or an event, of a device that does one thing after the other."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *args: object) -> None: ...

    def record_event(self, event: Any = None) -> "Stream":
        return Stream()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class OnCpu(TorchFunctionMode):
    """Creates on the CPU what is to be created on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return args[0].type().replace("torch.", "torch.cuda.", 1)  # megatron.core compares names of types
        return func(*map(on_cpu, args) if func is torch.Tensor.to else args, **kwargs)


def on_cpu(value: Any) -> Any:
    is_device = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return CPU if is_device else value


class Generators(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


def install() -> None:
    """Change torch and `megatron.core` for the rest of this process."""
    cuda: Any = torch.cuda

    for name in ("synchronize", "set_device", "manual_seed", "manual_seed_all", "empty_cache", "_lazy_init"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.is_available = lambda: True
    torch.distributed.is_nccl_available = lambda: False
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: CPU
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_capability = lambda *args: (8, 0)
    cuda.get_device_properties = lambda *args: SimpleNamespace(major=8, minor=0, multi_processor_count=1)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.default_generators = Generators()
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: Stream()
    torch.accelerator.current_stream = lambda *args, **kwargs: Stream()  # type: ignore[assignment]
    cuda.stream = lambda stream: nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: None
    for name in ("FloatTensor", "IntTensor", "LongTensor", "ByteTensor", "HalfTensor", "BFloat16Tensor"):
        setattr(cuda, name, getattr(torch, name))
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    torch._dynamo.config.disable = True
    OnCpu().__enter__()
    import_module("megatron.core.jit").disable_jit_fuser()
    experts = import_module("megatron.core.transformer.moe.moe_utils")
    experts.te_general_gemm = getattr(
        experts, "te_general_gemm", None
    )  # 0.16 asks for it and does not define it
    generators = import_module("megatron.core.tensor_parallel.random")
    generators._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    generators._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
