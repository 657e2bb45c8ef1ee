"""`torch.sim`: what `torch.cuda` offers, for the simulated device; most of it is `torch.accelerator`."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tests import simulated_device
from torch import Tensor

native = simulated_device.native
Stream = torch.Stream
Event = torch.Event

is_initialized = native.is_started
_is_in_bad_fork = native.is_in_bad_fork
device_count = native.device_count
current_device = native.current_device
set_memory_limit = native.set_memory_limit
_TOTAL = 2 << 30
count_launches = native.count_launches
atexit.register(native.shut_down)


def _index(device: Any = None) -> int:
    """Return the index of a device given as an index, a name, a `torch.device` or None."""
    if device is None:
        return int(current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(current_device()) if index is None else index


def is_available() -> bool:
    return bool(device_count() > 0)


def _lazy_init() -> None:
    if _is_in_bad_fork():
        raise RuntimeError(
            "Cannot re-initialize the simulated device in a forked subprocess: use the 'spawn' start method"
        )


def init() -> None:
    _lazy_init()


def set_device(device: Any) -> None:
    native.exchange_device(_index(device))


class device:  # noqa: N801 - as in torch.cuda
    """Make a device the current one in a block."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = native.exchange_device(self.index)

    def __exit__(self, *_: object) -> None:
        native.exchange_device(self.before)


def synchronize(device: Any = None) -> None:
    native.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_TYPE)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


_TYPE = torch._C._autograd.DeviceType.PrivateUse1.value if hasattr(torch._C._autograd, "DeviceType") else 20


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def seed() -> None:
    _generator(None).seed()


def initial_seed() -> int:
    return _generator(None).initial_seed()


def get_rng_state(device: Any = None) -> Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: Tensor, device: Any = None) -> None:
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def _generator(device: Any) -> torch.Generator:
    return native.default_generator(_index(device))  # type: ignore[no-any-return]


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    native.set_memory_limit(_index(device), int(fraction * _TOTAL))


def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Any = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: Any = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def memory_stats(device: Any = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


class Properties(NamedTuple):
    name: str
    total_memory: int


def get_device_properties(device: Any = None) -> Properties:
    return Properties("simulated device", mem_get_info(device)[1])


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


def set_late(late: str = "none") -> None:
    """Choose the streams whose kernels and copies run only when something waits for them.

    "none", "all", or "default_streams", so that the others run ahead of them.
    """
    native.set_late(getattr(native.Late, late))


@contextmanager
def late() -> Iterator[None]:
    """In this block, kernels and copies of all streams run only when something waits for them."""
    set_late("all")
    try:
        yield
    finally:
        set_late("none")


@contextmanager
def delayed(seconds: float) -> Iterator[None]:
    """In this block, each kernel and each copy begins this much later."""
    native.set_delay(seconds)
    try:
        yield
    finally:
        native.set_delay(0)


def _open_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return native.stage(dist.ProcessGroupGloo(store, rank, size, timeout))


dist.Backend.register_backend("simccl", _open_group, devices=["sim"])
